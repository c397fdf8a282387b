"""Updates encoded on a GPU of this machine, with Triton's kernels and with torch's operations: the bytes of the CPU.

`test_on_gpu.py` runs everywhere. Its stand-in knows which operations a GPU must round as the CPU does; here a GPU does.
"""

from dataclasses import replace

import pytest
import torch

from tests.aggregation.codec.gpu_cases import LARGE, PLANS, change_of, encoded, layout_for, layout_of_rows, pieces
from tests.aggregation.secagg.attacks.adversary import heard
from tests.aggregation.secagg.house import composed, secure_plan, work_of
from tests.federations.own_dithers import secret_of
from umbel.aggregation.kernels import kernels
from umbel.aggregation.secagg.masked_input import masked_input
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.secagg.numbers.contribution import contribution

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.slow,  # most of it is Triton's compiler
]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(params=["triton", "torch"], autouse=True)
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(kernels, "_triton", lambda: None)
    elif kernels._triton() is None:  # pyright: ignore[reportPrivateUsage]
        pytest.skip("Triton does not work here")


@pytest.mark.parametrize("clip_norm", [None, 0.75], ids=["not clipped", "clipped"])
@pytest.mark.parametrize("name", PLANS)
def test_an_update_has_the_bytes_of_the_cpu(name: str, clip_norm: float | None) -> None:
    plan, layout = replace(PLANS[name], clip_norm=clip_norm), layout_for(name)
    made = encoded(plan, layout, pieces(change_of(layout), GPU))
    assert made == encoded(plan, layout, pieces(change_of(layout), CPU))


SMALL = layout_of_rows(40)
COMPOSITIONS = {
    "small": composed(replace(secure_plan(5, weight_unit=10), bits=8), SMALL),
    "large": composed(replace(secure_plan(5), bits=19), LARGE, step=0.01, clip_norm=1.5),
    "beyond max_abs": composed(replace(secure_plan(5), bits=9), SMALL, step=1e-4, max_abs=0.013),
    "too fine a step": composed(replace(secure_plan(5), bits=19), SMALL, step=2.0**-40),
}


@pytest.mark.parametrize("composition", COMPOSITIONS.values(), ids=COMPOSITIONS)
def test_a_masked_update_has_the_bytes_of_the_cpu(composition: Composition) -> None:
    client = heard(4).clients[0]

    def made_on(device: torch.device) -> tuple[torch.Tensor, bytes]:
        given = pieces(change_of(composition.layout), device)
        made = contribution(composition, lambda: iter(given), work_of(7), secret_of(2))
        return made.values.cpu(), b"".join(map(bytes, masked_input(made, client)))

    (values, update), (expected_values, expected) = made_on(GPU), made_on(CPU)
    assert torch.equal(values, expected_values)
    assert update == expected
