"""What of a model travels: the kind of each tensor, declared by patterns of names.

```
kind      the coordinator sends it    clients send their change    the coordinator has it
mean      yes                         yes: a weighted mean         yes (the default)
global    yes                         no                           yes
count     yes                         yes: integers that add up    yes
control   yes                         yes: a weighted mean         yes: SCAFFOLD's control variate of a weight
private   no                          no                           no: each site has its own
base      no                          no                           no: each site has the same, bound by a hash
```

No pattern declares the kind control: a run with SCAFFOLD adds such tensors to its model (`Layout.with_control`).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from umbel.aggregation.types import require_sha256

TensorKind: TypeAlias = Literal["mean", "global", "count", "control", "private", "base"]
ListedKind: TypeAlias = Literal["global", "count", "private", "base"]
TensorPatterns: TypeAlias = Mapping[ListedKind, tuple[str, ...]]

KINDS_HELD: frozenset[TensorKind] = frozenset({"mean", "global", "count", "control"})
"""The kinds of tensors that the coordinator has, so that they are in a run's layout."""
KINDS_KEPT: frozenset[TensorKind] = frozenset({"private", "base"})
"""The kinds of tensors that never leave a site."""
PATTERNS_MAX = 64
PATTERN_CHARS_MAX = 128


@dataclass(frozen=True, slots=True)
class TensorRules:
    """The run file's [tensors] and `base_sha256`.

    Raises `ValueError` for too many or too long patterns, and for a malformed hash.
    """

    patterns: TensorPatterns
    base_sha256: str = ""  # of the base tensors (`model/base.py`), hex; empty if the run has none

    def __post_init__(self) -> None:
        patterns = [pattern for listed in self.patterns.values() for pattern in listed]
        if len(patterns) > PATTERNS_MAX:
            raise ValueError(f"[tensors] has {len(patterns)} patterns, but at most {PATTERNS_MAX} are allowed")
        for pattern in patterns:
            if not (1 <= len(pattern) <= PATTERN_CHARS_MAX and pattern.isprintable()):
                raise ValueError(
                    f"a pattern in [tensors] must have 1 to {PATTERN_CHARS_MAX} printable characters, not "
                    f"{pattern[:PATTERN_CHARS_MAX]!r}"
                )
        if self.base_sha256:
            require_sha256(self.base_sha256, "base_sha256")

    def kind_of(self, name: str) -> ListedKind | None:
        """The kind that lists this tensor; None if no pattern matches. Raises `ValueError` for two kinds."""
        found: dict[ListedKind, str] = {}
        for kind, patterns in self.patterns.items():
            if matching := [pattern for pattern in patterns if fnmatchcase(name, pattern)]:
                found[kind] = matching[0]
        if len(found) > 1:
            (one, first), (other, second) = sorted(found.items())[:2]
            raise ValueError(
                f"tensor {name!r} is in two lists of [tensors]: {first!r} of {one} and {second!r} of {other} match it. "
                "A tensor has one kind, so change one of the patterns"
            )
        return next(iter(found), None)

    def unmatched(self, names: Collection[str], *kinds: ListedKind) -> str:
        """The first pattern of these kinds (of all kinds if none is given) that matches no name; empty if there is
        none."""
        listed = [one for kind, ones in sorted(self.patterns.items()) if not kinds or kind in kinds for one in ones]
        return next((one for one in listed if not any(fnmatchcase(name, one) for name in names)), "")
