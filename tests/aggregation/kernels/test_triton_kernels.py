"""The kernels for CUDA: their bits, in Triton's interpreter, and that they are chosen, or not, with one log line."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from umbel.aggregation.kernels import kernels, native
from umbel.aggregation.kernels.philox import dither

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (it comes with CUDA)")


@needs_triton
@pytest.mark.nightly
def test_every_kernel_gives_the_bits_of_torch_in_the_interpreter() -> None:
    """In a process of its own: Triton decides when it is imported whether to interpret."""
    cases = Path(__file__).with_name("triton_cases.py")
    # Where an extreme value times the inverse step overflows, numpy warns and a GPU does not.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run([*command, str(cases)], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert " passed" in ran.stdout


_INTEGERS = dict.fromkeys(("n_values", "n_blocks", "first", "n_positions", "key_low", "key_high", "weight"), "i32")
_QUANTIZER = dict.fromkeys(("dither_low", "dither_high", "phi", "low", "high", "offset"), "i32")
_SIGNATURE = {**_INTEGERS, **_QUANTIZER, "inverse_step": "fp32", "values": "*fp32", "rotated": "*fp32"}
_FOLD = {"words": "*i32", "squares": "*i64", "greatest": "*i32"}
_COMPILED = (
    ("rotate", {"out": "*fp32"}),
    ("unrotate", {"out": "*fp32"}),
    ("unrotate", {"out": "*fp64", "rotated": "*fp64"}),
    ("write_signs", {"out": "*fp32"}),
    ("write_dither", {"out": "*i32"}),
    ("quantize", {"out": "*i16"}),
    ("pack", {"out": "*i32"}),
    ("rotate_and_pack", {"out": "*i32"}),
    ("fold", {"sums": "*i32"} | _FOLD),
    ("fold", {"sums": "*i64"} | _FOLD),
)


@pytest.mark.nightly
@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("name", "own_types"), _COMPILED)
def test_a_gpu_s_code_fuses_no_product_that_rounds_and_flushes_nothing(
    name: str, own_types: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Compiled for compute capability 9.0, which needs no GPU; what the interpreter lets pass is found here too."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    triton, compiler = import_module("triton"), import_module("triton.compiler")
    target = import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    kernel = getattr(import_module("umbel.aggregation.kernels.triton_kernels"), name)
    types, constants = _SIGNATURE | own_types, {"SIDE": 64, "BITS": 7}
    signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
    values = {(kernel.arg_names.index(key),): value for key, value in constants.items() if key in kernel.arg_names}
    made = triton.compile(compiler.ASTSource(kernel, signature, constexprs=values), target=target).asm["ptx"]
    assert "fma" not in made
    assert ".ftz" not in made
    assert ".visible .entry" in made


@pytest.fixture
def unchosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv(native.VARIABLE, raising=False)
    kernels._triton.cache_clear()  # pyright: ignore[reportPrivateUsage]
    yield monkeypatch
    kernels._triton.cache_clear()  # pyright: ignore[reportPrivateUsage]


def test_without_triton_or_a_gpu_torch_serves_and_one_line_says_why(
    unchosen: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if find_spec("triton") and torch.cuda.is_available():
        pytest.skip("there are both here")
    with caplog.at_level(logging.INFO):
        assert [kernels._triton() for _ in range(3)] == [None] * 3  # pyright: ignore[reportPrivateUsage]
    (record,) = caplog.records
    assert record.getMessage().startswith("the Triton kernels do not work here (")


def test_torch_can_be_asked_for(unchosen: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    unchosen.setenv(native.VARIABLE, "torch")
    assert kernels._triton() is None  # pyright: ignore[reportPrivateUsage]
    assert not caplog.records


def test_tensors_on_cuda_are_triton_s() -> None:
    if find_spec("triton") is None or not torch.cuda.is_available():
        pytest.skip("there is no GPU here, or no Triton")
    out = torch.zeros(5000, dtype=torch.int32, device="cuda")
    kernels.dither_into(out, 1, 128)
    assert kernels._triton() is not None  # pyright: ignore[reportPrivateUsage]
    assert torch.equal(out.cpu(), dither(1, 128, 5000))
