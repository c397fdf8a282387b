"""A masked update that is made on a GPU: the bytes of the CPU, and only integers are copied to the CPU to be masked."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.aggregation.codec.cases import heavy
from tests.aggregation.codec.gpu_cases import N_EXACT, change_of, crossed, layout_of_rows, n_numbers, pieces
from tests.aggregation.secagg.attacks.adversary import heard
from tests.aggregation.secagg.house import composed, secure_plan, work_of
from tests.federations.own_dithers import secret_of
from tests.suite.stand_in_gpu import GPU, StandInGpu
from umbel.aggregation.errors import NonFiniteUpdate
from umbel.aggregation.kernels import kernels
from umbel.aggregation.model.layout import Layout, TensorSpec
from umbel.aggregation.plans.masks import NoisePlan
from umbel.aggregation.secagg.masked_input import masked_input
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.secagg.numbers.contribution import Contribution, contribution

CPU = torch.device("cpu")
LAYOUT = layout_of_rows(40)
CODED = Layout((TensorSpec("weight", (40, 1600), "float32", 0),))  # a private round has no exact values


@pytest.fixture(autouse=True)
def _by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton needs a real GPU."""
    monkeypatch.setattr(kernels, "_triton", lambda: None)


def made_on(device: torch.device, composition: Composition, values: Tensor, **others: bool) -> Contribution:
    given = pieces(values, device)
    return contribution(composition, lambda: iter(given), work_of(7), secret_of(2), **others)


COMPOSITIONS = {
    "8 bits": composed(replace(secure_plan(5, weight_unit=10), bits=8), LAYOUT),
    "9 bits": composed(replace(secure_plan(5, weight_unit=10), bits=9), LAYOUT, step=0.02),
    "19 bits, clipped": composed(replace(secure_plan(5), bits=19), LAYOUT, step=0.01, clip_norm=1.5),
    # The change is divided by its greatest value, which is no power of two.
    "beyond max_abs": composed(replace(secure_plan(5), bits=19), LAYOUT, step=1e-4, max_abs=0.013),
    "too fine a step": composed(replace(secure_plan(5), bits=19), LAYOUT, step=2.0**-40),
}


@pytest.mark.parametrize("composition", COMPOSITIONS.values(), ids=COMPOSITIONS)
def test_a_contribution_has_the_same_bits(composition: Composition) -> None:
    expected = made_on(CPU, composition, change_of(LAYOUT))
    with StandInGpu("linalg_vector_norm") as gpu:  # which only shows whether the values can be rotated
        made = made_on(GPU, composition, change_of(LAYOUT))
        assert made.values.device == GPU
        levels = [part.cpu() for part in made.levels()]
        assert crossed(gpu.down) == {torch.float32: N_EXACT, torch.int32: composition.n_levels}
        assert n_numbers(gpu.down) < 40
        assert torch.equal(made.values.cpu(), expected.values)
    assert torch.equal(torch.cat(levels), torch.cat(list(expected.levels())))
    assert torch.equal(made.words, expected.words)
    assert made.remarks == expected.remarks


def private(variance: float) -> Composition:
    plain = composed(secure_plan(5, metrics=(), evaluation=()), CODED)
    noise = NoisePlan(variance, 20_000, plain.n_levels, least=3, colluders=1)
    return composed(replace(plain.secure, noise=noise), CODED, step=0.01, clip_norm=1.0)


@pytest.mark.parametrize("scale", [1e-3, 1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("variance", [2.0**-20, 900.0])
def test_a_private_contribution_has_the_same_bits_noise_included(variance: float, scale: float) -> None:
    """The CPU draws the noise, and copies it to the GPU. Where nothing is finite, zeros and noise are sent."""
    composition, values = private(variance), heavy(CODED.n_values) * scale
    expected = made_on(CPU, composition, values, is_covered=True)
    with StandInGpu() as gpu:
        made = made_on(GPU, composition, values, is_covered=True)
        levels = [part.cpu() for part in made.levels()]
    assert torch.equal(torch.cat(levels), torch.cat(list(expected.levels())))
    assert torch.equal(made.words, expected.words)
    assert made.remarks == expected.remarks
    assert crossed(gpu.down) == {torch.int32: composition.n_levels}


@pytest.mark.parametrize("name", ["8 bits", "9 bits", "19 bits, clipped"])
def test_a_masked_update_has_the_same_bytes_and_its_levels_cross_in_the_narrowest_integers(name: str) -> None:
    composition, client = COMPOSITIONS[name], heard(4).clients[0]
    expected = b"".join(map(bytes, masked_input(made_on(CPU, composition, change_of(LAYOUT)), client)))
    with StandInGpu("linalg_vector_norm") as gpu:
        made = made_on(GPU, composition, change_of(LAYOUT))
        update = b"".join(map(bytes, masked_input(made, client)))
        assert b"".join(map(bytes, masked_input(made.on(CPU), client))) == expected  # if the GPU has no memory left
    assert update == expected
    lanes = {"8 bits": torch.int8, "9 bits": torch.int16, "19 bits, clipped": torch.int32}[name]
    in_fallback = composition.layout.n_values
    assert crossed(gpu.down) == {torch.float32: N_EXACT + in_fallback, lanes: composition.n_levels}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_change_that_is_not_finite_is_refused_as_on_the_cpu(bad: float) -> None:
    values = change_of(LAYOUT)
    values[20_000] = bad
    with StandInGpu(), pytest.raises(NonFiniteUpdate, match="value 20000 of the update is"):
        made_on(GPU, COMPOSITIONS["8 bits"], values)


def test_the_memory_of_the_gpu_is_the_change_and_a_part() -> None:
    """So that a model of which the GPU holds gradients and an optimizer's state has room for it."""
    composition = composed(replace(secure_plan(5), bits=8), layout_of_rows(2000))
    values = change_of(composition.layout)
    with StandInGpu("linalg_vector_norm") as gpu:
        given = (piece.to(GPU) for piece in pieces(values, CPU))
        made = contribution(composition, lambda: given, work_of(7), secret_of(2))
    assert made.values.numel() == values.numel()
    assert gpu.peak_bytes < 4 * values.numel() + (8 << 20)
