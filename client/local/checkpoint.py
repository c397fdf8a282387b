"""A training in progress, as the site's code saves and loads it."""

from collections.abc import Mapping
from typing import Any


class Checkpoint:
    """Keeps a training in progress, so that a killed client resumes it: `load` at the start, and `save` between two
    steps whenever `is_due`. `plan.drive` does both. This one keeps nothing; the loop passes one that does.
    """

    @property
    def belongs_to(self) -> dict[str, str] | None:
        """What the training is of, as texts by name; None if nothing may be kept."""
        return None

    def is_due(self) -> bool:
        """Whether it is time to save again. Saving takes at most a fortieth of the training's time."""
        return False

    def save(self, state: Mapping[str, object]) -> None:
        """Replace what was saved, or log why not. `state`: dicts, lists, tuples, tensors, numbers and texts, nested."""

    def forget(self) -> None:
        """Remove what was saved."""

    def load(self) -> dict[str, Any] | None:
        """What an earlier process saved for this assignment, tensors on the CPU; None if there is nothing."""
        return None

    def fits_all(self, fits: bool) -> bool:
        """Whether what `load` returned fits this process, and all others that train the same model with it. `fits`:
        whether it does here.
        """
        return fits
