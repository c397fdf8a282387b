"""Number tests under each setting that changes the last bits of the libraries beneath: `python -m tests.suite.bits`.

MKL and OpenBLAS (matrix products, solvers), torch's own vector code and numpy's each choose by processor how they
compute; these variables have them choose as on other processors. What umbel promises to be the same everywhere
(docs/reference/bits.md) must come out the same under each.

Without `--all` it runs the tests marked `bits` under each setting: a minute on two quiet cores. They cross each kind of
kernels with one thread and two by themselves. With `--all` it runs all tests of the arithmetic, under each setting with
one thread and with two, and then with each kind of kernels for the whole process: that takes hours.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from umbel.aggregation.kernels.native import Path, library

_AT_ONCE = 2
# Of numpy, from the narrowest on; none where a variable has disabled them all.
_VECTORS: list[str] = np.show_config("dicts")["SIMD Extensions"].get("found", [])


def _without(vectors: list[str]) -> Mapping[str, str]:
    """The setting under which numpy does without these vector instructions: none where the machine has none of them."""
    return {"NPY_DISABLE_CPU_FEATURES": " ".join(vectors)} if vectors else {}


SETTINGS: tuple[Mapping[str, str], ...] = (
    {},
    {"MKL_CBWR": "COMPATIBLE"},
    {"MKL_CBWR": "AVX2"},
    {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "OPENBLAS_CORETYPE": "Nehalem"},
    {"ATEN_CPU_CAPABILITY": "default", **_without(_VECTORS)},
    {"ATEN_CPU_CAPABILITY": "avx2", **_without(_VECTORS[1:])},
)
OF_BITS = ("tests/vectors", "tests/frozen", "tests/aggregation/secagg/test_transcript.py")  # all that are marked
OF_ARITHMETIC = ("tests/vectors", "tests/aggregation", "tests/sim/fleet/test_draws.py", "tests/sim/data")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the tests under one setting: whether they passed, and what pytest wrote."""

    setting: Mapping[str, str]
    passed: bool
    seconds: float
    output: str

    @property
    def words(self) -> str:
        said = " ".join(f"{name}={value.split()[0]}" for name, value in self.setting.items()) or "(this machine's own)"
        last = (self.output.strip().splitlines() or ["no output"])[-1]
        return f"{'ok    ' if self.passed else 'FAILED'}  {self.seconds:5.0f} s  {said}: {last}"


def settings(is_all: bool) -> Iterator[Mapping[str, str]]:
    """Which environments the tests run in."""
    if not is_all:
        yield from SETTINGS
        return
    for setting in SETTINGS:
        for n_threads in ("1", "2"):
            yield {**setting, "OMP_NUM_THREADS": n_threads}
    for kernels in (Path.TORCH, *library().paths):
        yield {"UMBEL_KERNELS": kernels}


def run(setting: Mapping[str, str], selected: tuple[str, ...]) -> Outcome:
    """The tests under one setting, in a process of its own: libraries choose when they are loaded."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selected]
    # Threads that wait busily for one another take the cores from the other process; it changes no bits.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", **setting}
    began = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return Outcome(setting, done.returncode == 0, time.monotonic() - began, done.stdout + done.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="all tests of the arithmetic, not only those marked bits")
    is_all: bool = parser.parse_args().all
    selected = OF_ARITHMETIC if is_all else ("-m", "bits", *OF_BITS)
    failed = 0
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for outcome in pool.map(lambda setting: run(setting, selected), settings(is_all)):
            print(outcome.words, flush=True)
            if not outcome.passed:
                failed += 1
                print(outcome.output)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
