"""What a function takes in a process of its own: what it returns, and the most memory that the process has held."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Generic, TypeVar

from umbel.client.training.probe import memory_peak_bytes

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class MeasuredCall(Generic[Found]):
    """`peak_bytes`: of resident memory, the interpreter's and torch's included."""

    found: Found
    peak_bytes: int


def in_child(function: Callable[..., Found], *arguments: object) -> MeasuredCall[Found]:
    """Call it in a fresh process. What it takes and returns must be picklable; what it raises is raised here."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measured, function, arguments).result()


def _measured(function: Callable[..., Found], arguments: tuple[object, ...]) -> MeasuredCall[Found]:
    return MeasuredCall(function(*arguments), memory_peak_bytes())
