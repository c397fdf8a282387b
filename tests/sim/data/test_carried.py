"""What scikit-learn carries is read as scikit-learn itself would, without importing it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_digits

from umbel.sim.data.data_set import DataError
from umbel.sim.data.load import breast_cancer, digits


def test_digits_are_scikit_learn_s() -> None:
    data = digits(0.2, seed=3)
    pixels, labels = load_digits(return_X_y=True)
    assert np.array_equal(data.samples.inputs.numpy().reshape(-1, 64) * 16, pixels)
    assert np.array_equal(data.samples.targets.numpy(), labels)
    assert (data.input_shape, data.n_classes, len(data.rows), len(data.test)) == ((1, 8, 8), 10, 1437, 360)


def test_cancer_records_are_scikit_learn_s_standardised_by_what_is_trained_on() -> None:
    data = breast_cancer(0.25, seed=3)
    values, labels = load_breast_cancer(return_X_y=True)
    assert np.array_equal(data.samples.targets.numpy(), labels)
    assert (data.input_shape, data.n_classes, len(data.rows), len(data.test)) == ((30,), 2, 426, 143)
    trained = data.whole().train.inputs.double().numpy()
    assert np.abs(trained.mean(0)).max() < 1e-6
    assert np.abs(trained.std(0) - 1).max() < 1e-6
    slopes = (data.samples.inputs.numpy()[1:] - data.samples.inputs.numpy()[0]) * values[data.rows].std(0)
    assert np.allclose(slopes, values[1:] - values[0], rtol=1e-4, atol=1e-3)


def test_where_scikit_learn_keeps_no_such_file_its_function_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = digits(0.2, seed=3)
    monkeypatch.setattr(Path, "exists", lambda self: False)
    assert np.array_equal(digits(0.2, seed=3).samples.inputs, expected.samples.inputs)


def test_without_scikit_learn_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.sim.data.load.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"in a clone of umbel: pip install -c constraints.txt '\.\[sim\]'$"):
        digits(0.2, seed=3)


@pytest.mark.slow
def test_scikit_learn_is_not_imported_for_it() -> None:
    code = "import sys; from umbel.sim.data.load import digits; digits(0.2, 1); print('sklearn' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
