"""From a `[data]` section to the data: what scikit-learn carries, files, generated clients, or the user's own code."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from umbel.sim.data.data_set import DataError, DataSet, SampleSet, TrainAndTest
from umbel.sim.data.section import DataSection
from umbel.sim.data.sets.fetch import SOURCES, DataSource
from umbel.sim.data.sets.synthetic import SyntheticPopulation

_TEST_SHARE = 0.2


def load(
    section: DataSection, folder: Path | None, seed: int, sources: Mapping[str, DataSource] = SOURCES
) -> DataSet | SyntheticPopulation:
    """The data that `section` names; synthetic data are a population already, all others are still to be dealt out.

    `folder`: where files of data sets are, `--data`; what is missing there is fetched from `sources`. Raises
    `DataError` with a sentence that says what to do, `NotIdx` for files that are damaged, and `OSError` for what cannot
    be read or written.
    """
    if section.is_synthetic:
        return SyntheticPopulation(section.law(), seed)
    return _whole(section, folder, seed, sources).limited(section.train_limit, section.test_limit, seed)


def _whole(section: DataSection, folder: Path | None, seed: int, sources: Mapping[str, DataSource]) -> DataSet:
    if section.is_own:
        return _own(section.name)
    if section.name in sources:
        return _from_files(section.name, folder, sources[section.name])
    from umbel.sim.data.sets.carried import breast_cancer, digits

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


def _own(name: str) -> DataSet:
    """What the user's code gives: a `DataSet` (`arrays.dataset` and its like make one), or samples as they are.

    What it draws at random is drawn alike every time, for a run that was broken off goes on with the same data.
    """
    import torch

    from umbel.client.errors import AppError
    from umbel.client.training.devices import seeded
    from umbel.client.user_code import OptionWords, make_named
    from umbel.sim.data.sets.arrays import from_samples

    try:
        with seeded(0, torch.device("cpu")):
            made = make_named(name, (DataSet, TrainAndTest), OptionWords("name in [data]", "my_data:load", "a DataSet"))
    except AppError as error:
        raise DataError(str(error)) from error
    match made:
        case DataSet():
            return replace(made, name=name)
        case TrainAndTest():
            return from_samples(made, name)
        case _:
            raise DataError(
                f"{name} gave a {type(made).__name__}; it must give a DataSet, "
                "as umbel.sim.data.sets.arrays.dataset(inputs, targets) makes one"
            )
