"""The kernels for CUDA: their bits, in Triton's interpreter, and that they are chosen, or not, with one log line."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from umbel.aggregation.codec import kernels, native
from umbel.aggregation.codec.philox import dither

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (it comes with CUDA)")


@needs_triton
@pytest.mark.slow
def test_every_kernel_gives_the_bits_of_torch_in_the_interpreter() -> None:
    """In a process of its own: Triton decides when it is imported whether to interpret."""
    cases = Path(__file__).with_name("kernels_triton_cases.py")
    # Where an extreme value times the inverse step overflows, numpy warns and a GPU does not.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run([*command, str(cases)], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert " passed" in ran.stdout


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
    assert record.getMessage().startswith("Triton makes no kernels here (")


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
