"""`umbel bench sampling`: clients drawn in proportion to their samples, against clients drawn uniformly.

Both estimate the mean change of all clients: the first by a plain mean (`weighting = "proportional"`), the second by a
mean weighted by samples (`weighting = "samples"`). The clients hold parts of one data set with other classes for each
(Dirichlet, 0.3), of sizes from even to very uneven. `errors.py` has the definitions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from umbel.aggregation.plans.round import Weighting
from umbel.sim.bench.report import BenchRow, Report
from umbel.sim.bench.sampling.errors import (
    ClientChanges,
    MeanErrors,
    drawn_weights,
    errors_of,
    proportional_error,
    samples_in_round,
    scheme_two,
)
from umbel.sim.bench.sampling.rounds import CIRCUMSTANCES, weights_in_rounds
from umbel.sim.bench.sampling.training import changes_on_the_way
from umbel.sim.data.data_set import DataSet
from umbel.sim.data.load import DataSection, load
from umbel.sim.data.partition.heterogeneity import heterogeneity
from umbel.sim.data.partition.partition import SizesSection
from umbel.sim.data.partition.section import PartitionSection
from umbel.sim.experiment.world import deal
from umbel.sim.results.plot_style import FAINT, OURS, PEER, SLATE, dress, new_figure, write_figure

SEED = 1
ROUNDS = (1, 5, 25)  # of the training, at whose models the errors are measured
UNIFORM, PROPORTIONAL = Weighting.SAMPLES, Weighting.PROPORTIONAL


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured. `n_drawn`: rounds for each error; `n_played`: rounds with devices for each error."""

    data: DataSection
    n_clients: int = 100
    least: int = 10  # samples of a client
    cohorts: Sequence[int] = (5, 10, 50)
    rounds: Sequence[int] = ROUNDS
    n_drawn: int = 4000
    n_played: int = 500


FULL = Extent(DataSection("mnist", train_limit=10_000))
QUICK = Extent(DataSection("digits"), n_clients=50, least=4, cohorts=(5, 10), rounds=(5,), n_drawn=500, n_played=100)

# From even to very uneven. With the smaller exponent one client may hold nearly half of the samples.
SIZES: Mapping[str, SizesSection] = {
    "equal": SizesSection(),
    "log-normal, 1": SizesSection("log-normal", sigma=1.0),
    "power law, 2": SizesSection("power-law", exponent=2.0),
    "power law, 1.5": SizesSection("power-law", exponent=1.5),
}
UNEVEN = "power law, 2"


@dataclass(frozen=True, slots=True)
class SamplingPoint:
    """One setting, and the errors of both ways to draw. `scheme_two`: of Li et al. 2020, with the uniform draws."""

    sizes: str
    cohort: int
    round: int  # of the training
    circumstances: str  # empty: all drawn clients report
    uniform: MeanErrors
    proportional: MeanErrors
    scheme_two: MeanErrors | None = None
    exact: float | None = None  # the error of proportional draws, by its formula
    samples: tuple[float, float] | None = None  # that a cohort trains on: uniform and proportional


