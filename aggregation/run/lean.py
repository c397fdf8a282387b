"""Which way rounds lean: the data of the clients whose reports count, against the data of those that were left out.

A round that closes at its target leaves out its slowest clients. These are often the clients with most data, so the
model leans to the others. The numbers are the same in a coordinator's records and in a simulation's rows. Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Protocol

from umbel.aggregation.phrases import agreeing, part_of

_ALIKE = 1.1  # mean numbers of samples that differ by a smaller factor count as alike


class Attendance(Protocol):
    """The part of a round's record, or of a simulation's row, that says who took part.

    Sample counts are those that clients announced; 0 where masks hide them.
    """

    @property
    def reported(self) -> int: ...
    @property
    def partial(self) -> int: ...
    @property
    def dropped(self) -> int: ...
    @property
    def samples_in(self) -> int: ...
    @property
    def samples_left_out(self) -> int: ...
    @property
    def passed_over(self) -> int: ...
    @property
    def samples_passed_over(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Lean:
    """The attendance of some rounds, added up: a client that was in two rounds counts twice."""

    reported: int = 0  # reports that count
    partial: int = 0  # of these, with fewer steps than planned
    left_out: int = 0  # clients that were asked, and whose reports do not count
    passed_over: int = 0  # clients that waited, and were not asked
    samples_in: int = 0  # of the clients in `reported`, as are the next two of theirs
    samples_left_out: int = 0
    samples_passed_over: int = 0
    unknown: int = 0  # rounds without any sample count: then nothing is known of the samples of all rounds

    @classmethod
    def of(cls, rounds: Iterable[Attendance]) -> "Lean":
        """Of these rounds, which should be committed rounds of training."""
        total = cls()
        for one in rounds:
            n_asked, n_samples = one.reported + one.dropped, one.samples_in + one.samples_left_out
            total += cls(
                reported=one.reported,
                partial=one.partial,
                left_out=one.dropped,
                passed_over=one.passed_over,
                samples_in=one.samples_in,
                samples_left_out=one.samples_left_out,
                samples_passed_over=one.samples_passed_over,
                unknown=int(n_asked > 0 and n_samples == 0),
            )
        return total

    def __add__(self, other: "Lean") -> "Lean":
        return Lean(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Lean)))

    @property
    def partial_share(self) -> float | None:
        """Of the reports that count, 0 to 1; None without a report."""
        return self.partial / self.reported if self.reported else None

    @property
    def left_out_share(self) -> float | None:
        """Of the clients that were asked, 0 to 1; None if none was."""
        asked = self.reported + self.left_out
        return self.left_out / asked if asked else None

    @property
    def samples_share(self) -> float | None:
        """The share of the asked clients' samples whose reports count, 0 to 1; None if a round's counts are not known,
        because masks hide them or clients have not said them.
        """
        asked = self.samples_in + self.samples_left_out
        return self.samples_in / asked if asked and not self.unknown else None

    @property
    def mean_in(self) -> float | None:
        """Samples of a client whose report counts; None if unknown."""
        return self.samples_in / self.reported if self.reported and self.samples_share is not None else None

    @property
    def mean_left_out(self) -> float | None:
        """Samples of a client that was left out; None if unknown, or if none was."""
        return self.samples_left_out / self.left_out if self.left_out and self.samples_share is not None else None

    @property
    def mean_passed_over(self) -> float | None:
        """Samples of a client that waited and was not asked; None if unknown, or if none was."""
        return self.samples_passed_over / self.passed_over if self.passed_over and self.samples_passed_over else None

    @property
    def words(self) -> str:
        """In a sentence or three; empty if no client was left out and no report was partial."""
        if not (self.left_out or self.partial):
            return ""
        asked = self.reported + self.left_out
        parts = [f"{part_of(self.partial, self.reported, 'report', 'was', 'were')} partial"]
        parts.append(f"{part_of(self.left_out, asked, 'asked client', 'was', 'were')} left out")
        said = "; ".join(parts)
        if (mean_in := self.mean_in) is None or (mean_out := self.mean_left_out) is None:
            return said
        means = [f"{mean_in:.0f} {agreeing(round(mean_in), 'sample', 'samples')} if their reports count"]
        means.append(f"{mean_out:.0f} if they were left out")
        if self.mean_passed_over is not None:
            means.append(f"{self.mean_passed_over:.0f} if they waited and were not asked")
        share = f"{self.samples_share:.0%} of the asked samples count"
        return f"{said}; clients have on average {', '.join(means)}; {share}, so {_towards(mean_in, mean_out)}"


def _towards(mean_in: float, mean_out: float) -> str:
    if mean_out > _ALIKE * mean_in:
        return "the model leans to clients with little data"
    if mean_in > _ALIKE * mean_out:
        return "the model leans to clients with much data"
    return "the model leans neither to clients with much data nor to those with little"
