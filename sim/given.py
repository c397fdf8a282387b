"""Objects that a program gives to `simulate`, found by name while it runs.

An experiment's text names code, as in "my_model:Net". An object in a program has no such name, so `given` lends it one
of this module: "umbel.sim.given:Net-3fa9c1d2e4b5a697". Two simulations at a time, in two threads, do not see each
other's objects. Other processes see none: nothing is pickled.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import cast

_FOUND: ContextVar[Mapping[str, object]] = ContextVar("given", default=MappingProxyType({}))


@contextmanager
def given(objects: Mapping[str, object]) -> Generator[None]:
    """Let these objects be found by their names inside."""
    before = _FOUND.set({**_FOUND.get(), **objects})
    try:
        yield
    finally:
        _FOUND.reset(before)


def name_of(attribute: str) -> str:
    """The name by which an experiment's text finds an object that is given under this attribute."""
    return f"{__name__}:{attribute}"


def is_given(name: str) -> bool:
    """Whether a name in an experiment's text is that of an object which a program gave."""
    return name.startswith(f"{__name__}:")


def only_here(value: object) -> str | None:
    """The first name in `value` that names code which other processes cannot import; None if there is none.

    Such names are those of given objects, and those of the main module, such as `__main__:Net`.
    """
    match value:
        case str():
            return value if value.startswith("__main__:") or is_given(value) else None
        case dict() | list():
            inner = cast(Mapping[str, object], value).values() if isinstance(value, dict) else cast(list[object], value)
            return next((found for one in inner if (found := only_here(one)) is not None), None)
        case _:
            return None


def why_only_here(name: str) -> str:
    """Why other processes cannot import this code, and what to do; to be continued with the engines that can use it."""
    attribute = name.partition(":")[2].rpartition("-")[0] if is_given(name) else name.partition(":")[2]
    where = "is an object of this program" if is_given(name) else "is defined in this notebook or script"
    shown = attribute if attribute.isidentifier() else "make"
    return (
        f"{attribute if is_given(name) else name} {where}, from which worker processes cannot import it: save it in a "
        f'file beside it, such as my_code.py, and name it "my_code:{shown}"'
    )


def __getattr__(name: str) -> object:
    """An object that is given now. Raises `AttributeError` as for any module."""
    try:
        return _FOUND.get()[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
