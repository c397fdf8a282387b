"""Progress in a notebook's cell: one output, whose content is replaced."""

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

from tests.sim.federation.worlds import table
from umbel.sim import simulate
from umbel.sim.experiment.file import experiment_of
from umbel.sim.results.notebook import NotebookCell
from umbel.sim.results.shown import Bars

TWO = table(rounds={"count": 3}, seeds=[0, 1])


class Cell:
    """Stands in for IPython: the outputs of a cell, and every content that they had."""

    def __init__(self) -> None:
        self.outputs, self.contents = 0, list[dict[str, str]]()

    def display(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> "Cell":
        assert raw
        assert display_id
        self.outputs += 1
        self.contents.append(bundle)
        return self

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.contents.append(bundle)


def ticking(step_s: float) -> Iterator[float]:
    now_s = 0.0
    while True:
        yield now_s
        now_s += step_s


def shown(step_s: float) -> Cell:
    """What a cell shows of two runs, if this time passes between two events."""
    cell, ticks = Cell(), ticking(step_s)
    with Bars(2, NotebookCell(cell.display, lambda: next(ticks))) as bars:
        simulate(TWO, watcher=bars)
    return cell


def test_the_cell_has_one_output_that_ends_with_all_runs_done() -> None:
    cell = shown(1.0)
    assert cell.outputs == 1
    assert len(cell.contents) == 2 * (1 + 3 + 1) + 1  # each run's begin, rows and end; and the end of all
    last: Any = cell.contents[-1]
    assert re.search(r"^runs .* 2/2 ", last["text/plain"], re.MULTILINE)
    assert re.search(r"^seed 1 .* 3/3 .*accuracy \d", last["text/plain"], re.MULTILINE)
    assert unescape(re.sub(r"<[^>]*>", "", last["text/html"])).strip() == last["text/plain"].strip()


def test_runs_that_had_ended_before_are_shown_as_done(tmp_path: Path) -> None:
    simulate(TWO, tmp_path / "out")
    cell, ticks = Cell(), ticking(1.0)
    with Bars(2, NotebookCell(cell.display, lambda: next(ticks))) as bars:
        simulate(TWO, tmp_path / "out", watcher=bars)
    assert re.search(r"^seed 1 .* 3/3 ", cell.contents[-1]["text/plain"], re.MULTILINE)


def test_a_busy_cell_is_updated_ten_times_a_second_and_still_ends_right() -> None:
    cell = shown(0.03)
    n_events = 2 * 5
    assert 1 < len(cell.contents) <= n_events * 0.03 / 0.1 + 2
    assert re.search(r"^runs .* 2/2 ", cell.contents[-1]["text/plain"], re.MULTILINE)


def test_outside_a_notebook_bars_are_on_standard_error(capsys: Any) -> None:
    simulate(TWO, progress=True)
    told = capsys.readouterr()
    assert told.out == ""
    assert "seed 1" in told.err
    assert len(experiment_of(TWO).trials) == 2
