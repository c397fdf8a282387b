"""Updates encoded on a GPU: the bytes of the CPU, with the compiled kernels, and only the update's own content crosses.

A stand-in for a GPU runs torch's operations here. `test_on_real_gpu.py` runs Triton's kernels, where there is a GPU.
"""

from dataclasses import replace

import pytest
import torch

from tests.aggregation.codec.gpu_cases import (
    GRID,
    LOWRANK,
    MEDIUM,
    N_EXACT,
    PLANS,
    RANK,
    change_of,
    crossed,
    encoded,
    layout_for,
    layout_of_rows,
    n_numbers,
    pieces,
)
from tests.suite.stand_in_gpu import GPU, StandInGpu
from umbel.aggregation.codec.entropy.classes import Matrices
from umbel.aggregation.codec.feedback import Residual
from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.codec.vector_update import VectorUpdateCodec
from umbel.aggregation.codec.vectors.buckets import n_buckets
from umbel.aggregation.errors import NonFiniteUpdate, UpdateOutOfRange
from umbel.aggregation.kernels import kernels
from umbel.aggregation.model.layout import PIECE_VALUES, Layout
from umbel.aggregation.update.wire import HEADER_BYTES

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton needs a real GPU."""
    monkeypatch.setattr(kernels, "_triton", lambda: None)


def expected_to_cross(name: str, layout: Layout, n_bytes: int) -> dict[torch.dtype, int]:
    """By dtype, how many values of an update of `n_bytes` cross. Exact values are float32."""
    n, exact = layout.n_values, {torch.float32: N_EXACT}
    match name:
        case "float32":
            return {torch.float32: n}
        case "integer":  # both segments are sampled, to find the cheapest coding, and so they cross twice
            return exact | {torch.int16: 2 * n, torch.int64: Matrices(layout).n_bytes}
        case "qsgd" | "qsgd, two planes":
            return exact | {torch.uint8: 4 * n_buckets(n) + (1 if name == "qsgd" else 2) * n}
        case "planes" | "planes, bfloat16":
            return exact | {torch.uint8: (4 if name == "planes" else 2) * n}
        case _:
            n_head = 9 if name.startswith("topk") else 0
            return exact | {torch.uint8: n_bytes - HEADER_BYTES - 4 * N_EXACT - n_head}


@pytest.mark.parametrize("clip_norm", [None, 0.75], ids=["not clipped", "clipped"])
@pytest.mark.parametrize("name", PLANS)
def test_an_update_has_the_same_bytes_and_only_what_it_holds_is_copied_to_the_cpu(
    name: str, clip_norm: float | None
) -> None:
    plan, layout = replace(PLANS[name], clip_norm=clip_norm), layout_for(name)
    with StandInGpu() as gpu:
        update = encoded(plan, layout, pieces(change_of(layout), GPU))
    assert update == encoded(plan, layout, pieces(change_of(layout), CPU))
    assert crossed(gpu.down) == expected_to_cross(name, layout, len(update))
    assert n_numbers(gpu.down) <= 10 * -(-layout.n_values // PIECE_VALUES), "some for each piece, none by value"


def test_the_cpu_decodes_the_products_of_low_rank_that_a_gpu_solved_for() -> None:
    """They are a library's, so only their last bits differ. The GPU multiplies in float64, never in TF32."""
    with StandInGpu("mm", "linalg_solve_triangular") as gpu:
        update = encoded(LOWRANK, MEDIUM, pieces(change_of(MEDIUM), GPU))
    codec, expected = codec_for(LOWRANK, GRID, MEDIUM), encoded(LOWRANK, MEDIUM, pieces(change_of(MEDIUM), CPU))
    ours, theirs = (
        torch.cat(list(codec.integers(one[:HEADER_BYTES], [one[HEADER_BYTES:]], RANK))) for one in (update, expected)
    )
    assert int((ours - theirs).abs().max()) * GRID.step < 1e-6 < float(theirs.abs().max()) * GRID.step
    sent = crossed(gpu.down)
    assert sent == {torch.float32: N_EXACT, torch.uint8: len(update) - HEADER_BYTES - 4 * N_EXACT}


def test_the_integer_codec_needs_memory_of_the_gpu_for_segments_whatever_the_model_s_length() -> None:
    def peak_of(n_rows: int) -> int:
        layout = layout_of_rows(n_rows)
        codec, change = codec_for(PLANS["integer"], GRID, layout), change_of(layout)
        with StandInGpu() as gpu:
            for _ in codec.encode(lambda: (one.to(GPU) for one in torch.split(change, PIECE_VALUES)), RANK):
                pass
        return gpu.peak_bytes

    segment_bytes = 4 << 20
    assert peak_of(700) < 20 * segment_bytes
    assert peak_of(2800) < peak_of(1400) + segment_bytes // 4  # which is for the sizes of more rows


# --- error feedback ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [None, 0.5], ids=["plain", "momentum"])
def test_what_was_left_out_has_the_same_bits_and_crosses_because_it_is_kept_on_disk(momentum: float | None) -> None:
    plan = replace(PLANS["topk"], clip_norm=0.75, feedback=True, momentum=momentum)
    codec = codec_for(plan, GRID, MEDIUM)
    assert isinstance(codec, VectorUpdateCodec)
    velocity = None if momentum is None else change_of(MEDIUM, 2)
    before = Residual(4, change_of(MEDIUM, 1), velocity)
    here, there = pieces(change_of(MEDIUM), CPU), list[torch.Tensor]()
    expected = codec.encode_fed(lambda: iter(here), RANK, 5, before)
    with StandInGpu() as gpu:
        there.extend(pieces(change_of(MEDIUM), GPU))
        made = codec.encode_fed(lambda: iter(there), RANK, 5, before)
    assert b"".join(made.pieces) == b"".join(expected.pieces)
    assert made.left.values.device == CPU
    assert torch.equal(made.left.values, expected.left.values)
    assert (made.left.velocity is None) == (momentum is None)
    if made.left.velocity is not None and expected.left.velocity is not None:
        assert torch.equal(made.left.velocity, expected.left.velocity)
    n_vectors = 1 if momentum is None else 2
    assert crossed(gpu.down)[torch.float32] == N_EXACT + n_vectors * MEDIUM.n_values


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float32", "integer", "sign"])
@pytest.mark.parametrize(
    ("bad", "refusal", "says"),
    [
        (float("nan"), NonFiniteUpdate, r"value 200000 of the update is nan"),
        (65.0, UpdateOutOfRange, r"value 200000 of the update is 65, beyond the grid's max_abs 64"),
    ],
)
def test_a_value_that_cannot_be_sent_is_named_as_on_the_cpu(
    name: str, bad: float, refusal: type[Exception], says: str
) -> None:
    change = change_of(MEDIUM)
    change[200_000] = bad
    with StandInGpu(), pytest.raises(refusal, match=says):
        encoded(PLANS[name], MEDIUM, pieces(change, GPU))
