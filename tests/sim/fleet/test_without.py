"""Without `[fleet]` every client does all of its work at once, whatever it is asked."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from umbel.sim.fleet.fates import CohortAsk, DeviceStage
from umbel.sim.fleet.fleet import ALL_WAIT_MAX
from umbel.sim.fleet.without import WithoutDevices


@given(
    steps=st.lists(st.integers(1, 10**9), min_size=1, max_size=8),
    window_s=st.floats(1e-3, 1e6),
    n_bytes=st.integers(0, 1 << 40),
    secure=st.booleans(),
)
def test_each_client_does_all_its_steps_before_any_window_closes(
    steps: list[int], window_s: float, n_bytes: int, secure: bool
) -> None:
    sent = np.array([n_bytes])
    ask = CohortAsk(np.array(steps), 10, np.full(len(steps), n_bytes), sent, window_s, secure)
    fates = WithoutDevices(3).fates(np.arange(len(steps)), 7, 1, 100.0, ask)
    assert fates.steps_done.tolist() == steps
    assert fates.report_s.tolist() == [0.0] * len(steps)
    assert not np.isfinite(fates.lost_s).any()
    assert (fates.stage == DeviceStage.NONE).all()
    spent = fates.spent(0.0)
    assert spent.bytes_down.tolist() == spent.bytes_up.tolist() == [n_bytes] * len(steps)
    assert not spent.busy_s.any()


def test_all_clients_wait_unless_there_are_very_many() -> None:
    devices = WithoutDevices(3)
    assert devices.waiting(0.0, 1, 1, ALL_WAIT_MAX, 10).tolist() == list(range(ALL_WAIT_MAX))
    many = devices.waiting(0.0, 1, 1, 10**6, 10)
    assert len(many) == len(set(many.tolist())) == 15
    assert len(WithoutDevices(3, draws_by_size=True).waiting(0.0, 1, 1, 5000, 10)) == 5000, "a part is another draw"
    assert many.tolist() != devices.waiting(0.0, 2, 1, 10**6, 10).tolist(), "each round has others"
