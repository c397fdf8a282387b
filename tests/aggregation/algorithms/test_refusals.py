"""What an algorithm cannot be combined with is refused with a sentence."""

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from umbel.aggregation.algorithms.qfedavg import FairTerms
from umbel.aggregation.plans.proximal import MuRule, MuState
from umbel.aggregation.plans.training import TrainingPlan, TrainingSection
from umbel.aggregation.run.file import RunFile

SCAFFOLD = {"algorithm": "scaffold", "total_samples": 80}
ROUNDS: dict[str, Any] = {"count": 3, "target": 4, "minimum": 3}
MASKED: dict[str, Any] = {"metrics": [], "evaluation": []}
QFEDAVG = {"algorithm": "qfedavg", "q": 1.0, "loss_max": 5.0}
FEDDYN = {"algorithm": "feddyn", "proximal_mu": 0.1, "total_samples": 80}


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"algorithm": "fednova", "momentum": 0.9}, "leave momentum out"),
        ({"algorithm": "fednova", "proximal_mu": 0.1}, "leave proximal_mu out"),
        ({"algorithm": "fednova", "optimizer": "adam"}, 'for optimizer = "sgd"'),
        ({"algorithm": "fedprox"}, "needs proximal_mu"),
        ({"algorithm": "feddyn", "total_samples": 80}, "needs proximal_mu"),
        ({"algorithm": "feddyn", "proximal_mu": 0.1}, "needs total_samples"),
        ({"algorithm": "fedavg", "total_samples": 80}, "total_samples is for algorithm"),
        ({**FEDDYN, "total_samples": 0}, "total_samples must lie between 1 and"),
        ({"algorithm": "fedsgd"}, "algorithm must be one of fedavg, fedprox, scaffold, feddyn, fednova, qfedavg"),
        ({"algorithm": "scaffold"}, 'algorithm = "scaffold" needs total_samples'),
        ({**SCAFFOLD, "momentum": 0.9}, "leave momentum out"),
        ({**SCAFFOLD, "proximal_mu": 0.1}, "leave proximal_mu out"),
        ({**SCAFFOLD, "clip_norm": 1.0}, "leave clip_norm out"),
        ({**SCAFFOLD, "optimizer": "adamw"}, 'for optimizer = "sgd"'),
        ({**SCAFFOLD, "control_variate": "mean"}, "control_variate must be one of change, gradient"),
        ({"control_variate": "gradient"}, 'control_variate is for algorithm = "scaffold", not for "fedavg"'),
        (
            {**SCAFFOLD, "inexactness": True},
            '"scaffold" adds what clients keep of earlier rounds: leave inexactness out',
        ),
        ({**FEDDYN, "inexactness": True}, '"feddyn" adds what clients keep of earlier rounds: leave inexactness out'),
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
    ],
)
def test_terms_that_contradict_an_algorithm_are_refused(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TrainingPlan(**keys)


def read(**sections: Any) -> RunFile:
    table = {"name": "ward", "rounds": ROUNDS, **sections}
    return TypeAdapter(RunFile).validate_json(json.dumps(table))


ADAPTIVE: dict[str, Any] = {"algorithm": "fedprox", "adaptive_mu": True}


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"adaptive_mu": True}, 'not for "fedavg": set algorithm = "fedprox"'),
        ({**FEDDYN, "adaptive_mu": True}, 'not for "feddyn"'),
        ({"algorithm": "fednova", "adaptive_mu": True}, 'not for "fednova"'),
        ({"algorithm": "fedprox", "proximal_mu": 0.1, "mu_step": 0.1}, "only with adaptive_mu = true"),
        ({"algorithm": "fedprox", "proximal_mu": 0.1, "mu_max": 1.0}, "mu_max has an effect only with adaptive_mu"),
        ({**ADAPTIVE, "mu_step": 0.0}, "mu_step must lie between"),
        ({**ADAPTIVE, "mu_max": 0.0}, "mu_max must lie between"),
        ({**ADAPTIVE, "proximal_mu": 0.5, "mu_max": 0.4}, "lower proximal_mu, or raise mu_max"),
        ({**ADAPTIVE, "mu_step": float("nan")}, "mu_step must lie between"),
        ({**ADAPTIVE, "proximal_mu": -1.0}, "proximal_mu must lie between"),
    ],
)
def test_a_section_whose_mu_cannot_adapt_is_refused(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TrainingSection(**keys)


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"override": [{"first_round": 2, "proximal_mu": 0.1}]}, "an override sets proximal_mu"),
        ({"secure_aggregation": {"metrics": ["accuracy"]}}, "the masked sum does not have it"),
        ({"secure_aggregation": MASKED, "privacy": {"noise_multiplier": 1.0, "clip_norm": 1.0}}, "a private run"),
    ],
)
def test_a_run_whose_losses_are_not_known_has_no_adaptive_mu(sections: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read(training=ADAPTIVE, **sections)
    read(training={"algorithm": "fedprox", "proximal_mu": 0.1}, **sections)


@pytest.mark.parametrize("sections", [{}, {"secure_aggregation": {}}, {"secure_aggregation": {"metrics": "all"}}])
def test_an_adaptive_mu_may_begin_at_zero(sections: dict[str, Any]) -> None:
    file = read(training=ADAPTIVE, **sections)
    plan = file.first_plan(10)
    assert plan.mu == MuState(0.0)
    assert file.training_of(plan) == TrainingPlan(algorithm="fedprox", mu_rule=MuRule(0.0, 0.1))
    later = file.training_of(replace(plan, mu=MuState(0.3, 1.0, 2)))
    assert (later.proximal_mu, later.mu_rule) == (0.3, MuRule(0.0, 0.1))


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"training": QFEDAVG, "rounds": {**ROUNDS, "minimum": 2}}, "set minimum = 3 or more"),
        ({"training": FEDDYN, "rounds": {**ROUNDS, "weighting": "proportional"}}, 'set weighting = "samples"'),
        ({"training": SCAFFOLD, "rounds": {**ROUNDS, "weighting": "proportional"}}, "must count alike in every round"),
        ({"training": FEDDYN, "override": [{"first_round": 2, "proximal_mu": 0.2}]}, "belongs to one mu"),
        ({"training": FEDDYN, "aggregation": {"optimizer": "adam"}}, "has a server step of its own"),
        ({"training": FEDDYN, "aggregation": {"server_learning_rate": 0.5}}, "has a server step of its own"),
        ({"training": FEDDYN, "aggregation": {"schedule": {"name": "cosine"}}}, "has a server step of its own"),
        (
            {
                "training": {"algorithm": "fednova"},
                "secure_aggregation": MASKED,
                "privacy": {"noise_multiplier": 1.0, "clip_norm": 1.0},
            },
            "how many steps each client has done, which a private run does not say",
        ),
        (
            {
                "training": {**SCAFFOLD, "local_steps": 5},
                "secure_aggregation": MASKED,
                "privacy": {"noise_multiplier": 1.0, "clip_norm": 1.0},
            },
            "sends a second vector",
        ),
        ({"training": SCAFFOLD, "codec": {"name": "lowrank", "mode": "structured"}}, "only a part of each"),
        ({"training": SCAFFOLD, "secure_aggregation": MASKED}, "would show the change of a client"),
        (
            {
                "training": {**SCAFFOLD, "local_steps": 5, "control_variate": "gradient"},
                "secure_aggregation": MASKED,
            },
            "can show a single client's gradient",
        ),
        (
            {"training": {**SCAFFOLD, "local_steps": 5}, "secure_aggregation": {**MASKED, "minimum_work": 0.5}},
            "would show the change of a client",
        ),
        (
            {"training": QFEDAVG, "secure_aggregation": MASKED},
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
    plan = read(training={"algorithm": "fednova"}, secure_aggregation=MASKED).first_plan(10)
    assert plan.secure is not None
    assert plan.secure.is_normalised
    assert read(training={**SCAFFOLD, "local_steps": 5}, secure_aggregation=MASKED).training.has_control
    assert read(training=SCAFFOLD, aggregation={"optimizer": "adam"}).training.has_control
