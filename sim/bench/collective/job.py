"""What the ranks of the benchmark are asked to do, and what each of them answers: JSON files in one folder.

No torch here: the starter writes a job, and `rank.py` carries it out.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

Codec: TypeAlias = Literal["float32", "8bit", "4bit"]
Averager: TypeAlias = Literal["float32", "4bit", "2bit", "torchft"]
"""What makes the means of models: `outer_sync` with a codec, or torchft."""
ModelKind: TypeAlias = Literal["perceptron", "transformer"]
SETTLING_STEPS = 2
JOB_FILE, RARE_FILE, SAMPLES_FILE = "job.json", "rare.json", "samples.safetensors"


@dataclass(frozen=True, slots=True)
class Method:
    """A way to average gradients. Either umbel's hook with a codec, or one of torch's."""

    name: str
    title: str
    codec: Codec | None = None  # of umbel's hook
    matrix_rank: int | None = None  # of PowerSGD

    @property
    def is_ours(self) -> bool:
        return self.codec is not None


FLOAT32 = Method("float32", "torch float32")
BF16 = Method("bf16", "torch bf16")
POWER_1 = Method("powersgd-1", "torch PowerSGD rank 1", matrix_rank=1)
POWER_4 = Method("powersgd-4", "torch PowerSGD rank 4", matrix_rank=4)
OURS_FLOAT32 = Method("umbel-float32", "umbel float32", codec="float32")
OURS_8BIT = Method("umbel-8bit", "umbel 8bit", codec="8bit")
OURS_4BIT = Method("umbel-4bit", "umbel 4bit", codec="4bit")
METHODS: Mapping[str, Method] = {
    one.name: one for one in (FLOAT32, BF16, POWER_1, POWER_4, OURS_FLOAT32, OURS_8BIT, OURS_4BIT)
}


@dataclass(frozen=True, slots=True)
class HookJob:
    """DDP steps with each method, in turn: one block of steps of each, then the next block of each.

    `widths`: of a perceptron, inputs and classes included; of a transformer, the characters and its width. `steps`: of
    a block, after `SETTLING_STEPS` that do not count, in which connections that were idle get back to speed. `warm_up`:
    steps before the first block.
    """

    n_ranks: int
    methods: tuple[str, ...]
    widths: tuple[int, ...]
    batch_size: int
    learning_rate: float
    momentum: float
    blocks: int
    steps: int
    warm_up: int
    seed: int
    model: ModelKind = "perceptron"

    def write(self, folder: Path) -> None:
        (folder / JOB_FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "HookJob":
        """Raises `ValueError` and `OSError`."""
        return cls(**_fields_of(folder / JOB_FILE))

    def answer(self, folder: Path, rank: int) -> "HookAnswer":
        return HookAnswer.read(folder, rank)


@dataclass(frozen=True, slots=True)
class MethodRun:
    """One method on one rank. `steps_s`: seconds of each step; `cpu_s`: processor time of a step, of all threads.

    `sent_bytes`: in a step; both are means. `loss`: of the last model, on all samples.
    """

    steps_s: Sequence[float]
    cpu_s: float
    sent_bytes: float
    loss: float


@dataclass(frozen=True, slots=True)
class HookAnswer:
    """What one rank found. `n_values`: of the model; `trained`: by the name of the method."""

    n_values: int
    trained: Mapping[str, MethodRun]

    def write(self, folder: Path, rank: int) -> None:
        (folder / f"{rank}.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path, rank: int) -> "HookAnswer":
        """Raises `ValueError` and `OSError`."""
        fields = json.loads((folder / f"{rank}.json").read_text())
        return cls(fields["n_values"], {name: MethodRun(**one) for name, one in fields["trained"].items()})


@dataclass(frozen=True, slots=True)
class RareJob:
    """Local steps with a mean of the ranks' models after every N of them (DiLoCo), for each N and averager in turn.

    `untimed_means`: before the clock starts. `means`: that are timed, or more until there are `steps_min` steps.
    `widths`: as of a `Job`.
    """

    n_ranks: int
    everys: tuple[int, ...]
    averagers: tuple[Averager, ...]
    widths: tuple[int, ...]
    batch_size: int
    learning_rate: float
    untimed_means: int
    means: int
    steps_min: int
    seed: int
    momentum: float = 0.0
    model: ModelKind = "perceptron"

    def write(self, folder: Path) -> None:
        (folder / RARE_FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "RareJob":
        """Raises `ValueError` and `OSError`."""
        return cls(**_fields_of(folder / RARE_FILE))

    def answer(self, folder: Path, rank: int) -> "RareAnswer":
        return RareAnswer.read(folder, rank)

    def timed_steps(self, every: int) -> int:
        return every * max(self.means, -(-self.steps_min // every))


@dataclass(frozen=True, slots=True)
class RareTimes:
    """`step_s`: of a step, with its part of a mean; `mean_s`: this part; `sent_bytes`: in a step, None if nobody counts
    them. All are averages. `loss`: of the last model, on all samples.
    """

    averager: Averager
    every: int
    step_s: float
    mean_s: float
    sent_bytes: float | None
    loss: float


@dataclass(frozen=True, slots=True)
class RareAnswer:
    """What one rank found. `n_values`: of the model."""

    n_values: int
    times: Sequence[RareTimes]

    def write(self, folder: Path, rank: int) -> None:
        (folder / f"{rank}.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path, rank: int) -> "RareAnswer":
        """Raises `ValueError` and `OSError`."""
        fields = json.loads((folder / f"{rank}.json").read_text())
        return cls(fields["n_values"], [RareTimes(**one) for one in fields["times"]])


def _fields_of(path: Path) -> dict[str, Any]:
    """With tuples in the place of JSON's lists."""
    fields: dict[str, Any] = json.loads(path.read_text())
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
