"""What an algorithm cannot be combined with is refused with a sentence."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from umbel.aggregation.algorithms.qfedavg import FairTerms
from umbel.aggregation.plans.training import TrainingPlan
from umbel.aggregation.run.file import RunFile

QFEDAVG = {"algorithm": "qfedavg", "q": 1.0, "loss_max": 5.0}
FEDDYN = {"algorithm": "feddyn", "proximal_mu": 0.1, "population": 8}


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"algorithm": "fednova", "momentum": 0.9}, "leave momentum out"),
        ({"algorithm": "fednova", "proximal_mu": 0.1}, "leave proximal_mu out"),
        ({"algorithm": "fednova", "optimizer": "adam"}, 'for optimizer = "sgd"'),
        ({"algorithm": "fedprox"}, "needs proximal_mu"),
        ({"algorithm": "feddyn", "population": 8}, "needs proximal_mu"),
        ({"algorithm": "feddyn", "proximal_mu": 0.1}, "needs population"),
        ({"algorithm": "fedavg", "population": 8}, "population is for algorithm"),
        ({**FEDDYN, "population": 0}, "population must lie between 1 and"),
        ({"algorithm": "qfedavg"}, "needs q, such as 1, and loss_max, the greatest loss that counts"),
        ({"algorithm": "qfedavg", "q": 1.0}, "needs q, such as 1, and loss_max"),
        ({"algorithm": "qfedavg", "loss_max": 5.0}, "needs q, such as 1, and loss_max"),
        ({"q": 1.0}, 'q is for algorithm = "qfedavg", not for "fedavg": leave it out'),
        ({"algorithm": "fednova", "loss_max": 5.0}, 'loss_max is for algorithm = "qfedavg"'),
        ({"lipschitz": 5.0}, 'lipschitz is for algorithm = "qfedavg"'),
        ({**QFEDAVG, "q": -0.5}, "q must lie between 0"),
        ({**QFEDAVG, "q": 17.0}, "q must lie between 0"),
        ({**QFEDAVG, "loss_max": 0.0}, "loss_max must lie between"),
        ({**QFEDAVG, "lipschitz": 0.0}, "lipschitz must lie between"),
        ({"algorithm": "fedsgd"}, "algorithm must be one of fedavg, fedprox, feddyn, fednova, qfedavg"),
    ],
)
def test_terms_that_contradict_an_algorithm_are_refused(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TrainingPlan(**keys)


def read(**sections: Any) -> RunFile:
    table = {"name": "ward", "rounds": {"count": 3, "target": 4, "minimum": 3}, **sections}
    return TypeAdapter(RunFile).validate_json(json.dumps(table))


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"training": FEDDYN, "aggregation": {"optimizer": "adam"}}, "has a server step of its own"),
        ({"training": FEDDYN, "aggregation": {"server_learning_rate": 0.5}}, "has a server step of its own"),
        ({"training": FEDDYN, "aggregation": {"schedule": {"name": "cosine"}}}, "has a server step of its own"),
        (
            {
                "training": {"algorithm": "fednova"},
                "secure_aggregation": {"metrics": [], "evaluation": []},
                "privacy": {"noise_multiplier": 1.0, "clip_norm": 1.0},
            },
            "how many steps each client has done, which a private run does not say",
        ),
        (
            {"training": QFEDAVG, "secure_aggregation": {"metrics": [], "evaluation": []}},
            "weighs each client by the loss that it reports, and masks hide each client's report",
        ),
        (
            {"training": {"algorithm": "fednova"}, "override": [{"first_round": 2, "proximal_mu": 0.1}]},
            "with its overrides, round 2 cannot be planned",
        ),
    ],
)
def test_a_run_file_that_contradicts_an_algorithm_is_refused(sections: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read(**sections)


def test_the_same_run_files_without_the_contradiction_are_read() -> None:
    assert read(training=FEDDYN).training.remembers_drift
    assert read(training=QFEDAVG).training.fair_terms == FairTerms(1.0, 5.0, 100.0)
    assert read(training={**QFEDAVG, "lipschitz": 7.0}).training.fair_terms == FairTerms(1.0, 5.0, 7.0)
    masked: dict[str, Any] = {"metrics": [], "evaluation": []}
    plan = read(training={"algorithm": "fednova"}, secure_aggregation=masked).first_plan(10)
    assert plan.secure is not None
    assert plan.secure.is_normalised
