"""Seats at targets and drafts: room, moves, and what others have there."""

import pytest
from seat_fakes import Clock, FakeRegistry, demand, restart, worker

from outrider.errors import Unavailable
from outrider.v1 import worker_pb2
from services.orchestrator.discovery.endpoints import Standing
from services.orchestrator.seating import Room, Seating
from services.orchestrator.seats import Seat
from services.orchestrator.workers import Others, Worker


class Scene:
    """A seating over workers that a test makes what it wants."""

    def __init__(self, targets: int = 2, drafts: int = 0, **room) -> None:
        self.clock = Clock()
        self.registry = FakeRegistry()
        self.targets = [worker(f"t{n}", 100 + n) for n in range(targets)]
        self.drafts = [worker(f"d{n}", 200 + n) for n in range(drafts)]
        self.registry.targets.workers = self.targets
        self.registry.drafts.workers = self.drafts
        self.seating = Seating(self.registry, Room(**room), now=self.clock)

    def seat(self, **kind) -> Seat:
        seat = self.seating.try_seat(demand(**kind))
        assert seat is not None
        return seat

    def says(self, one: Worker, **vitals) -> None:
        one.link.vitals = worker_pb2.WatchResponse(**vitals)
        one.link.vitals_at = self.clock.now
        one.note_vitals()


# --- room ---------------------------------------------------------------------------------------


def test_sessions_spread_and_are_counted_until_they_leave():
    scene = Scene(targets=3)
    seats = [scene.seat() for _ in range(9)]
    assert [t.sessions for t in scene.targets] == [3, 3, 3]
    assert [t.tokens for t in scene.targets] == [300] * 3
    for seat in seats:
        seat.leave()
        seat.leave()  # a second time changes nothing
    assert [(t.sessions, t.tokens) for t in scene.targets] == [(0, 0)] * 3


def test_a_target_is_full_by_sessions_rows_or_kv():
    by_sessions = Scene(targets=1, max_sessions=2)
    assert [by_sessions.seating.try_seat(demand(1)) is not None for _ in range(3)] == [1, 1, 0]
    by_rows = Scene(targets=1)
    by_rows.targets[0].link.info.max_rows = 3
    assert [by_rows.seating.try_seat(demand(1)) is not None for _ in range(4)] == [1, 1, 1, 0]
    by_kv = Scene(targets=1)  # 1,000 tokens
    first = by_kv.seat(tokens=600)
    assert by_kv.seating.try_seat(demand(401)) is None
    assert by_kv.seating.try_seat(demand(400)) is not None
    first.leave()
    assert by_kv.seating.try_seat(demand(600)) is not None
    generous = Scene(targets=1, kv_overcommit=2.0)
    generous.seat(tokens=1000)
    assert generous.seating.try_seat(demand(1000)) is not None


def test_what_never_fits_is_left_to_the_target_to_refuse():
    scene = Scene(targets=1)
    assert scene.seating.try_seat(demand(5000)) is not None


def test_what_others_have_counts_as_long_as_it_is_fresh():
    scene = Scene(targets=1, max_sessions=4)
    target = scene.targets[0]
    target.others = Others(sessions=3, tokens=10, until=scene.clock.now + 3)
    scene.seat()
    assert scene.seating.try_seat(demand()) is None
    scene.clock.now += 3.1
    assert scene.seating.try_seat(demand()) is not None


def test_without_a_word_from_others_the_worker_says_how_many_are_there():
    scene = Scene(targets=1, max_sessions=4)
    target = scene.targets[0]
    scene.seat()
    scene.says(target, running=4)  # three of them are not ours
    assert target.sessions_of_all(scene.clock.now) == 4
    assert scene.seating.try_seat(demand()) is None
    scene.clock.now += 10  # what it said is old
    assert scene.seating.try_seat(demand()) is not None


def test_a_queue_for_kv_at_the_target_holds_requests_back():
    scene = Scene(targets=1)
    scene.seat()
    target = scene.targets[0]
    scene.says(target, queue_us=900_000, pass_us=10_000)
    assert scene.seating.try_seat(demand()) is None
    scene.says(target, queue_us=900_000, pass_us=300_000)  # three passes: that is usual
    assert scene.seating.try_seat(demand()) is not None


def test_orchestrators_that_have_requests_waiting_share_a_target_evenly():
    scene = Scene(targets=1, max_sessions=8)
    target = scene.targets[0]
    for _ in range(4):
        scene.seat(tokens=1)
    target.others = Others(sessions=3, waiting=1, until=scene.clock.now + 3)
    assert scene.seating.try_seat(demand(1)) is None, "half of it is ours already"
    target.others = Others(sessions=3, waiting=0, until=scene.clock.now + 3)
    assert scene.seating.try_seat(demand(1)) is not None


