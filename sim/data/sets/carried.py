"""The two data sets that scikit-learn carries, so that they are always there: digits, and breast cancer records."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from umbel.aggregation.seeds import derive_seed
from umbel.sim.data.data_set import DataError, DataSet, held_out
from umbel.sim.data.sets.arrays import dataset


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
    """Inputs, and the target in the last column.

    Read from scikit-learn's own file: importing its data sets takes longer than a small experiment. Where a version
    keeps the file elsewhere, its function is asked.
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
