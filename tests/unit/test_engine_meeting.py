"""Who may join a group, and who notices what becomes of the others."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider.engine import meeting
from outrider.engine.group import Seat
from outrider.engine.watch import Watch
from outrider.errors import FailedPrecondition, InvalidArgument, Unauthenticated, Unavailable

TOKEN = b"a secret"


class Room:
    """Rank 0 waiting for the others in the background."""

    def __init__(self, size=2, timeout_s=10.0, check=lambda: None):
        self.listener = meeting.listen("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self._pool = ThreadPoolExecutor(1)
        self.received = self._pool.submit(
            meeting.receive, self.listener, size, TOKEN, timeout_s=timeout_s, check=check
        )

    def join(self, rank=1, size=2, token=TOKEN, timeout_s=5.0):
        return meeting.join("127.0.0.1", self.port, Seat(rank, size), token, timeout_s=timeout_s)

    def close(self):
        self.listener.close()
        self._pool.shutdown()
        if not self.received.exception():
            for links in self.received.result()[0].values():
                close(links)


@pytest.fixture
def rooms():
    made = []

    def make(*args, **kwargs):
        made.append(Room(*args, **kwargs))
        return made[-1]

    yield make
    for room in made:
        room.close()


def close(links):
    for connection in links:
        connection.close()


def test_all_ranks_meet_and_have_their_own_connections_and_one_store(rooms):
    room = rooms(size=3)
    with ThreadPoolExecutor(2) as pool:
        places = list(pool.map(lambda rank: room.join(rank, 3), (2, 1)))
    links, store = room.received.result(5)
    assert sorted(links) == [1, 2]
    for place, rank in zip(places, (2, 1), strict=True):
        links[rank].steps.sendall(b"step")
        links[rank].watch.sendall(b"beat")
        assert place.links.steps.recv(9) == b"step" and place.links.watch.recv(9) == b"beat"
        place.store.set(f"from {rank}", "here")
        assert store.get(f"from {rank}") == b"here"
        close(place.links)
        close(links[rank])


def test_another_token_is_refused_by_both_sides(rooms, caplog):
    room = rooms(timeout_s=1.5)
    with pytest.raises(FailedPrecondition, match="it has another group token"):
        room.join(token=b"another secret")
    with pytest.raises(Unavailable, match=r"ranks \[1\] have not joined"):
        room.received.result(5)
    assert "a stranger was refused" in caplog.text
    assert TOKEN.decode() not in caplog.text and "another secret" not in caplog.text


def test_a_rank_does_not_trust_who_cannot_prove_the_token():
    """A stranger at rank 0's address who says welcome to everybody."""
    listener = meeting.listen("127.0.0.1", 0)

    def welcome():
        connection, _ = listener.accept()
        with connection:
            connection.recv(64)
            connection.sendall(b"n" * 32)
            connection.recv(64)
            connection.sendall(meeting._WELCOME.pack(1, 1, b"x") + b"p" * 32)

    thread = threading.Thread(target=welcome)
    thread.start()
    with pytest.raises(Unauthenticated, match="another group token"):
        meeting.join("127.0.0.1", listener.getsockname()[1], Seat(1, 2), TOKEN, timeout_s=2)
    thread.join()
    listener.close()


@pytest.mark.parametrize(
    ("seat", "told"),
    [
        ((1, 4), "it is rank 1 of 4, and the group has 2"),
        ((0, 2), "it is rank 0 of 2, and the group has 2"),
        ((2, 2), "it is rank 2 of 2"),
    ],
)
def test_a_rank_of_another_group_is_told_so(rooms, seat, told):
    room = rooms()
    with pytest.raises(FailedPrecondition, match=told):
        room.join(*seat)
    close(room.join().links)
    assert room.received.result(5)


def test_a_rank_that_is_there_already_is_refused_and_one_that_died_replaced(rooms):
    room = rooms(size=3)
    first = room.join(1, 3)
    with pytest.raises(FailedPrecondition, match="there is a rank 1 already"):
        room.join(1, 3)
    close(first.links)
    again = room.join(1, 3)
    last = room.join(2, 3)
    links, _ = room.received.result(5)
    links[1].steps.sendall(b"step")
    assert again.links.steps.recv(9) == b"step"
    for some in (again.links, last.links, *links.values()):
        close(some)


