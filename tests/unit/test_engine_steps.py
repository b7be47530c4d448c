"""What rank 0 tells: packed and unpacked, over a real connection, and what makes no sense."""

import random
import socket

import numpy as np
import pytest

from outrider.engine.rows import Branch, Draw, Rows
from outrider.engine.steps import Kind, Listener, Step, Teller, pack_rows, unpack_rows
from outrider.errors import Unavailable
from outrider.types import GenerationSpec, SamplingParams, VerificationMode


@pytest.fixture
def line():
    near, far = socket.socketpair()
    with near, far:
        far.settimeout(5)
        yield near, Teller([near]), Listener(far)


def random_batch(seed):
    r = random.Random(seed)
    batch = []
    for _ in range(r.randint(1, 40)):
        count = r.randint(1, 60)
        sampling = SamplingParams(
            temperature=r.choice([0.0, r.random(), 1e-30]),
            top_k=r.choice([0, r.randrange(2**31)]),
            top_p=r.random(),
            min_p=r.choice([0.0, r.random()]),
            seed=r.getrandbits(64),
        )
        branches = tuple(Branch(r.randrange(5), r.randrange(8)) for _ in range(r.randrange(4)))
        draw = Draw(GenerationSpec(sampling), r.randrange(9999), r.randint(1, 16), branches, 2)
        batch.append(
            Rows(
                [r.randrange(200_000) for _ in range(count)],
                r.randrange(10_000),
                [r.randrange(2**31) for _ in range(r.randint(1, 300))],
                r.randint(0, count),
                r.choice([None, draw]),
                [r.randrange(99) for _ in range(r.randrange(5))],
                [r.randrange(-1, i) for i in range(r.randint(0, count - 1))],
                [[r.randrange(99)] * r.randrange(9) for _ in range(r.choice([0, 0, 3]))],
            )
        )
    return batch


@pytest.mark.parametrize("seed", range(20))
def test_rows_arrive_as_they_were_told(line, seed):
    _, teller, listener = line
    batch = random_batch(seed)
    assert list(unpack_rows(pack_rows(batch), len(batch))) == batch
    teller.tell(Kind.RUN, batch[:4])
    assert listener.hear() == Step(Kind.RUN, tuple(batch[:4]))


def test_steps_arrive_in_order(line):
    _, teller, listener = line
    batch = [Rows(range(3), 5, range(2), 1)]
    teller.tell(Kind.FORWARD, batch)
    teller.tell(Kind.COPY, pairs=[(1, 2), (7, 0)])
    teller.tell(Kind.END)
    assert listener.hear() == Step(Kind.FORWARD, (Rows([0, 1, 2], 5, [0, 1], 1, None, [], [], []),))
    assert listener.hear() == Step(Kind.COPY, pairs=((1, 2), (7, 0)))
    assert listener.hear() == Step(Kind.END)


def test_what_only_rank_0_needs_does_not_travel(line):
    """A rank cannot tell apart draws that it makes alike."""
    _, teller, listener = line
    spec = GenerationSpec(
        SamplingParams(seed=1), VerificationMode.REJECTION, 7, 3, stop_ids=(4, 5), logprobs=2
    )
    teller.tell(Kind.RUN, [Rows([1], 0, [0], 1, Draw(spec, 1))])
    (rows,) = listener.hear().rows
    assert rows.draw == Draw(GenerationSpec(SamplingParams(seed=1)), 1)


def test_a_small_step_is_one_small_message(line):
    _, teller, _ = line
    sent = []
    teller._connections = [type("Spy", (), {"sendall": lambda self, data: sent.append(data)})()]
    batch = [
        Rows([n], 500, range(16), 1, Draw(GenerationSpec(SamplingParams()), 501)) for n in range(8)
    ]
    teller.tell(Kind.RUN, batch)
    assert len(sent) == 1 and len(sent[0]) < 1500


def test_a_stream_goes_on_until_it_is_halted_or_something_else_comes(line):
    _, teller, listener = line
    teller.tell(Kind.GO)
    teller.tell(Kind.HALT)
    assert listener.goes_on() and not listener.goes_on()
    # Rank 0 gave the stream up: its next step ends it, and is not lost.
    teller.tell(Kind.GO)
    teller.tell(Kind.COPY, pairs=[(3, 4)])
    assert listener.goes_on() and not listener.goes_on()
    assert listener.hear() == Step(Kind.COPY, pairs=((3, 4),))


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ((2, Kind.END, 0, 0), "step 2 of 0 numbers came after 0"),
        ((1, Kind.RUN, 1, -4), "step 1 of -4"),
        ((1, Kind.RUN, 1, 2**30), "numbers came"),
        ((1, Kind.RUN, 1, 3, 9, 9, 9), "shorter than it says"),
        ((1, Kind.RUN, 0, 1, 9), "longer than it says"),
        ((1, Kind.RUN, 1, 7, 2**30, 0, 0, 0, 0, 0, 0), "shorter than it says"),
        ((1, Kind.RUN, 1, 7, -1, 0, 0, 0, 0, 0, 0), "shorter than it says"),
    ],
)
def test_steps_that_make_no_sense_end_the_rank(line, numbers, told):
    near, _, listener = line
    near.sendall(np.array(numbers, dtype="<i4").tobytes())
    with pytest.raises(Unavailable, match=told):
        listener.hear()


def test_an_end_of_the_connection_is_the_end_of_rank_0(line):
    near, _, listener = line
    near.sendall(b"half")
    near.close()
    with pytest.raises(Unavailable, match="rank 0 is gone"):
        listener.hear()
