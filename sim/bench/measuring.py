"""Measurements that benchmarks share: CPU time of kernels that take turns, memory, and a call in its own process."""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Generic, TypeVar

import psutil

from umbel.client.training.probe import memory_peak_bytes

MB = 1e6
_SAMPLE_S = 0.02
Found = TypeVar("Found")


def least_ms(kernels: Sequence[Callable[[], object]], repetitions: int) -> list[float]:
    """The least CPU time of this process for each kernel, in ms. Kernels take turns, so a busy machine slows all."""
    least = [float("inf")] * len(kernels)
    for _ in range(repetitions):
        for i, kernel in enumerate(kernels):
            started = time.process_time()
            kernel()
            least[i] = min(least[i], (time.process_time() - started) * 1e3)
    return least


class RssPeak:
    """The greatest resident set of a process, in MB, sampled every 20 ms."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._ended = threading.Event()
        self.peak_mb = self.now_mb()
        self._thread = threading.Thread(target=self._sample, name="rss", daemon=True)

    def now_mb(self) -> float:
        return float(self._process.memory_info().rss) / MB

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self.peak_mb = max(self.peak_mb, self.now_mb())

    @contextmanager
    def sampling(self) -> Generator[None]:
        """Sample inside."""
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join()


@dataclass(frozen=True, slots=True)
class MeasuredCall(Generic[Found]):
    """A function's result, and the peak resident memory of its process, the interpreter and torch included."""

    found: Found
    peak_bytes: int


def in_child(function: Callable[..., Found], *arguments: object) -> MeasuredCall[Found]:
    """Call it in a fresh process. Arguments and result must be picklable; its exception is raised here."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measured, function, arguments).result()


def _measured(function: Callable[..., Found], arguments: tuple[object, ...]) -> MeasuredCall[Found]:
    return MeasuredCall(function(*arguments), memory_peak_bytes())
