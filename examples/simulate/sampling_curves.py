"""Accuracy over rounds and over the samples that clients trained on, of `sampling.toml` or `sampling-shakespeare.toml`.

    umbel simulate examples/simulate/sampling.toml --out out/sampling --data DIR
    python -m examples.simulate.sampling_curves out/sampling curves.png

Prints a table, and draws a picture. In a round, proportional draws ask clients with more samples than uniform draws do.
So curves over rounds favour them, and curves over samples do not.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from umbel.sim.bench.sampling.errors import Floats
from umbel.sim.experiment.trials import Estimate
from umbel.sim.results.plot_style import INK, OURS, PEER, as_percent, dress, new_figure, write_figure
from umbel.sim.results.results import ROUNDS_FILE

NAMES = {"proportional": "proportional, plain mean", "samples": "uniform, weighted mean"}
COLOURS = {"proportional": OURS, "samples": PEER}
N_LAST = 10  # measured models whose mean accuracy is that of a run
PLACES = 100  # of a curve


@dataclass(frozen=True, slots=True)
class Course:
    """One run: after each measured model the number of rounds, the samples trained on so far, and the accuracy."""

    rounds: Floats
    samples: Floats
    accuracy: Floats

    def at_samples(self, samples: Floats) -> Floats:
        """The accuracy after so many samples, between two measured models on the line that joins them."""
        return np.interp(samples, self.samples, self.accuracy)


def courses(folder: Path) -> Mapping[str, Mapping[str, Sequence[Course]]]:
    """The runs of a folder of results, one for each seed, by setting and then by weighting."""
    rows = defaultdict[tuple[str, str, int], list[dict[str, Any]]](list)
    for line in (folder / ROUNDS_FILE).read_text().splitlines():
        row = json.loads(line)
        weighting, _, setting = str(row["point"]).removeprefix("weighting=").partition(", ")
        rows[setting, weighting, row["seed"]].append(row)
    found = defaultdict[str, dict[str, list[Course]]](dict)
    for (setting, weighting, _), of_run in rows.items():
        samples = np.cumsum([row["sample_count"] for row in of_run])
        kept = [i for i, row in enumerate(of_run) if row["accuracy"] is not None]
        course = Course(
            np.array([of_run[i]["round"] for i in kept], dtype=np.float64),
            samples[kept].astype(np.float64),
            np.array([of_run[i]["accuracy"] for i in kept]),
        )
        found[setting].setdefault(weighting, []).append(course)
    return found


def lines(found: Mapping[str, Mapping[str, Sequence[Course]]]) -> list[str]:
    """A table: for each setting, accuracies of the last models, of equal numbers of samples, and samples of a run."""
    table = [
        "| setting | drawn | last models | jumps | after as many samples as the shorter runs | samples a round |",
        "|---|---|---|---|---|---|",
    ]
    for setting, by_weighting in found.items():
        least = min(float(run.samples[-1]) for runs in by_weighting.values() for run in runs)
        figures = {weighting: np.array([_of(run, least) for run in runs]) for weighting, runs in by_weighting.items()}
        for weighting, runs in by_weighting.items():
            a_round = float(np.mean([run.samples[-1] / run.rounds[-1] for run in runs]))
            cells = [setting, NAMES[weighting], *map(_words, figures[weighting].T), f"{a_round:,.0f}"]
            table.append("| " + " | ".join(cells) + " |")
        gains = map(_words, (figures["proportional"] - figures["samples"]).T)
        table.append("| " + " | ".join([setting, "second minus first, seed by seed", *gains]) + " | |")
    return table


def _of(run: Course, samples: float) -> tuple[float, float, float]:
    """The accuracy of the last models, how much it jumps from one to the next, and that after so many samples."""
    last = run.accuracy[-N_LAST:]
    return float(last.mean()), float(np.abs(np.diff(last)).mean()), float(run.at_samples(np.array([samples]))[0])


def _words(values: Floats) -> str:
    """Mean and half of its 95 % interval, in %."""
    found = Estimate.of(values.tolist())
    assert found is not None, "each setting has runs"
    half = "" if found.high is None else f" ± {100 * (found.high - found.mean):.1f}"
    return f"{100 * found.mean:.1f}{half}"


def draw(found: Mapping[str, Mapping[str, Sequence[Course]]], path: Path) -> None:
    """A column for each setting: the accuracy over rounds above, and over samples below, with 95 % intervals."""
    figure = new_figure(4.4 * len(found) + 1, 7.2, "How clients are drawn: accuracy over rounds and over samples")
    grid = figure.subplots(2, len(found), squeeze=False)
    for column, (setting, by_weighting) in enumerate(found.items()):
        above, below = grid[0][column], grid[1][column]
        for weighting, runs in by_weighting.items():
            colour, name = COLOURS[weighting], NAMES[weighting]
            _band(above, runs[0].rounds, np.stack([run.accuracy for run in runs]), colour, name)
            samples = np.linspace(max(run.samples[0] for run in runs), min(run.samples[-1] for run in runs), PLACES)
            _band(below, samples / 1e3, np.stack([run.at_samples(samples) for run in runs]), colour, name)
        dress(above, setting or "natural clients", "round")
        dress(below, "", "thousand samples that clients trained on")
        above.legend(frameon=False, fontsize=9, loc="lower right")
        for axes in (above, below):
            axes.yaxis.set_major_formatter(as_percent)
    grid[0][0].set_ylabel("accuracy on the test set", color=INK)
    grid[1][0].set_ylabel("accuracy on the test set", color=INK)
    write_figure(figure, path)


def _band(axes: Axes, places: Floats, accuracies: Floats, colour: str, name: str) -> None:
    """`accuracies`: (seeds, places)."""
    found = [Estimate.of(column.tolist()) for column in accuracies.T]
    known = [one for one in found if one is not None]
    axes.plot(places, [one.mean for one in known], color=colour, lw=2, label=name)
    low, high = ([getattr(one, name) or one.mean for one in known] for name in ("low", "high"))
    axes.fill_between(places, low, high, color=colour, alpha=0.18, lw=0)


if __name__ == "__main__":
    results = courses(Path(sys.argv[1]))
    print(*lines(results), sep="\n")
    draw(results, Path(sys.argv[2]))