def test_a_slow_target_gets_less():
    scene = Scene(targets=2, max_sessions=100)
    scene.registry.targets.pass_s = 0.01
    scene.says(scene.targets[0], pass_us=10_000)
    scene.says(scene.targets[1], pass_us=30_000)
    for _ in range(40):
        scene.seat(tokens=1)
    assert scene.targets[0].sessions > 2 * scene.targets[1].sessions > 0


# --- targets ------------------------------------------------------------------------------------


def test_no_new_sessions_for_targets_that_are_leaving_resting_or_away():
    for make_so in (
        lambda t: setattr(t.link, "draining", True),
        lambda t: setattr(t, "standing", Standing.LEAVING),
        lambda t: setattr(t, "standing", Standing.RESTING),
        lambda t: setattr(t.link, "info", None),
        lambda t: setattr(t, "fits", 0),
    ):
        scene = Scene(targets=2)
        make_so(scene.targets[0])
        seats = [scene.seat() for _ in range(4)]
        assert {seat.target for seat in seats} == {scene.targets[1]}
        make_so(scene.targets[1])
        assert scene.seating.try_seat(demand()) is None
        assert not scene.seating.serves(demand().model)


def test_sessions_of_a_draining_target_move_if_they_can():
    scene = Scene(targets=2)
    seat = scene.seat()
    assert seat.target is scene.targets[0]
    assert not seat.target_should_change()
    scene.targets[0].link.draining = True
    assert seat.target_should_change()
    scene.targets[1].link.draining = True
    assert not seat.target_should_change(), "there is none to move to"
    scene.targets[1].link.draining = False
    assert seat.find_target() is scene.targets[1]
    assert [t.sessions for t in scene.targets] == [0, 1]
    assert scene.seating.counters["targets_changed"] == 1


def test_sessions_of_a_target_that_only_rests_stay():
    scene = Scene(targets=2)
    seat = scene.seat()
    scene.targets[0].standing = Standing.RESTING
    assert not seat.target_should_change()
    assert seat.find_target() is scene.targets[0]


def test_a_session_that_lost_its_target_goes_to_a_full_one_rather_than_nowhere():
    scene = Scene(targets=2, max_sessions=1)
    one, other = scene.seat(), scene.seat()
    assert {one.target, other.target} == set(scene.targets)
    one.target.link.info = None
    assert one.find_target() is other.target
    assert other.target.sessions == 2
    other.target.link.info = None
    with pytest.raises(Unavailable, match="no target of m"):
        one.find_target()


def test_a_draining_target_is_not_opened_anew():
    scene = Scene(targets=1)
    seat = scene.seat()
    scene.targets[0].link.draining = True
    with pytest.raises(Unavailable):
        seat.find_target()


def test_a_kept_session_comes_back_to_its_kv_unless_the_target_was_restarted():
    scene = Scene(targets=3)
    first = scene.seat(session_id="kept")
    first.leave(keep=True)
    busy = [scene.seat() for _ in range(2)]
    assert first.target is None and busy[0].target is scene.targets[0]
    again = scene.seat(session_id="kept")
    assert again.target is scene.targets[0], "although it is not the least loaded"
    again.leave(keep=True)
    restart(scene.targets[0], 999)
    assert scene.seat(session_id="kept").target is scene.targets[2]


def test_a_session_that_is_taken_over_goes_where_its_former_owner_had_it():
    """Its KV is there; a worker that is not known here is no hindrance."""
    scene = Scene(targets=3)
    scene.seating.been_at("s", "t2")
    scene.seating.been_at("other", "t9")
    assert scene.seat(session_id="s").target is scene.targets[2]
    assert scene.seat(session_id="other").target is scene.targets[0]


def test_a_session_that_was_not_kept_has_no_place():
    scene = Scene(targets=3)
    scene.seat(session_id="gone").leave()
    scene.seat()
    assert scene.seat(session_id="gone").target is scene.targets[1]


def test_prefixes_decide_and_a_restarted_target_has_none():
    scene = Scene(targets=3)
    blocks = (11, 12, 13)
    home = scene.seat(blocks=blocks)
    target = home.target
    home.leave()
    for _ in range(3):
        again = scene.seat(blocks=(11, 12, 99))
        assert again.target is target
        again.leave()
    assert scene.seating.counters["prefix"] == 3
    restart(target, 777)
    scene.seat(blocks=blocks)
    assert scene.seating.counters["prefix"] == 3


