"""Which code trains in which run."""

import pytest

from umbel.client.agent.apps import AppRule, app_of, app_rule
from umbel.client.errors import AppError


def test_the_first_pattern_that_names_the_run_counts() -> None:
    rules = [app_rule(text) for text in ("heart-*=heart:client", "heart-2=other:client", "e?g=eeg:make")]
    assert app_of("heart-2", rules) == "heart:client"
    assert app_of("eeg", rules) == "eeg:make"
    assert app_of("eegs", rules) is None
    assert app_of("heart", rules) is None


def test_code_without_a_pattern_is_for_every_run() -> None:
    assert app_rule("heart:client") == AppRule("*", "heart:client")
    assert app_of("anything", [app_rule("heart:client")]) == "heart:client"


@pytest.mark.parametrize(
    "text", ["", "heart", "heart=", "a=b", "=heart:client", "heart:", ":client", "Heart=heart:client"]
)
def test_a_rule_that_names_no_code_or_no_runs_is_refused(text: str) -> None:
    with pytest.raises(AppError, match="--app"):
        app_rule(text)
