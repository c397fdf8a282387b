"""Files from elsewhere, read with a limit, and named by the key that names them."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError


def read_bytes(path: Path, n_max: int) -> bytes:
    """All of a file. Raises `ValueError` if it is longer, `OSError` if it cannot be read."""
    with path.open("rb") as file:
        data = file.read(n_max + 1)
    if len(data) > n_max:
        raise ValueError(f"it is longer than the {n_max} bytes that are allowed")
    return data


@contextmanager
def named_by(key: str, path: Path) -> Generator[None]:
    """Raise `ValueError` with the key of the experiment's file, and the path, where this cannot be read."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{key} names {path}, which cannot be read: {error.strerror or error}") from error


def first_finding(error: ValidationError) -> str:
    """The first thing that is wrong, with the place where it stands."""
    found = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part)[:60] for part in found["loc"])
    what = str(found["msg"]).removeprefix("Value error, ")
    return f"{place}: {what}" if place else what
