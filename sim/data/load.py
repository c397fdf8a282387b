"""The `[data]` section of an experiment's file, and the data that it names.

```toml
[data]
name = "mnist"          # "digits", "breast-cancer", "mnist", "fashion-mnist", "heart-disease", "shakespeare",
                        # "synthetic", or one's own: "module:function"
train_limit = 10000     # at most this many samples to train on, drawn from the seed; default: all
test_limit = 1000       # at most this many to test on
test_share = 0.2        # share of each class that is held out, of data sets without a test part: digits, breast-cancer

[data.arguments]        # of one's own function, which gets them by name; a sweep may vary "data.arguments.year"
year = 2025

[data]
name = "synthetic"      # Synthetic(alpha, beta); generates its clients, and takes no [partition]
clients = 1000
alpha = 1.0             # changes no sample (`synthetic.py`)
beta = 1.0
iid = false             # one model and one distribution for all clients
samples = 20            # of each client; default: the paper's law of sizes, with its long tail
```

Data come from files in scikit-learn, from files in the data folder, from a generator, or from the user's own code.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from umbel.aggregation.seeds import derive_seed
from umbel.aggregation.types import require_within
from umbel.sim.data.arguments import require_arguments
from umbel.sim.data.data_set import DataError, DataSet, SampleSet, TrainAndTest, held_out
from umbel.sim.data.sets.arrays import dataset
from umbel.sim.data.sets.fetch import SOURCES, DataSource
from umbel.sim.data.sets.synthetic import SyntheticLaw, SyntheticPopulation
from umbel.sim.given import is_given

SYNTHETIC = "synthetic"
CARRIED = ("digits", "breast-cancer")
FROM_FILES = ("mnist", "fashion-mnist", "heart-disease", "shakespeare")
NAMES = (*CARRIED, *FROM_FILES, SYNTHETIC)
LIMIT_MAX = 1 << 32
SHARE_MIN, SHARE_MAX = 0.001, 0.9
_OF_SYNTHETIC = ("clients", "alpha", "beta", "iid", "samples")
_OF_DEALT = ("train_limit", "test_limit")


@dataclass(frozen=True, slots=True)
class DataSection:
    """Which data set; the module explains the keys. None: as the data set has it."""

    name: str
    train_limit: int | None = None
    test_limit: int | None = None
    test_share: float | None = None
    clients: int | None = None
    alpha: float | None = None
    beta: float | None = None
    iid: bool | None = None
    samples: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key is a typing error, so refuse it

    def __post_init__(self) -> None:
        if self.name not in NAMES and not self.is_own:
            raise ValueError(f"name must be one of {', '.join(NAMES)}, or module:function, not {self.name!r:.80}")
        require_arguments(self.arguments, self.name, is_own=self.is_own)
        for limit in _OF_DEALT:
            if (value := getattr(self, limit)) is not None:
                require_within(value, limit, 1, LIMIT_MAX)
        if self.test_share is not None:
            require_within(self.test_share, "test_share", SHARE_MIN, SHARE_MAX)
            if self.name not in CARRIED:
                raise ValueError(f"{self.name} has a test part of its own; leave test_share out")
        misplaced = _OF_DEALT if self.is_synthetic else _OF_SYNTHETIC
        if said := [key for key in misplaced if getattr(self, key) is not None]:
            whose = "is not for" if self.is_synthetic else 'is for name = "synthetic", not for'
            raise ValueError(f"{said[0]} {whose} {self.name}; leave it out")
        if self.is_synthetic:
            self.law()

    @property
    def is_own(self) -> bool:
        """Whether it names the user's code."""
        return ":" in self.name

    @property
    def is_synthetic(self) -> bool:
        return self.name == SYNTHETIC

    def law(self) -> SyntheticLaw:
        """The law of synthetic data. Raises `ValueError` for numbers out of bounds."""
        said = {"n_clients": self.clients, "alpha": self.alpha, "beta": self.beta, "is_iid": self.iid}
        return SyntheticLaw(
            **{key: value for key, value in said.items() if value is not None},  # type: ignore[arg-type]  # as named
            samples=self.samples,
        )


def digits(test_share: float, seed: int) -> DataSet:
    """1,797 handwritten digits of 8 by 8 pixels between 0 and 1: Alpaydin and Kaynak 1998, UCI."""
    table = _table("digits.csv.gz", "load_digits")
    images = torch.from_numpy((table[:, :-1] / 16).astype(np.float32)).view(-1, 1, 8, 8)
    return dataset(images, table[:, -1].astype(np.int64), test_share=test_share, seed=seed, name="digits")


