"""How often Python looks for garbage while thousands of clients make objects by the hundred thousand.

Hardly anything of a round is in a cycle, so nearly all of it goes when it is not referred to any more. Yet after so
many new objects, Python's collector would look through all that there are, torch's included: of a round of ten thousand
small clients that took up to a third of the time.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager

_NEW_OBJECTS = 200_000  # until it looks: some tens of megabytes, if all of them were garbage


@contextmanager
def seldom_collected() -> Generator[None]:
    """Inside, what lives already is left out, and what is new is looked through seldom."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
