"""Bytes of clients that are to be added to what is stored of their assignments."""

from collections import Counter
from dataclasses import dataclass, field

from umbel.aggregation.types import AssignmentId


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one run, by assignment: bytes that came up and that went down."""

    up: Counter[AssignmentId] = field(default_factory=Counter[AssignmentId])
    down: Counter[AssignmentId] = field(default_factory=Counter[AssignmentId])

    @property
    def assignments(self) -> tuple[AssignmentId, ...]:
        """Of which anything is counted."""
        return tuple(sorted(self.up.keys() | self.down.keys()))
