"""The accuracy of federated training with each codec, and the uploaded bytes: rows of `umbel bench codec`.

Each federation is an experiment that sweeps over codecs, run by the simulator; only the codec differs. It trains the
2NN of McMahan et al. 2017 (arXiv:1602.05629) on MNIST, in their split: two shards of one digit for each client.

Of 100 devices, ten are in a round. A device rarely returns soon, so error feedback has no effect, because its state is
dropped when a client misses a version of the model. Ten silos are in every round, where error feedback works.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from umbel.aggregation.codec.section import CodecSection
from umbel.sim.bench.report import BenchRow, Hold
from umbel.sim.data.sets.fetch import MNIST
from umbel.sim.experiment.trials import TrialResult
from umbel.sim.results.plot_style import FAINT, dress_bench, new_figure, write_figure
from umbel.sim.simulation import simulate

LOST_POINTS_MAX, BYTES_SHARE_MAX = 0.5, 1 / 32
N_VALUES = 199_210  # weights of the 2NN
_SEED = 1


@dataclass(frozen=True, slots=True)
class Setting:
    """A federation: `n_asked` of `n_clients` train in a round, each with `shards_each` shards of one or two digits.

    In a round each takes `n_steps` steps of SGD. Pictures show the score after every `score_every`-th round; the final
    accuracy is the mean of the `n_last` last scores.
    """

    name: str
    n_clients: int
    n_rounds: int
    shards_each: int = 2
    n_asked: int = 10
    learning_rate: float = 0.2  # half of the rate at which float32 diverges
    n_steps: int = 60
    batch_size: int = 10
    score_every: int = 5
    n_last: int = 20
    data: str = "mnist"

    def experiment(self, contenders: "Sequence[Contender]") -> dict[str, Any]:
        """The experiment that compares these codecs, as a table."""
        training = {"local_steps": self.n_steps, "batch_size": self.batch_size, "learning_rate": self.learning_rate}
        return {
            "name": "codec-training",
            "seeds": [_SEED],
            "data": {"name": self.data},
            "partition": {"scheme": "shards", "clients": self.n_clients, "shards_each": self.shards_each},
            "model": {"name": "2nn"},
            "rounds": {"count": self.n_rounds, "target": self.n_asked, "over_selection": 1.0, "window_s": 86_400.0},
            "training": training,
            "sweep": {"contender": [contender.swept for contender in contenders]},
        }


DEVICES = Setting("100 devices", n_clients=100, n_rounds=100)
# Ten times as much data for each, and the same steps in a round.
SILOS = Setting("10 silos", n_clients=10, n_rounds=60)
_QUICK = replace(DEVICES, n_rounds=3, score_every=1, n_last=1)


@dataclass(frozen=True, slots=True)
class Contender:
    """A codec of the run file, and its title."""

    title: str
    codec: CodecSection

    @property
    def swept(self) -> dict[str, object]:
        """A value of the experiment's sweep."""
        keys = asdict(self.codec).items()
        return {"label": self.title, **{f"codec.{key}": value for key, value in keys if value not in (None, False)}}


def _integer(step: float) -> Contender:
    return Contender(f"integer, step {step:g}", CodecSection(name="integer", step=step))


def _eden(bits: int) -> Contender:
    return Contender(f"EDEN, {bits} bit{'s' * (bits > 1)}", CodecSection(name="eden", bits=bits))


FLOAT32 = Contender("float32", CodecSection("float32"))
PROMISED = _integer(4.0)
_SIGN = Contender("sign", CodecSection(name="sign"))
_MASK = Contender("random mask, 1 in 10, structured", CodecSection(name="mask", every=10, mode="structured"))
_LOW_RANK = Contender("low rank, 20 of 200, structured", CodecSection(name="lowrank", rank=20))
_TOP_100TH = Contender("top 1 %", CodecSection(name="topk", share=0.01))

