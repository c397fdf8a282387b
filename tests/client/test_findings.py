"""Findings in words, and the verdict of a check with several findings."""

import itertools

import pytest

from umbel.client.check.round_checks import too_large
from umbel.client.findings import CheckVerdict, ClientCheck, passed, skipped, warned, worst, wrong


def test_the_worst_verdict_counts_in_any_order() -> None:
    verdicts: list[CheckVerdict] = ["skipped", "pass", "warning", "wrong"]
    for order in itertools.permutations(verdicts):
        assert worst(order) == "wrong"
    assert worst(["pass", "skipped"]) == "pass"
    assert worst(["warning", "pass"]) == "warning"


def test_a_check_has_the_worst_verdict_of_its_findings() -> None:
    found = ClientCheck(
        (passed("metrics", "fine"), wrong("metrics", "not finite", "Look"), warned("resume", "so", "Do"))
    )
    assert found.verdict_of("metrics") == "wrong"
    assert found.wrong == (found.findings[1],)
    assert found.warnings == (found.findings[2],)
    with pytest.raises(KeyError, match="no check has the name 'steps'; the checks are metrics, resume"):
        found.verdict_of("steps")


def test_findings_are_sentences_with_what_to_do() -> None:
    found = ClientCheck((wrong("weights", "nothing has changed", "Train in place"), skipped("base", "there is none")))
    assert str(found) == "weights: wrong: nothing has changed. Train in place\nbase: skipped: there is none"


def test_a_check_of_a_too_large_update_is_skipped_with_both_numbers() -> None:
    assert too_large("secure", 10, 10) is None
    assert str(too_large("secure", 2_000_000, 1_000_000)) == (
        "secure: skipped: the update has 2,000,000 values, and this check takes at most 1,000,000 into memory"
    )