def breast_cancer(test_share: float, seed: int) -> DataSet:
    """569 records of 30 measurements, malignant (0) or benign (1): Wolberg, Mangasarian, Street and Street 1995, UCI.

    Each measurement is standardised by its mean and deviation over the training samples.
    """
    table = _table("breast_cancer.csv", "load_breast_cancer")
    values, classes = table[:, :-1], table[:, -1].astype(np.int64)
    rows, _ = held_out(classes, test_share, derive_seed(seed, "test set"))  # the same that `dataset` draws
    scaled = (values - values[rows].mean(0)) / values[rows].std(0)
    return dataset(scaled, classes, test_share=test_share, seed=seed, name="breast-cancer")


def _table(file: str, loader: str) -> npt.NDArray[np.float64]:
    """Inputs, and the target in the last column, from scikit-learn's file, because importing its data sets takes longer
    than a small experiment. If a version keeps the file elsewhere, call its function.
    """
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise DataError(
            "this data set comes with scikit-learn, which is not installed; "
            "in a clone of umbel: pip install -c constraints.txt '.[sim]'"
        )
    path = Path(found.origin).parent / "datasets" / "data" / file
    if not path.exists():
        from sklearn import datasets

        inputs, targets = getattr(datasets, loader)(return_X_y=True)
        return np.column_stack([inputs, targets])
    return np.loadtxt(path, delimiter=",", skiprows=1 if file == "breast_cancer.csv" else 0)


_TEST_SHARE = 0.2


def load(
    section: DataSection, folder: Path | None, seed: int, sources: Mapping[str, DataSource] = SOURCES
) -> DataSet | SyntheticPopulation:
    """The data that `section` names. Synthetic data are a population already; others are still to be partitioned.

    `folder`: of the data sets' files, `--data`; missing files are fetched from `sources`. Raises `DataError` with a
    sentence that says what to do, `NotIdx` for damaged files, and `OSError`.
    """
    if section.is_synthetic:
        return SyntheticPopulation(section.law(), seed)
    return _whole(section, folder, seed, sources).limited(section.train_limit, section.test_limit, seed)


def _whole(section: DataSection, folder: Path | None, seed: int, sources: Mapping[str, DataSource]) -> DataSet:
    if section.is_own:
        return _own(section.name, section.arguments)
    if section.name in sources:
        return _from_files(section.name, folder, sources[section.name])
    make = digits if section.name == "digits" else breast_cancer
    return make(_TEST_SHARE if section.test_share is None else section.test_share, seed)


def _from_files(name: str, folder: Path | None, source: DataSource) -> DataSet:
    from umbel.sim.data.sets.fetch import have
    from umbel.sim.data.sets.heart_disease import load_heart_disease
    from umbel.sim.data.sets.shakespeare import load_shakespeare

    readers: Mapping[str, Callable[[Path], DataSet]] = {
        "mnist": lambda place: _images(name, place),
        "fashion-mnist": lambda place: _images(name, place),
        "heart-disease": load_heart_disease,
        "shakespeare": load_shakespeare,
    }
    return readers[name](have(source, folder))


def _images(name: str, folder: Path) -> DataSet:
    from umbel.sim.data.sets.mnist import N_CLASSES, SIDE, load_images

    data = load_images(folder)
    train, test = (SampleSet(part.inputs.view(-1, 1, SIDE, SIDE), part.targets) for part in (data.train, data.test))
    return DataSet(name, train, np.arange(len(train)), test, N_CLASSES)


def _own(name: str, arguments: Mapping[str, Any]) -> DataSet:
    """The data set of the user's code, which returns a `DataSet` (as from `arrays.dataset`) or samples.

    Its random draws are the same every time, so that an interrupted run resumes with the same data.
    """
    import torch

    from umbel.client.errors import AppError
    from umbel.client.local.devices import seeded
    from umbel.client.user_code import OptionWords, make_named
    from umbel.sim.data.sets.arrays import from_samples

    try:
        with seeded(0, torch.device("cpu")):
            place = OptionWords("name in [data]", "my_data:load", "a DataSet")
            made = make_named(name, (DataSet, TrainAndTest), place, arguments)
    except AppError as error:
        raise DataError(str(error)) from error
    match made:
        case DataSet():
            return made if is_given(name) else replace(made, name=name)
        case TrainAndTest():
            return from_samples(made, name)
        case _:
            raise DataError(
                f"{name} returned a {type(made).__name__}; it must return a DataSet, "
                "such as umbel.sim.data.sets.arrays.dataset(inputs, targets) makes"
            )
