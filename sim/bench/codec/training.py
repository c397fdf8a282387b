"""What federated training comes to with each codec, and in how many uploaded bytes: rows of `umbel bench codec`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from umbel.sim.bench.codec.contenders import CONTENDERS, DEVICES, FLOAT32, PROMISED, Contender
from umbel.sim.bench.codec.federation import CodecRun, Federation, Setting
from umbel.sim.bench.report import Hold, Row
from umbel.sim.data.samples import TrainAndTest
from umbel.sim.data.sets.mnist import load_mnist

LOST_POINTS_MAX, BYTES_SHARE_MAX = 0.5, 1 / 32
_SEED = 1
_QUICK = replace(DEVICES, n_rounds=3, score_every=1, n_last=1)


@dataclass(frozen=True, slots=True)
class Contest:
    """One federation, trained with one codec after another; the first is float32."""

    setting: Setting
    runs: Sequence[tuple[Contender, CodecRun]]

    def percent(self, trained: CodecRun) -> float:
        """The accuracy at the end: the mean of the last scores."""
        return 100 * trained.accuracy(self.setting.n_last)


def measure_training(data: Path | None, curves: Path | None, *, quick: bool) -> tuple[list[Row], str]:
    """Rows, and a note on them. `data`: a folder with MNIST in it; None: nothing is measured, and the note says so.

    `curves`: where a picture of it is drawn. Raises `OSError` for what cannot be read or written, `NotIdx` for data
    that are no MNIST.
    """
    if data is None:
        return [], "Training is left out: --data names a folder with MNIST in it."
    contests = train_all(load_mnist(data), quick=quick)
    if curves is not None:
        from umbel.sim.bench.codec.training_plot import draw

        draw(contests, curves)
    return training_rows(contests, quick=quick), training_note(contests)


def train_all(data: TrainAndTest, *, quick: bool) -> Sequence[Contest]:
    """Every contender in its federation; if `quick`, three rounds of the one that has a promise."""
    chosen: Mapping[Setting, Sequence[Contender]] = {_QUICK: (FLOAT32, PROMISED)} if quick else CONTENDERS
    return [_contest(setting, data, contenders) for setting, contenders in chosen.items()]


def _contest(setting: Setting, data: TrainAndTest, contenders: Sequence[Contender]) -> Contest:
    federation = Federation(setting, data, _SEED)
    return Contest(setting, [(contender, federation.train(contender.codec)) for contender in contenders])


def training_rows(contests: Sequence[Contest], *, quick: bool) -> list[Row]:
    """The accuracy of each run beside float32's; where there is a promise, what is lost, and the bytes."""
    rows = list[Row]()
    for contest in contests:
        float32 = contest.runs[0][1]
        theirs = contest.percent(float32)
        for contender, trained in contest.runs[1:]:
            what, ours = f"{contest.setting.name}, {contender.title}", contest.percent(trained)
            rows.append(Row(f"{what}, {trained.bits:.2f} bits: accuracy", ours, "float32", theirs, "%"))
            if contender is PROMISED:
                lost = None if quick else Hold(LOST_POINTS_MAX, "ours")  # three rounds in, accuracies are anywhere
                rows.append(Row(f"{what}: accuracy lost", theirs - ours, "allowed", LOST_POINTS_MAX, "points", lost))
                sent, whole = trained.client_bytes / 1e6, float32.client_bytes / 1e6
                rows.append(Row(f"{what}: uploaded", sent, "float32", whole, "MB", Hold(BYTES_SHARE_MAX)))
    return rows


def training_note(contests: Sequence[Contest]) -> str:
    """How it was measured, in a sentence or two."""
    lengths = ", ".join(
        f"{contest.setting.name} {contest.setting.n_rounds} rounds (the last {contest.setting.n_last} averaged)"
        for contest in contests
    )
    return (
        f"Training: the MNIST 2NN of McMahan et al., two shards of one digit a client, ten clients a round; {lengths}. "
        "Bits a weight and MB of one client, in the mean of all: updates as sent, headers included."
    )
