"""Models by name are those of the papers, to the weight, and follow from the seed alone."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from umbel.sim.data.data_set import LearningTask
from umbel.sim.models import CharacterNet, ModelError, ModelSection, build


@dataclass(frozen=True)
class Known:
    """As much of a data set as a model must know."""

    name: str
    n_classes: int
    input_shape: tuple[int, ...]
    task: LearningTask = LearningTask.CLASSIFICATION


MNIST = Known("mnist", 10, (1, 28, 28))
DIGITS = Known("digits", 10, (1, 8, 8))
SYNTHETIC = Known("synthetic", 10, (60,))
HEART = Known("heart-disease", 2, (13,))
PLAYS = Known("shakespeare", 80, (80,), LearningTask.NEXT_CHARACTER)


def n_weights(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("section", "data", "n"),
    [
        (ModelSection("2nn"), MNIST, 199_210),  # McMahan et al. 2017, section 3
        (ModelSection("cnn"), MNIST, 1_663_370),  # the same
        (ModelSection("logistic"), SYNTHETIC, 610),  # Li et al. 2020, section 5.1
        (ModelSection("heart"), HEART, 14),  # FLamby: one weight for each of 13 inputs, and one bias
        (ModelSection("logistic"), HEART, 28),
        (ModelSection("mlp"), DIGITS, 4_810),
        (ModelSection("mlp", hidden=(32, 16)), DIGITS, 64 * 32 + 32 + 32 * 16 + 16 + 16 * 10 + 10),
        (ModelSection("cnn"), DIGITS, 832 + 51_264 + 256 * 512 + 512 + 5_130),
    ],
)
def test_a_model_has_the_published_number_of_weights_and_takes_the_data(
    section: ModelSection, data: Known, n: int
) -> None:
    model = build(section, data, 1)
    assert n_weights(model) == n
    assert model(torch.zeros(3, *data.input_shape)).shape == (3, data.n_classes)


def test_the_character_network_is_the_paper_s_but_for_biases_and_peepholes() -> None:
    """torch has 2 x 4 x 256 biases more than the papers. Reddi et al. 2021 (arXiv:2003.00295, table 2) give 820,522
    weights for 90 characters; McMahan et al. 2017 give 866,578, which is 258 characters and 2 x 3 x 256 peepholes.
    """
    assert n_weights(CharacterNet(90)) - 2 * 4 * 256 == 820_522
    assert n_weights(CharacterNet(258)) - 2 * 4 * 256 + 2 * 3 * 256 == 866_578
    model = build(ModelSection("lstm"), PLAYS, 1)
    assert n_weights(model) == 819_920
    texts = torch.randint(80, (3, 80), generator=torch.Generator().manual_seed(1))
    logits = model(texts.to(torch.uint8))
    assert logits.shape == (3, 80)
    assert torch.equal(logits, model(texts))
    for position in (0, 79):
        changed = texts.clone()
        changed[:, position] = (changed[:, position] + 1) % 80
        assert not torch.equal(logits, model(changed)), "it has read all 80"


def test_the_heart_model_is_binary_cross_entropy_of_one_logit() -> None:
    model = build(ModelSection("heart"), HEART, 1)
    linear = next(module for module in model.modules() if isinstance(module, nn.Linear))
    inputs, classes = torch.randn(20, 13, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 2
    loss = nn.functional.cross_entropy(model(inputs), classes)
    binary = nn.functional.binary_cross_entropy_with_logits(linear(inputs)[:, 0], classes.float())
    assert math.isclose(loss.item(), binary.item(), rel_tol=1e-6)


@pytest.mark.parametrize("name", ["mlp", "2nn", "cnn", "logistic"])
def test_first_weights_follow_from_the_seed_and_leave_the_global_generator_alone(name: str) -> None:
    before = torch.random.get_rng_state()
    first, again, other = (list(build(ModelSection(name), MNIST, seed).parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_2nn_has_the_weights_of_the_paper() -> None:
    assert n_weights(build(ModelSection("2nn"), MNIST, 3)) == 199_210


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("lstm", MNIST, 'lstm is not for mnist, .* use name = "mlp"'),
        ("mlp", PLAYS, 'mlp is not for shakespeare, whose task is next-character: use name = "lstm"'),
        ("cnn", SYNTHETIC, r"cnn is for images .* synthetic have shape \(60,\)"),
        ("cnn", Known("dots", 2, (1, 3, 9)), "at least 4 by 4"),
        ("heart", SYNTHETIC, 'use name = "logistic"'),
        ("heart", Known("pictures", 2, (1, 4, 4)), 'use name = "logistic"'),
    ],
)
def test_data_that_a_model_is_not_for_are_refused(name: str, data: Known, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        build(ModelSection(name), data, 1)


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"name": "resnet"}, "must be one of mlp"),
        ({"name": "cnn", "hidden": [3]}, "hidden is for name"),
        ({"name": "mlp", "hidden": []}, "number of hidden layers"),
        ({"name": "mlp", "hidden": [0]}, "hidden must lie"),
        ({"name": "mlp", "widht": 3}, "widht"),
    ],
)
def test_a_section_that_makes_no_sense_is_refused(section: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        TypeAdapter(ModelSection).validate_python(section)


def test_one_s_own_model_is_made_with_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_net.py").write_text(
        "from torch import nn\ndef net(): return nn.Linear(3, 2)\ndef none(): return 3\nclass Net(nn.Linear):\n"
        "    def __init__(self): super().__init__(3, 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = torch.random.get_rng_state()
    first, again, of_class = (build(ModelSection(f"own_net:{name}"), MNIST, 1) for name in ("net", "net", "Net"))
    weights = [model.get_parameter("weight") for model in (first, again, of_class)]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
    assert torch.equal(before, torch.random.get_rng_state())
    for name, why in {"none": "gave a int; it must give", "gone": "name an nn.Module"}.items():
        with pytest.raises(ModelError, match=why):
            build(ModelSection(f"own_net:{name}"), MNIST, 1)
