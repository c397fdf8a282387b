"""What every `umbel bench` prints: rows that compare our figure with another from the same run.

A row's `ratio` is ours / theirs. `hold` is the promised bound on the ratio or on our own figure (then with its unit);
`holds` says whether this run met it; None without a promise.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table
from rich.text import Text


class BenchFailed(Exception):
    """A benchmark could not be run, or a peer did other work; the message says what to look at."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A promise: `of` (the ratio, or our own figure) is at most, or at least, `bound`."""

    bound: float
    of: Literal["ratio", "ours"] = "ratio"
    sense: Literal["<=", ">="] = "<="

    def met_by(self, value: float) -> bool:
        return value <= self.bound if self.sense == "<=" else value >= self.bound


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One comparison. `ours` and `theirs` are in `unit`; `against` describes theirs."""

    what: str
    ours: float
    against: str
    theirs: float
    unit: str
    promise: Hold | None = None

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs if self.theirs else float("inf")

    @property
    def hold(self) -> str | None:
        if self.promise is None:
            return None
        unit = f" {self.unit}" if self.promise.of == "ours" else ""
        return f"{self.promise.sense} {self.promise.bound:g}{unit}"

    @property
    def holds(self) -> bool | None:
        if self.promise is None:
            return None
        return self.promise.met_by(self.ratio if self.promise.of == "ratio" else self.ours)

    @property
    def sentence(self) -> str:
        """The measured ratio, or our own figure, and the promise."""
        ours, theirs = (f"{_figure(value)} {self.unit}" for value in (self.ours, self.theirs))
        if self.promise is None or self.promise.of == "ours":
            return f"{self.what}: {ours}, promised {self.hold}"
        return f"{self.what}: {_figure(self.ratio)} x {self.against} ({ours} / {theirs}), promised {self.hold} x"

    def to_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in asdict(self).items() if name != "promise"}
        return {**fields, "ratio": self.ratio, "hold": self.hold, "holds": self.holds}


@dataclass(frozen=True, slots=True)
class Report:
    """One benchmark's rows. `notes`: how they were measured, a sentence each."""

    bench: str
    rows: tuple[BenchRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def broken(self) -> Sequence[BenchRow]:
        """The rows with a broken promise."""
        return [row for row in self.rows if row.holds is False]

    def to_json(self) -> dict[str, Any]:
        return {"bench": self.bench, "rows": [row.to_json() for row in self.rows], "notes": list(self.notes)}

    def to_table(self) -> Table:
        table = Table(title=f"umbel bench {self.bench}", title_justify="left", caption_justify="left")
        for name in ("what", "ours", "against", "theirs", "ratio", "promise"):
            table.add_column(name, justify="right" if name in ("ours", "theirs", "ratio") else "left")
        for row in self.rows:
            ours, theirs = (f"{_figure(value)} {row.unit}" for value in (row.ours, row.theirs))
            table.add_row(escape(row.what), ours, escape(row.against), theirs, f"{_figure(row.ratio)} x", _verdict(row))
        table.caption = escape("\n".join(self.notes))
        return table


def _figure(value: float) -> str:
    """Three digits, or all digits of the integer part."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _verdict(row: BenchRow) -> Text:
    if row.holds is None:
        return Text("")
    return Text(f"{row.hold} ✔", style="green") if row.holds else Text(f"{row.hold} ✖", style="bold red")
