"""When a pass waits for sessions that have just been answered."""

from outrider.worker.gathering import DEFAULT_MAX_PASSES, ReturnWindow


def learned(
    *,
    trip_s: float,
    pass_s: float,
    max_passes: float = DEFAULT_MAX_PASSES,
    beside: bool = False,
    left_behind: bool = False,
) -> ReturnWindow:
    """A window that has seen many trips and passes of these lengths; `left_behind`: a pass began
    during each trip."""
    window = ReturnWindow(max_passes)
    for turn in range(200):
        window.passed(pass_s)
        window.answered("a", float(turn), beside=beside)
        if left_behind:
            window.close()
        window.returned("a", turn + trip_s)
    return window


def test_nobody_is_waited_for_when_nobody_was_answered():
    assert learned(trip_s=0.001, pass_s=0.02).wait_s(1000.0) == 0.0


def test_a_short_trip_is_waited_for():
    window = learned(trip_s=0.001, pass_s=0.02)
    window.answered("b", 1000.0)
    assert abs(window.wait_s(1000.0) - 0.001) < 1e-6
    assert window.wait_s(1000.0011) == 0.0


def test_trips_that_vary_are_waited_for_longer():
    window = learned(trip_s=0.001, pass_s=0.02)
    for turn in range(2000, 2200):
        window.answered("a", float(turn))
        window.returned("a", turn + (0.0005 if turn % 2 else 0.0015))
    window.answered("b", 3000.0)
    assert 0.0018 < window.wait_s(3000.0) < 0.0022


def test_the_last_one_out_counts():
    window = learned(trip_s=0.001, pass_s=0.02)
    window.answered("b", 1000.0)
    window.answered("c", 1000.003)
    assert abs(window.wait_s(1000.0035) - 0.0005) < 1e-6


def test_who_is_back_is_not_waited_for():
    window = learned(trip_s=0.001, pass_s=0.02)
    window.answered("b", 1000.0)
    window.returned("b", 1000.0005)
    assert window.wait_s(1000.0006) == 0.0


def test_a_trip_that_is_long_beside_a_pass_is_waited_for_only_when_it_is_nearly_over():
    window = learned(trip_s=0.018, pass_s=0.02)
    window.answered("b", 1000.0)
    assert window.wait_s(1000.0) == 0.0
    assert abs(window.wait_s(1000.006) - 0.012) < 1e-6


def test_more_patience_waits_for_longer_trips():
    window = learned(trip_s=0.010, pass_s=0.007, max_passes=4.0)
    window.answered("b", 1000.0)
    assert abs(window.wait_s(1000.0) - 0.010) < 1e-4


def test_a_pass_that_has_started_ends_the_waiting():
    window = learned(trip_s=0.001, pass_s=0.02)
    window.answered("b", 1000.0)
    window.close()
    assert window.wait_s(1000.0) == 0.0


def test_one_that_never_returns_costs_one_window_only():
    window = learned(trip_s=0.001, pass_s=0.02)
    window.answered("gone", 1000.0)
    assert window.wait_s(1000.0) > 0
    window.close()
    window.answered("b", 1000.02)
    window.returned("b", 1000.021)
    assert window.wait_s(1000.021) == 0.0


def test_a_long_pause_is_soon_forgotten():
    window = learned(trip_s=0.001, pass_s=0.02)
    window.answered("a", 1000.0)
    window.returned("a", 2000.0)
    for turn in range(2001, 2031):
        window.answered("a", float(turn))
        window.returned("a", turn + 0.001)
    window.answered("b", 3000.0)
    assert 0 < window.wait_s(3000.0) < 0.02


def test_trips_that_no_pass_waited_for_are_learned_too():
    """Else only the short ones are, and those who come back later are left behind for ever."""
    window = learned(trip_s=0.012, pass_s=0.02, left_behind=True)
    window.answered("b", 3000.0)
    assert abs(window.wait_s(3000.0) - 0.012) < 1e-4


def test_a_session_that_is_gone_is_neither_waited_for_nor_learned_from():
    window = learned(trip_s=0.001, pass_s=0.02)
    window.answered("a", 1000.0)
    window.gone("a")
    assert window.wait_s(1000.0) == 0.0
    window.returned("a", 1000.05)
    window.answered("b", 2000.0)
    assert abs(window.wait_s(2000.0) - 0.001) < 1e-6


def test_who_drafts_on_this_device_is_waited_for_longer():
    """Two groups that take turns, each drafting while the other is verified, become one."""
    window = learned(trip_s=0.013, pass_s=0.010, beside=True, left_behind=True)
    window.answered("b", 1000.0, beside=True)
    window.answered("c", 1000.0)
    assert abs(window.wait_s(1000.0) - 0.013) < 1e-4


def test_ways_are_learned_apart():
    window = learned(trip_s=0.001, pass_s=0.02)
    for turn in range(2000, 2200):
        window.answered("a", float(turn), beside=True)
        window.returned("a", turn + 0.030)
    window.answered("b", 3000.0)
    assert abs(window.wait_s(3000.0) - 0.001) < 1e-6