def test_strangers_cost_a_moment_and_nothing_else(rooms):
    room = rooms()
    with socket.create_connection(("127.0.0.1", room.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    place = room.join()
    links, _ = room.received.result(5)
    close(place.links)
    close(links[1])


def test_a_child_that_ended_ends_the_wait(rooms):
    def check():
        raise Unavailable("rank 1 ended with exit code 3")

    with pytest.raises(Unavailable, match="exit code 3"):
        rooms(check=check).received.result(5)


def test_a_rank_waits_for_rank_0_until_its_time_is_over():
    listener = meeting.listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    listener.close()
    started = time.monotonic()
    with pytest.raises(Unavailable, match="rank 1 does not get to rank 0"):
        meeting.join("127.0.0.1", port, Seat(1, 2), TOKEN, timeout_s=0.5)
    assert 0.4 < time.monotonic() - started < 5


def test_an_address_that_is_not_ours_is_refused():
    with pytest.raises(InvalidArgument, match=r"cannot listen on 203\.0\.113\.1:9") as refused:
        meeting.listen("203.0.113.1", 9)
    assert refused.value.field == "group_host"


class Pair:
    """The watches of rank 0 and rank 1; a reason each, once one is lost."""

    def __init__(self, timeout_s=0.4, explain=lambda rank: ""):
        self.ends = socket.socketpair()
        self.lost = [threading.Event(), threading.Event()]
        self.watches = [
            Watch(
                {1 - rank: connection},
                timeout_s=timeout_s,
                on_loss=lambda _, event=event: event.set(),
                explain=explain,
            )
            for rank, (connection, event) in enumerate(zip(self.ends, self.lost, strict=True))
        ]

    def close(self):
        for watch in self.watches:
            if watch._thread.ident is not None:
                watch._closing.set()
                watch._thread.join(5)
        for end in self.ends:
            end.close()


@pytest.fixture
def pairs():
    made = []

    def make(**kwargs):
        made.append(Pair(**kwargs))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def start(pair, *ranks):
    for rank in ranks:
        pair.watches[rank].start()
    pair.watches[0].arm()


def test_ranks_that_beat_are_left_alone_however_long_nothing_happens(pairs):
    pair = pairs()
    start(pair, 0, 1)
    time.sleep(1.0)
    assert not any(event.is_set() for event in pair.lost)


def test_an_end_is_noticed_at_once_and_explained(pairs):
    pair = pairs(timeout_s=30, explain=lambda rank: "was killed by SIGKILL")
    pair.watches[0].start()  # Not armed: a death counts from the beginning.
    pair.ends[1].close()
    assert pair.watches[0].verdict(2) == "rank 1 is gone: it was killed by SIGKILL"
    assert pair.lost[0].wait(1)


def test_silence_counts_once_all_is_loaded(pairs):
    pair = pairs()
    pair.watches[0].start()
    assert pair.watches[0].verdict(0.8) == ""
    pair.watches[0].arm()
    started = time.monotonic()
    assert pair.watches[0].verdict(3) == "rank 1 has not answered for 0.4 s"
    assert 0.3 < time.monotonic() - started < 1.5


def test_rank_0_says_to_the_others_when_silence_counts(pairs):
    pair = pairs()
    pair.watches[1].start()
    pair.ends[0].sendall(b"-")
    assert pair.watches[1].verdict(0.8) == ""
    pair.ends[0].sendall(b".")
    assert pair.watches[1].verdict(3) == "rank 0 has not answered for 0.4 s"


def test_the_cause_is_told_before_the_end(pairs):
    pair = pairs()
    start(pair, 0, 1)
    pair.watches[1].say_why("OutOfMemoryError: 3 GiB more")
    assert pair.watches[0].verdict(2) == "rank 1 failed: OutOfMemoryError: 3 GiB more"


def test_a_pass_that_does_not_end_is_a_loss(pairs):
    pair = pairs(timeout_s=30)
    pair.watches[0].start()
    pair.watches[0].arm(longest_pass_s=0.3)
    with pair.watches[0].passing():
        time.sleep(0.1)
    assert pair.watches[0].verdict(0.5) == ""
    with pair.watches[0].passing():
        assert "a pass has not ended for 0.3 s" in pair.watches[0].verdict(2)


def test_a_good_bye_is_no_loss(pairs):
    pair = pairs()
    start(pair, 0, 1)
    pair.watches[0].close()
    pair.watches[1]._thread.join(2)
    assert not pair.watches[1]._thread.is_alive()
    assert not any(event.is_set() for event in pair.lost)