def measure(*, quick: bool, data: Path | None, plot: Path | None) -> Report:
    """Run the benchmark, and draw it to `plot`. `data`: the folder with MNIST, for all but a quick run.

    Raises `DataError` if MNIST cannot be had, `OSError` if the picture cannot be written.
    """
    scale = QUICK if quick else FULL
    loaded = load(scale.data, data, SEED)
    assert isinstance(loaded, DataSet), "the data are not synthetic"
    points, notes = list[SamplingPoint](), list[str]()
    for name, law in SIZES.items():
        partition = PartitionSection("dirichlet", scale.n_clients, min_samples=scale.least, alpha=0.3, sizes=law)
        population, dealt = deal(loaded, partition, SEED)
        skew = heterogeneity(dealt, None).sizes
        notes.append(
            f"{name}: {scale.n_clients} clients with {skew.least} to {skew.greatest} samples, median {skew.median:g}; "
            f"weighted by samples they count as {skew.effective_clients:.1f} equal clients."
        )
        found = dict(zip(scale.rounds, changes_on_the_way(loaded, population, scale.rounds, SEED), strict=True))
        points += drawn_points(name, found, scale)
        if name == UNEVEN:
            points += played_points(name, found[scale.rounds[len(scale.rounds) // 2]], scale)
    if plot is not None:
        draw_sampling(points, plot)
    return Report("sampling", tuple(row for point in points for row in _rows(point)), (*_NOTES, *notes))


def drawn_points(name: str, changes: Mapping[int, ClientChanges], scale: Extent) -> Iterator[SamplingPoint]:
    """Rounds in which all drawn clients report. `changes`: by round of the training, with the same sizes."""
    sizes = next(iter(changes.values())).sizes
    for cohort in scale.cohorts:
        uniform, proportional = (
            drawn_weights(weighting, sizes, cohort, scale.n_drawn, SEED) for weighting in (UNIFORM, PROPORTIONAL)
        )
        unscaled = scheme_two(uniform, sizes)
        for number, one in changes.items():
            yield SamplingPoint(
                name,
                cohort,
                number,
                "",
                errors_of(uniform, one),
                errors_of(proportional, one),
                errors_of(unscaled, one),
                proportional_error(one, cohort),
                (samples_in_round(UNIFORM, sizes, cohort), samples_in_round(PROPORTIONAL, sizes, cohort)),
            )


def played_points(name: str, changes: ClientChanges, scale: Extent) -> Iterator[SamplingPoint]:
    """Rounds with devices, some of which do not report."""
    number = scale.rounds[len(scale.rounds) // 2]
    for circumstances in CIRCUMSTANCES:
        for cohort in scale.cohorts:
            uniform, proportional = (
                errors_of(
                    weights_in_rounds(weighting, changes.sizes, cohort, circumstances, scale.n_played, SEED), changes
                )
                for weighting in (UNIFORM, PROPORTIONAL)
            )
            yield SamplingPoint(name, cohort, number, circumstances.name, uniform, proportional)


def _rows(point: SamplingPoint) -> Iterator[BenchRow]:
    """Errors divided by |X|: proportional draws in the place of ours, uniform ones in the place of theirs."""
    where = f"{point.sizes}, {point.cohort} of a round, round {point.round}"
    where += f", {point.circumstances}" if point.circumstances else ""
    against, unit = "uniform draws, mean weighted by samples", "|X|"
    yield BenchRow(f"{where}: error", point.proportional.error, against, point.uniform.error, unit)
    yield BenchRow(f"{where}: bias", point.proportional.bias, against, point.uniform.bias, unit)
    if point.samples is not None:
        yield BenchRow(f"{where}: trained on", point.samples[1], against, point.samples[0], "samples")
    if point.exact is not None:
        yield BenchRow(f"{where}: error", point.proportional.error, "its formula", point.exact, unit)
    if point.scheme_two is not None:
        yield BenchRow(
            f"{where}: error", point.proportional.error, "uniform draws, scheme II", point.scheme_two.error, unit
        )


_NOTES = (
    "Proportional draws with a plain mean, against uniform draws; |X| is the length of the mean change of all clients.",
    "error^2 = bias^2 + deviation^2, over drawn rounds. Scheme II of Li et al. 2020 weights uniform draws by N / K p.",
    f"The circumstances are those of clients with sizes by the {UNEVEN}.",
)


def draw_sampling(points: Sequence[SamplingPoint], path: Path) -> None:
    """Errors and biases by cohort: of each law of sizes, and in each circumstance. Raises `OSError`."""
    rounds = sorted({point.round for point in points})
    kept = [point for point in points if point.round == rounds[len(rounds) // 2]]
    figure = new_figure(18, 8, "Error of a round's mean change, by how clients are drawn")
    grid = figure.subplots(2, len(SIZES), squeeze=False)
    for axes, name in zip(grid[0], SIZES, strict=True):
        _lines(axes, [one for one in kept if one.sizes == name and not one.circumstances], f"all report; {name}")
    for axes, name in zip(grid[1], (one.name for one in CIRCUMSTANCES), strict=False):
        _lines(axes, [one for one in kept if one.circumstances == name], f"{UNEVEN}; {name}")
    grid[0][0].legend(frameon=False, fontsize=9)
    for axes in grid[1][len(CIRCUMSTANCES) :]:
        axes.set_axis_off()
    write_figure(figure, path)


def _lines(axes: Axes, points: Sequence[SamplingPoint], title: str) -> None:
    cohorts = [point.cohort for point in points]
    for errors, color, name in (
        ([point.uniform for point in points], PEER, "uniform, weighted mean"),
        ([point.proportional for point in points], OURS, "proportional, plain mean"),
        ([point.scheme_two for point in points if point.scheme_two], SLATE, "uniform, scheme II"),
    ):
        if not errors:
            continue
        axes.plot(cohorts, [one.error for one in errors], color=color, marker="o", lw=2, label=f"{name}: error")
        axes.plot(cohorts, [one.bias for one in errors], color=color, ms=3, lw=1.4, ls=":", label="its bias")
    axes.set_xscale("log")
    axes.set_xticks(cohorts, [str(one) for one in cohorts])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0)
    dress(axes, title, "clients (draws) of a round")
    axes.set_ylabel("divided by |X|", color=FAINT, fontsize=9)
