"""The results of an experiment as people see them, and as files.

```
OUT/rounds.jsonl                  every row of every run
OUT/summary.json, OUT/curves.png
OUT/panels.png                    if two things are swept
OUT/panels-VALUE.png              if more are swept: for each value of the first
OUT/groups.png                    the last models' scores for each natural holder of data
OUT/quantiles.png                 how accuracy differs between clients, where it was measured for each of them
OUT/recorded.png                  simulation and record, if the fleet is made of a record
```
"""

import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umbel.client.files import write_atomically
from umbel.sim.experiment.file import file_name
from umbel.sim.results.findings import Findings
from umbel.sim.results.frames import Kind, flat, frame_of, of_clients
from umbel.sim.results.models import Models
from umbel.sim.results.shown import ShownTable, as_table, as_text, best_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY_FILE, ROUNDS_FILE = "summary.json", "rounds.jsonl"
CURVES_FILE, PANELS, GROUPS_FILE, RECORDED_FILE = "curves.png", "panels", "groups.png", "recorded.png"
QUANTILES_FILE = "quantiles.png"


@dataclass(frozen=True, slots=True, repr=False)
class Results(Findings):
    """The results of an experiment. Its `repr` is a table of its points; a notebook also shows its picture."""

    @property
    def models(self) -> Models:
        """The last model of each run, in the order of `trials`: `net.load_state_dict(results.models[0])`."""
        return Models(self.trials)

    def frame(self, of: Kind = "rounds") -> Any:
        """A `pandas.DataFrame` with the point and the seed of each row.

        `of`: "rounds": a row for each attempt, as in `rows`; "clients": a row for each client of each attempt, where
        `[measure] clients` asks for them. Metrics have columns such as `test_metrics.auc`. Raises `ImportError` with a
        sentence if pandas is not installed, and `ValueError` for another word, or if no row of a client was measured.
        """
        if of not in ("rounds", "clients"):
            raise ValueError(f'a frame is of "rounds" or of "clients", not of {of!r:.80}')
        rows = [flat(row) for row in (self.rows if of == "rounds" else self.client_rows)]
        if of == "clients" and not rows:
            raise ValueError(
                "no row of a client was measured; add `clients = true` to [measure], and simulate the experiment again"
            )
        return frame_of(rows)

    @property
    def client_rows(self) -> Iterator[dict[str, Any]]:
        """What became of each client in each attempt, with point, seed and round; `[measure] clients` asks for it."""
        return of_clients(self.rows)

    def plot(self) -> "Figure":
        """The picture of accuracy over rounds, bytes and virtual time, and of participation."""
        from umbel.sim.results.plot import curves

        return curves(self)

    def plot_against(self) -> "Figure":
        """The picture of simulations beside the record: when clients report, and when attempts close."""
        from umbel.sim.results.plot import beside_the_record

        return beside_the_record(self)

    def write(self, folder: Path) -> None:
        """Write all files."""
        from umbel.sim.results.plot import groups_plot, panels
        from umbel.sim.results.quantile_plot import quantile_plot

        write_atomically(folder / ROUNDS_FILE, *(json.dumps(row).encode() + b"\n" for row in self.rows))
        write_atomically(folder / SUMMARY_FILE, json.dumps(self.summary(), indent=2).encode() + b"\n")
        figures = {
            CURVES_FILE: self.plot(),
            **{_panels_file(value): figure for value, figure in panels(self).items()},
            GROUPS_FILE: groups_plot(self),
            QUANTILES_FILE: quantile_plot(self),
            RECORDED_FILE: self.plot_against() if self.against else None,
        }
        for name, figure in figures.items():
            if figure is not None:
                figure.savefig(folder / name)

    def __repr__(self) -> str:
        best = best_table(self)
        tables = (as_table(self),) if best is None else (as_table(self), best)
        return "\n".join((self.name, *map(as_text, tables), *self.leans, *self.declines, *self.notes))

    def _repr_html_(self) -> str:
        """Self-contained HTML."""
        best, picture = best_table(self), BytesIO()
        self.plot().savefig(picture, format="png")
        image = b64encode(picture.getvalue()).decode()
        return (
            f"{_table(as_table(self), self.name)}"
            f"{'' if best is None else _table(best, 'the best of ' + ' and '.join(self.best_over))}"
            f"{''.join(f'<p>{escape(note)}</p>' for note in (*self.leans, *self.declines, *self.notes))}"
            f'<img alt="{escape(self.name)}: accuracy over rounds, uploads and virtual time" style="max-width: 100%" '
            f'src="data:image/png;base64,{image}">'
        )


def _panels_file(value: str) -> str:
    return f"{PANELS}-{file_name(value)}.png" if value else f"{PANELS}.png"


def _table(shown: ShownTable, caption: str) -> str:
    lines = [_line("th", shown.header), *(_line("td", row) for row in shown.rows)]
    return f"<table><caption>{escape(caption)}</caption>{''.join(lines)}</table>"


def _line(kind: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{kind}>{escape(cell)}</{kind}>' for cell in cells)}</tr>"
