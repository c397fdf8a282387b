"""Heart disease at four hospitals: the records of UCI, prepared and split as in a published benchmark.

Janosi, Steinbrunn, Pfisterer and Detrano 1988, UCI Machine Learning Repository, CC BY 4.0. Ogier du Terrail et al.
2022, "FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning in Realistic Healthcare Settings",
Fed-Heart-Disease: slope, vessels and thal (columns 10 to 12) are dropped because they are rarely known, then every
record with a missing value. The inputs are 8 numbers, the kind of chest pain as three columns of 0 and 1, and that of
the ECG as two. Each hospital standardises them by the mean and the deviation (n - 1) of its own training records. The
class says whether there is any disease.

The test records are those that FLamby drew (by scikit-learn, a third of each hospital).
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from umbel.sim.data.data_set import DataError, DataSet, Natural, SampleSet
from umbel.sim.data.partition.partition import Indices

BYTES_MAX = 1 << 20
_N_COLUMNS = 14
_KEPT = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13)
_NUMBERS, _CHEST_PAIN, _ECG, _DISEASE = (0, 1, 3, 4, 5, 7, 8, 9), 2, 6, 13
_CHEST_PAIN_KINDS, _ECG_KINDS = (2.0, 3.0, 4.0), (1.0, 2.0)  # the first kind of each is where all its columns are 0
# Of each hospital: how many complete records it has, and which of them are for testing, bit i for the i-th.
_SPLIT: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "cleveland": (303, 0x27D73800471F06489219A5A80E2150180C29358003E1081203A0ADC05123B9A3CD0405012020),
        "hungarian": (261, 0xC5D08940188205C96F4481212C8228B198961C9008AB00E11342B821D3E210088),
        "switzerland": (46, 0x301315C61E0),
        "va": (130, 0x1A2E5C0061120DA1D7040A6DA24001262),
    }
)
Records = npt.NDArray[np.float64]


def load_heart_disease(folder: Path) -> DataSet:
    """The data set from its four files in `folder`: 740 records, 486 of them to train on.

    Raises `OSError` if a file cannot be read, `DataError` if it is not what its name says.
    """
    inputs, classes, trained, tested = list[Records](), list[Indices](), list[Indices](), list[Indices]()
    start = 0
    for hospital in _SPLIT:
        records = complete_records(folder / f"processed.{hospital}.data", hospital)
        train, test = split_of(hospital)
        inputs.append(_standardised(_features(records), train))
        classes.append((records[:, _DISEASE] > 0).astype(np.int64))
        trained.append(train + start)
        tested.append(test + start)
        start += len(records)
    samples = SampleSet(
        torch.from_numpy(np.concatenate(inputs).astype(np.float32)), torch.from_numpy(np.concatenate(classes))
    )
    natural = Natural("hospital", tuple(_SPLIT), tuple(trained), tuple(tested))
    test_samples = samples.take(np.concatenate(tested))
    return DataSet("heart-disease", samples, np.concatenate(trained), test_samples, 2, natural)


def split_of(hospital: str) -> tuple[Indices, Indices]:
    """Positions among its complete records: to train on, and to test on."""
    n_records, bits = _SPLIT[hospital]
    is_test = np.array([bits >> position & 1 for position in range(n_records)], dtype=bool)
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def complete_records(path: Path, hospital: str) -> Records:
    """The records of a file in which nothing that is used is missing: one row each, of all 14 columns."""
    if path.stat().st_size > BYTES_MAX:
        raise DataError(f"{path} is longer than {BYTES_MAX} bytes: it is not the file of UCI Heart Disease")
    lines = path.read_text(encoding="ascii", errors="replace").split()
    try:
        rows = [[np.nan if value == "?" else float(value) for value in line.split(",")] for line in lines]
    except ValueError as error:
        raise DataError(f"{path} is not the file of UCI Heart Disease: {error}") from error
    if any(len(row) != _N_COLUMNS for row in rows):
        raise DataError(f"{path} is not the file of UCI Heart Disease: a record does not have {_N_COLUMNS} values")
    records = np.array(rows, dtype=np.float64).reshape(-1, _N_COLUMNS)
    whole = records[np.isfinite(records[:, _KEPT]).all(1)]
    if len(whole) != (expected := _SPLIT[hospital][0]):
        raise DataError(f"{path} has {len(whole)} complete records, but UCI's file has {expected}: use UCI's file")
    return whole


def _features(records: Records) -> Records:
    """(n, 14) -> (n, 13): numbers, then chest pain, then ECG."""
    pain = [records[:, _CHEST_PAIN] == kind for kind in _CHEST_PAIN_KINDS]
    ecg = [records[:, _ECG] == kind for kind in _ECG_KINDS]
    return np.column_stack([records[:, _NUMBERS], *pain, *ecg]).astype(np.float64)


def _standardised(features: Records, train: Indices) -> Records:
    deviation = features[train].std(0, ddof=1)
    deviation[deviation == 0] = 1.0  # the Swiss records all say that cholesterol is 0
    return np.asarray((features - features[train].mean(0)) / deviation)
