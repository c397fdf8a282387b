"""What an experiment with a Flower app may say. Reading it needs no Flower."""

from typing import Any

import pytest

from umbel.sim.experiment.file import experiment_of

APP: dict[str, Any] = {"name": "flowers", "flower": {"app": "somewhere"}}


def test_an_app_alone_is_an_experiment() -> None:
    (trial,) = experiment_of(APP).trials
    assert trial.flower is not None
    assert (trial.flower.clients, trial.data, trial.model, trial.run.rounds.over_selection) == (10, None, None, 1.0)


def test_configuration_is_flat_as_flower_has_it_and_can_be_swept() -> None:
    table = APP | {"flower": {"app": "a", "run_config": {"model": {"width": 3}, "lr": 0.1}}}
    trials = experiment_of(table | {"sweep": {"flower.run_config.model.width": [4, 5]}}).trials
    configs = [trial.flower.run_config for trial in trials if trial.flower is not None]
    assert configs == [{"model.width": width, "lr": 0.1} for width in (4, 5)]


@pytest.mark.parametrize(
    ("section", "value", "words"),
    [
        ("codec", {"name": "eden"}, r"\[codec\] has no effect beside \[flower\]"),
        ("secure_aggregation", {}, r"\[secure_aggregation\] has no effect beside \[flower\]"),
        ("rounds", {"target": 3}, r"rounds.target has no effect beside \[flower\], which knows only window_s"),
        ("training", {"learning_rate": 0.1}, r"training.learning_rate has no effect beside \[flower\]"),
        ("engine", {"name": "batched"}, r"the engine 'batched' cannot run \[flower\]; choose one of auto"),
        ("engine", {"masks": True}, r"engine.masks has no effect beside \[flower\]"),
        ("data", {"name": "digits"}, r"\[data\] goes with umbel's own rounds"),
        ("clients", {"app": "a:b"}, r"\[clients\] goes with umbel's own rounds"),
        ("fleet", {"malicious": {"share": 0.1}}, "fleet.malicious changes updates of umbel's own"),
        ("flower", {"app": "a", "run_config": {"lr": [1]}}, "flower.run_config: lr must be a number, a text"),
        ("flower", {"app": "a", "clients": 0}, "clients must lie between 1 and 1,?000,?000"),
        ("flower", {"app": "a", "nodes": 3}, "nodes"),
    ],
)
def test_what_would_have_no_effect_is_refused(section: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        experiment_of(APP | {section: value})
