"""What `umbel run show` and `watch` say of a canary and of clients that were turned away: all of it, for each site."""

import io
from dataclasses import replace

from rich.console import Console

from tests.client.cli.test_view import FINE, ROUND, RUN, told
from umbel.aggregation.plans.round import Task
from umbel.aggregation.run.records import ClientRecord, Fate, TurnedAway
from umbel.client.cli.view import RunPicture

LONG = "window_s of at least 988 needed, not 600: 12.1 s a step x 60 steps + 80 s up at 1.2 MB/s; " + "more " * 40
CLIENTS = (
    replace(FINE, reason="a whole round takes 212 s"),
    ClientRecord("h2", Fate.UNFIT, LONG.strip(), 30),
    ClientRecord("h3", Fate.DECLINED, "not\x1b[31m here", 30),
)
CANARY = replace(ROUND, round=1, task=Task.CANARY, committed=False, reason="1 of 3 clients passes", clients=CLIENTS)


def test_a_canary_tells_of_each_client_in_full() -> None:
    lines = told([CANARY])
    assert any(line.startswith("1 canary failed") for line in lines)
    assert lines[-4] == "round 1 canary: 1 of 3 clients passes"
    assert lines[-3] == "h1 passes: a whole round takes 212 s"
    assert lines[-2] == f"h2 unfit: {LONG.strip()}"
    assert lines[-1].startswith("h3 declined: not")
    assert "\x1b" not in lines[-1]
    assert any(line.startswith("1 canary  ") for line in told([replace(CANARY, committed=True)]))


def test_who_was_turned_away_is_named_with_the_reason() -> None:
    console = Console(file=io.StringIO(), width=1000)
    away = (TurnedAway("h4", "its model does not fit", 1.7e9), TurnedAway("h5", "nor\x1b does this", 1.7e9))
    with console.capture() as capture:
        console.print(RunPicture(RUN, (), None, away))
    first, second = capture.get().splitlines()[-2:]
    assert first == "h4 turned away: its model does not fit"
    assert second.startswith("h5 turned away: nor")
    assert "\x1b" not in second
