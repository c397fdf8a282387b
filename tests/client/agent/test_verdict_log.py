"""What an agent's log says of a verdict."""

import logging
from pathlib import Path

import pytest

from umbel.aggregation.types import RunId
from umbel.client.agent.site_commands import SiteCommands
from umbel.client.agent.verdict import Stand, Verdict
from umbel.client.agent.verdict_log import LINES_MAX, LINES_S, VerdictLog, sentence

COMMANDS = SiteCommands.of(Path("/srv/umbel"))
RUN = RunId("heart-1")


@pytest.mark.parametrize(
    ("verdict", "level", "words"),
    [
        (
            Verdict(Stand.DENIED, "a person at this site denied it; to take part: umbel site allow heart-1"),
            "INFO",
            "run heart-1: a person at this site denied it; to take part: umbel site allow heart-1",
        ),
        (Verdict(Stand.DENIED), "INFO", "run heart-1: this site denies it"),
        (
            Verdict(Stand.ASKED, "decide: umbel site allow heart-1"),
            "WARNING",
            "run heart-1: it is waiting for a person at this site; decide: umbel site allow heart-1",
        ),
        (Verdict(Stand.ALLOWED), "INFO", "run heart-1: this site allows it"),
        (Verdict(Stand.ALLOWED, "it waits"), "INFO", "run heart-1: this site allows it; it waits"),
        (
            Verdict(Stand.REFUSED, "this site's policy denies run 'heart-1'"),
            "WARNING",
            "run heart-1: this site refuses it: this site's policy denies run 'heart-1'",
        ),
        (
            Verdict(Stand.NO_APP, "no --app of this agent names it"),
            "WARNING",
            "run heart-1: this site has no code for it: no --app of this agent names it",
        ),
    ],
)
def test_a_verdict_is_a_sentence(verdict: Verdict, level: str, words: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    VerdictLog(COMMANDS).say(RUN, verdict)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [(level, words)]


@pytest.mark.parametrize("stand", Stand)
def test_each_stand_has_a_sentence(stand: Stand) -> None:
    assert sentence(Verdict(stand)).startswith(("this site ", "it is waiting "))


def test_too_many_lines_are_counted_and_summed_up_once_in_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    it, verdict = VerdictLog(COMMANDS), Verdict(Stand.ALLOWED)
    for now in (0.0, 1.0, LINES_S - 1):
        it.begin(now)
        for _ in range(LINES_MAX + 3):
            it.say(RUN, verdict)
        it.end()
    assert len(caplog.records) == LINES_MAX + 1
    assert caplog.records[-1].getMessage().startswith("this log leaves out 3 more verdicts on runs. ")
    assert "umbel site runs --state /srv/umbel" in caplog.records[-1].getMessage()
    it.begin(LINES_S)
    it.end()
    assert len(caplog.records) == LINES_MAX + 2
    assert (
        caplog.records[-1].getMessage().startswith(f"this log leaves out {2 * (LINES_MAX + 3)} more verdicts on runs. ")
    )
