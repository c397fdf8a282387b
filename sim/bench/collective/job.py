"""What the ranks of the benchmark are asked to do, and what each of them answers: JSON files in one folder.

No torch here: the starter writes a job, and `rank.py` carries it out.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

Codec: TypeAlias = Literal["float32", "8bit", "4bit"]
JOB_FILE, SAMPLES_FILE = "job.json", "samples.safetensors"


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
class Job:
    """DDP steps with each method, in turn: one block of steps of each, then the next block of each.

    `widths`: of a perceptron, inputs and classes included; of a transformer, the characters and its width. `steps`: of
    a block, after one that does not count, in which connections that were idle get back to speed. `warm_up`: steps
    before the first block.
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
    model: Literal["perceptron", "transformer"] = "perceptron"

    def write(self, folder: Path) -> None:
        (folder / JOB_FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "Job":
        """Raises `ValueError` and `OSError`."""
        fields: dict[str, Any] = json.loads((folder / JOB_FILE).read_text())
        tuples: dict[str, Any] = {name: tuple(fields[name]) for name in ("methods", "widths")}  # JSON has lists
        return cls(**{**fields, **tuples})


@dataclass(frozen=True, slots=True)
class Trained:
    """One method on one rank. `steps_s`: seconds of each step; `cpu_s`: processor time of a step, of all threads.

    `sent_bytes`: in a step; both are means. `loss`: of the last model, on all samples.
    """

    steps_s: Sequence[float]
    cpu_s: float
    sent_bytes: float
    loss: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What one rank found. `n_values`: of the model; `trained`: by the name of the method."""

    n_values: int
    trained: Mapping[str, Trained]

    def write(self, folder: Path, rank: int) -> None:
        (folder / f"{rank}.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path, rank: int) -> "Answer":
        """Raises `ValueError` and `OSError`."""
        fields = json.loads((folder / f"{rank}.json").read_text())
        return cls(fields["n_values"], {name: Trained(**one) for name, one in fields["trained"].items()})