def test_a_worker_that_nobody_names_is_let_go_with_its_last_session():
    scene = Scene(targets=2)
    seat = scene.seat()
    scene.targets[0].is_named = False
    before = scene.registry.targets.let_go_of
    seat.leave()
    assert scene.registry.targets.let_go_of == before + 1


# --- drafts -------------------------------------------------------------------------------------


def test_drafts_are_shared_out_by_load():
    scene = Scene(targets=2, drafts=3)
    seats = [scene.seat(tokens=1) for _ in range(9)]
    for seat in seats:
        seat.take_draft()
    assert [d.sessions for d in scene.drafts] == [3, 3, 3]
    for seat in seats:
        seat.leave()
    assert [d.sessions for d in scene.drafts] == [0, 0, 0]


def test_a_draft_of_the_targets_zone_is_preferred_until_it_has_too_many():
    scene = Scene(targets=1, drafts=2)
    scene.targets[0].zone = scene.drafts[1].zone = "b"
    scene.drafts[0].zone = "a"
    chosen = [scene.seat(tokens=1).take_draft() for _ in range(8)]
    assert chosen[0] is scene.drafts[1]
    assert scene.drafts[1].sessions > scene.drafts[0].sessions > 0


@pytest.mark.parametrize("fault", ["draining", "leaving", "away", "failing"])
def test_a_session_asks_another_draft_when_its_own_is_no_use(fault):
    scene = Scene(targets=1, drafts=2)
    seat = scene.seat()
    first = seat.take_draft()
    other = next(d for d in scene.drafts if d is not first)
    assert seat.draft_now() is first
    if fault == "draining":
        first.link.draining = True
    elif fault == "leaving":
        first.standing = Standing.LEAVING
    elif fault == "away":
        first.link.info = None
    else:
        for _ in range(2):
            seat.drafted(failed=True)
        assert seat.draft_now() is first, "twice may happen"
        seat.drafted(failed=False)
        for _ in range(3):
            seat.drafted(failed=True)
    assert seat.draft_now() is other
    assert (first.sessions, other.sessions) == (0, 1)
    assert seat.draft_now() is other, "and stays there"


def test_a_draft_that_failed_is_left_alone_longer_each_time():
    scene = Scene(targets=1, drafts=2)
    seat = scene.seat()
    first = seat.take_draft()

    def fail() -> Worker:
        for _ in range(3):
            seat.drafted(failed=True)
        return seat.draft_now()

    other = fail()
    assert other is not first
    assert fail() is other, "the first one failed a moment ago"
    scene.clock.now += 10.1
    assert fail() is first
    scene.clock.now += 10.1
    assert fail() is first, "the other one has failed twice: it is left alone for longer"
    scene.clock.now += 10.1
    assert fail() is other


def test_without_another_draft_a_session_stays_and_waits():
    scene = Scene(targets=1, drafts=1)
    seat = scene.seat()
    first = seat.take_draft()
    first.link.info = None
    assert seat.draft_now() is first
    assert Scene(drafts=0).seat().take_draft() is None


def test_only_a_draft_that_can_do_the_same_takes_over():
    scene = Scene(targets=1, drafts=3)
    first, unlike, able = scene.drafts
    unlike.link.info.model_fingerprint = "another"
    able.link.info.capabilities.append("ahead")
    unlike.sessions, able.sessions = 1, 5
    seat = scene.seat()
    assert seat.take_draft() is first
    first.link.info = None
    assert seat.draft_now() is able
    able.link.draining = True
    assert seat.draft_now() is able, "the rest is of another kind"


def test_a_draft_that_comes_takes_over_its_part_and_no_more():
    scene = Scene(targets=1, drafts=1)
    seats = [scene.seat(tokens=1) for _ in range(20)]
    for seat in seats:
        seat.take_draft()
    scene.drafts.append(worker("late", 300))
    moves = 0
    for _ in range(10):
        scene.clock.now += 1.1
        for seat in seats:
            before = seat.draft
            moves += seat.draft_now() is not before
    first, late = scene.drafts
    assert first.sessions + late.sessions == 20
    assert late.sessions >= 6 and moves == late.sessions, "none moves to and fro"


def test_drafts_are_not_compared_at_every_round():
    scene = Scene(targets=1, drafts=2)
    seat = scene.seat()
    first = seat.take_draft()
    seat.draft_now()
    first.sessions = 50
    assert seat.draft_now() is first
    scene.clock.now += 1.1
    assert seat.draft_now() is not first