CONTENDERS: Mapping[Setting, Sequence[Contender]] = {
    DEVICES: (
        FLOAT32,
        Contender("float32 in planes", CodecSection(name="planes")),
        Contender("bfloat16 in planes", CodecSection(name="planes", precision="bfloat16")),
        *map(_eden, (4, 2, 1)),
        Contender("QSGD, 16 levels", CodecSection(name="qsgd", levels=16)),
        Contender("TernGrad, clipped", CodecSection(name="ternary", clip_sigmas=2.5)),
        _SIGN,
        Contender("random mask, 1 in 10, sketched", CodecSection(name="mask", every=10, mode="sketched")),
        _MASK,
        _LOW_RANK,
        Contender("top 10 %", CodecSection(name="topk", share=0.1)),
        _TOP_100TH,
        *map(_integer, (0.5, 1.0, 2.0)),
        PROMISED,
        *map(_integer, (8.0, 16.0)),
    ),
    SILOS: (
        FLOAT32,
        _eden(1),
        _SIGN,
        Contender("sign, fed back", CodecSection(name="sign", error_feedback=True)),
        _MASK,
        _LOW_RANK,
        _TOP_100TH,
        Contender("top 1 %, fed back", CodecSection(name="topk", share=0.01, error_feedback=True)),
        Contender("top 0.1 %, fed back", CodecSection(name="topk", share=0.001, error_feedback=True)),
        Contender(
            "top 0.1 %, deep gradient compression",
            CodecSection(name="topk", share=0.001, error_feedback=True, momentum=0.5, warm_up_rounds=4),
        ),
        PROMISED,
        _integer(16.0),
    ),
}


@dataclass(frozen=True, slots=True)
class Scored:
    """After round `number`. `accuracy`: on the test set, 0 to 1; `client_bytes`: uploaded by then, a client's mean."""

    number: int
    client_bytes: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class CodecRun:
    """A whole run. `n_bytes`: of its `n_updates`, headers included; `sha256`: of its last model."""

    curve: tuple[Scored, ...]
    n_updates: int
    n_bytes: int
    sha256: str

    @classmethod
    def of(cls, result: TrialResult) -> "CodecRun":
        curve, n_bytes = list[Scored](), 0
        for row in result.rows:
            n_bytes += row.bytes_up
            if row.accuracy is not None:
                curve.append(Scored(row.round, n_bytes / result.n_clients, row.accuracy))
        return cls(tuple(curve), sum(row.reported for row in result.rows), n_bytes, result.model_sha256)

    def accuracy(self, n_last: int) -> float:
        """The mean of the last scores; 0 if training diverged before the first."""
        last = self.curve[-n_last:]
        return sum(scored.accuracy for scored in last) / max(1, len(last))

    @property
    def bits(self) -> float:
        """Bits of a weight in an update."""
        return 8 * self.n_bytes / max(1, self.n_updates) / N_VALUES

    @property
    def client_bytes(self) -> float:
        """Bytes that a client uploaded in all, on average."""
        return self.curve[-1].client_bytes if self.curve else 0.0


@dataclass(frozen=True, slots=True)
class CodecContest:
    """One federation, trained with one codec after another, float32 first."""

    setting: Setting
    runs: Sequence[tuple[Contender, CodecRun]]

    def percent(self, trained: CodecRun) -> float:
        """The final accuracy in per cent."""
        return 100 * trained.accuracy(self.setting.n_last)


def measure_training(data: Path | None, curves: Path | None, *, quick: bool) -> tuple[list[BenchRow], str]:
    """Rows, and a note on them. `data`: a folder with MNIST; None: nothing is measured. `curves`: for the picture.

    Raises `OSError`, and `NotIdx` for data that are no MNIST.
    """
    if data is None:
        return [], "Training is left out. To measure it, pass a folder that contains MNIST with --data."
    for file in MNIST.files:
        (data / MNIST.folder / file.name).stat()  # the simulator would fetch one that is missing
    contests = train_all(data, quick=quick)
    if curves is not None:
        draw_codec_training(contests, curves)
    return training_rows(contests, quick=quick), training_note(contests)


def train_all(data: Path, *, quick: bool) -> Sequence[CodecContest]:
    """Every contender in its federation; if `quick`, three rounds of the one with a promise."""
    chosen: Mapping[Setting, Sequence[Contender]] = {_QUICK: (FLOAT32, PROMISED)} if quick else CONTENDERS
    return [hold_codec_contest(setting, data, contenders) for setting, contenders in chosen.items()]


def hold_codec_contest(setting: Setting, data: Path | None, contenders: Sequence[Contender]) -> CodecContest:
    """Train with one codec after another."""
    results = simulate(setting.experiment(contenders), data=data)
    return CodecContest(setting, list(zip(contenders, map(CodecRun.of, results.trials), strict=True)))


