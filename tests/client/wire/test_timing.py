"""Waiting, as pure functions: how long before trying again, and before the window's end."""

from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.update.wire import CHUNK_BYTES_MIN
from umbel.client.rounds.watch import renewal_s
from umbel.client.wire.timing import CHUNK_BYTES_MAX, RETRY_AFTER_MAX_S, Backoff, Bandwidth, Timing, chunk_bytes, within
from umbel.client.wire.timing import IDLE_BACKOFF as IDLE


def test_the_bound_doubles_up_to_the_longest() -> None:
    backoff = Backoff(first_s=0.1, longest_s=1.0)
    assert [round(backoff.bound_s(n), 9) for n in range(1, 7)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_jitter_is_full() -> None:
    assert IDLE.wait_s(3, jitter=0.0) == 0.0
    assert IDLE.wait_s(3, jitter=0.5) == 0.5 * IDLE.bound_s(3)


@given(st.integers(1, 10**9), st.floats(0, 1, exclude_max=True), st.floats(allow_nan=False, allow_infinity=True))
def test_no_wait_is_negative_or_endless(failures: int, jitter: float, retry_after_s: float) -> None:
    wait_s = IDLE.wait_s(failures, jitter, retry_after_s)
    assert 0 <= wait_s <= RETRY_AFTER_MAX_S + IDLE.longest_s


def test_what_the_coordinator_asks_for_is_honoured() -> None:
    assert IDLE.wait_s(1, jitter=0.0, retry_after_s=7.0) == 7.0


@given(st.floats(0.5, 1e6))
def test_many_tries_fit_into_a_window(window_s: float) -> None:
    assert sum(within(window_s).backoff.bound_s(n) for n in range(1, 51)) <= window_s


@given(st.floats(0.1, 1e6), st.floats(1.0, 10.0))
def test_a_longer_window_is_more_patient_in_everything(window_s: float, factor: float) -> None:
    def times(timing: Timing) -> list[float]:
        return [
            timing.answer_s,
            timing.stall_s,
            timing.backoff.first_s,
            timing.backoff.longest_s,
            timing.exchange_s(10**6),
        ]

    pairs = zip(times(within(window_s)), times(within(window_s * factor)), strict=True)
    assert all(0 < short <= long for short, long in pairs)


def test_a_stalled_connection_costs_a_small_part_of_a_window() -> None:
    assert all(within(window_s).stall_s <= window_s / 40 for window_s in (120, 600, 86400))


@given(st.integers(0, 1 << 40), st.floats(1, 1e12), st.floats(1e-3, 1e7))
def test_the_reserve_leaves_half_the_window_for_training(update_bytes: int, speed: float, window_s: float) -> None:
    link = Bandwidth().after_download(1 << 20, (1 << 20) / speed)
    assert 0 < link.reserve_s(update_bytes, window_s) <= window_s / 2


def test_a_slow_link_reserves_more() -> None:
    slow, fast = (Bandwidth().after_download(10**6, seconds) for seconds in (10.0, 0.1))
    assert slow.reserve_s(10**6, 600) > 50 > fast.reserve_s(10**6, 600)


def test_a_measured_upload_outranks_a_measured_download() -> None:
    link = Bandwidth().after_download(10**6, 1.0)
    assert link.after_upload(10**6, 1.0).reserve_s(10**7, 600) < link.reserve_s(10**7, 600)


def test_chunks_follow_the_link() -> None:
    assert chunk_bytes(0.0, 60) == CHUNK_BYTES_MIN
    assert chunk_bytes(1e9, 60) == CHUNK_BYTES_MAX
    assert chunk_bytes(1e6, 60) == 300_000  # 0.3 s
    assert chunk_bytes(1e6, 86400) == 2_000_000  # a cut costs two seconds at most


def test_a_client_is_heard_of_often_enough() -> None:
    assert renewal_s(2.0) < 1.0
    assert renewal_s(100.0) < 5.0
    assert renewal_s(1e6) <= 30.0
