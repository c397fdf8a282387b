"""The kernels' benchmark: what it measures, not how fast it was."""

from umbel.sim.bench.codec.kernels import kernel_note, kernel_rows


def test_each_kernel_is_measured_against_a_copy_and_three_have_a_promise() -> None:
    rows = kernel_rows(quick=True, repetitions=1)
    assert all(row.ours > 0 and row.theirs > 0 and row.against == "memory copy of 2^22 floats" for row in rows)
    assert [row.hold for row in rows if row.hold] == ["<= 1.5", "<= 3", "<= 1.2"]
    assert "one thread" in kernel_note()