def training_rows(contests: Sequence[CodecContest], *, quick: bool) -> list[BenchRow]:
    """The accuracy of each run against float32; for the promised one also the loss of accuracy and the bytes."""
    rows = list[BenchRow]()
    for contest in contests:
        float32 = contest.runs[0][1]
        theirs = contest.percent(float32)
        for contender, trained in contest.runs[1:]:
            what, ours = f"{contest.setting.name}, {contender.title}", contest.percent(trained)
            rows.append(BenchRow(f"{what}, {trained.bits:.2f} bits: accuracy", ours, "float32", theirs, "%"))
            if contender is PROMISED:
                lost = None if quick else Hold(LOST_POINTS_MAX, "ours")  # accuracies vary too much after three rounds
                rows.append(
                    BenchRow(f"{what}: accuracy lost", theirs - ours, "allowed", LOST_POINTS_MAX, "points", lost)
                )
                sent, whole = trained.client_bytes / 1e6, float32.client_bytes / 1e6
                rows.append(BenchRow(f"{what}: uploaded", sent, "float32", whole, "MB", Hold(BYTES_SHARE_MAX)))
    return rows


def training_note(contests: Sequence[CodecContest]) -> str:
    """How it was measured, in a sentence or two."""
    lengths = ", ".join(
        f"{contest.setting.name} {contest.setting.n_rounds} rounds (the last {contest.setting.n_last} averaged)"
        for contest in contests
    )
    return (
        f"Training: the MNIST 2NN of McMahan et al. Each client has two shards of one digit each; ten clients train in "
        f"a round; {lengths}. Bits per weight and MB: the mean over all clients, of updates as sent, with headers."
    )


# By the codec's name, a shade for each contender that uses it.
_SHADES: Mapping[str, Sequence[str]] = {
    "float32": ("#111111",),
    "planes": ("#7b8794", "#a9b4bf"),
    "integer": ("#b4e3da", "#86d0c2", "#56b8a6", "#0f7b6c", "#0b5c50", "#063b33"),
    "eden": ("#8a5a0c", "#c8871e", "#e7b866"),
    "sign": ("#2f5fa8", "#7ea3db"),
    "ternary": ("#6b4fa0",),
    "qsgd": ("#b04a8b",),
    "topk": ("#ef9a94", "#a3242b", "#d9534f", "#f0b8a0", "#6d1a1f"),
    "mask": ("#c9b3a4", "#8c6d5a"),
    "lowrank": ("#5b6b3a",),
}
_SMOOTHED_SCORES = 4  # 20 rounds
_SHOWN_PERCENT = (70, 96)


def draw_codec_training(contests: Sequence[CodecContest], path: Path) -> None:
    figure = new_figure(14, 7.2, "MNIST 2NN, two digits a client: accuracy against uploaded bytes")
    colors = _contender_colors(contests)
    for axes, contest in zip(figure.subplots(1, len(contests), squeeze=False)[0], contests, strict=True):
        _training_panel(axes, contest, colors)
    write_figure(figure, path)


def _contender_colors(contests: Sequence[CodecContest]) -> Mapping[str, str]:
    """By title: a contender looks the same in every panel."""
    shades = {name: cycle(colors) for name, colors in _SHADES.items()}
    names = {contender.title: str(contender.codec.name) for contest in contests for contender, _ in contest.runs}
    return {title: next(shades[name]) for title, name in names.items()}


def _training_panel(axes: Axes, contest: CodecContest, colors: Mapping[str, str]) -> None:
    setting = contest.setting
    for contender, trained in contest.runs:
        curve = [scored for scored in trained.curve if scored.number % setting.score_every == 0]
        color = colors[contender.title]
        label = f"{contender.title}: {contest.percent(trained):.1f} %, {trained.bits:.2f} bits"
        axes.plot([scored.client_bytes / 1e6 for scored in curve], _percents(curve), color=color, lw=1.8, label=label)
    axes.axhline(contest.percent(contest.runs[0][1]), color=FAINT, lw=1, ls=(0, (4, 4)), zorder=0)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(*_SHOWN_PERCENT)
    mean_of = f"mean of {_SMOOTHED_SCORES * setting.score_every} rounds"
    dress_bench(axes, setting.name, "MB uploaded by a client, the mean of all", f"test accuracy, %, {mean_of}")
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, columnspacing=1)


def _percents(curve: Sequence[Scored]) -> list[float]:
    """Smoothed accuracies, in per cent."""
    shares = [scored.accuracy for scored in curve]
    windows = [shares[max(0, end - _SMOOTHED_SCORES) : end] for end in range(1, len(shares) + 1)]
    return [100 * sum(window) / len(window) for window in windows]
