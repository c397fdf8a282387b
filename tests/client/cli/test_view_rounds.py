"""A run told to a file: a line an event, none twice."""

from dataclasses import replace

from tests.client.cli.test_view import EAST, FINE, ROUND, RUN
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.run.records import ClientRecord, Fate, Judged, LiveRound, RoundRecord, RunProgress, TurnedAway
from umbel.client.cli.output import table_lines
from umbel.client.cli.view_rounds import Events, client_columns, measured, round_columns

LIVE = LiveRound(3, 1, "training", "0 of 2 reports are in", 0, 2, 60.0, (FINE,))
NEWS = RunProgress(RUN, (), 0, LIVE)


def told(events: Events, progress: RunProgress) -> list[str]:
    return [line.partition(" ")[2] for line in events.new_in(progress)]


def test_what_has_not_changed_is_not_told_again() -> None:
    events = Events()
    assert told(events, NEWS) == [
        "ward: running, 1 of 5 rounds is done",
        "round 3: training, 1 client is asked, closes in 60 s; 0 of 2 reports are in",
    ]
    assert told(events, replace(NEWS, live=replace(LIVE, why="1 of 2 reports is in", closes_in_s=9.0))) == []


def test_the_end_of_a_round_tells_what_it_brought_and_who_was_not_there() -> None:
    ended = replace(ROUND, absent=EAST, samples_selected=30, samples_in=30, samples_share=1.0)
    assert told(Events(), replace(NEWS, ended=(ended,)))[:2] == [
        "round 2: done in 3.0 s, 1 of 3 clients reported, 100% of their data; training: loss 0.2500",
        "round 2: absent: east (114 samples, last seen 22:13Z); the round has 21% of all known data",
    ]


def test_of_a_secure_round_no_share_of_data_is_told() -> None:
    ended = replace(ROUND, absent=EAST)
    first, second, *_ = told(Events(), replace(NEWS, ended=(ended,)))
    assert first == "round 2: done in 3.0 s, 1 of 3 clients reported; training: loss 0.2500"
    assert second == "round 2: absent: east (114 samples, last seen 22:13Z)"


def test_of_a_private_round_it_is_told_what_the_run_has_cost_with_it() -> None:
    [line, *_] = told(Events(), replace(NEWS, ended=(replace(ROUND, metrics={}, epsilon=5.327),)))
    assert line == "round 2: done in 3.0 s, 1 of 3 clients reported; epsilon 5.33 so far"


def test_where_mu_adapts_that_of_each_round_is_told() -> None:
    [line, *_] = told(Events(), replace(NEWS, ended=(replace(ROUND, proximal_mu=0.0),)))
    assert line == "round 2: done in 3.0 s, 1 of 3 clients reported; training: loss 0.2500; mu 0"
    rounds = [replace(ROUND, proximal_mu=0.1), replace(ROUND, round=3, proximal_mu=0.2)]
    cells = {column.head: column.cells for column in round_columns(rounds, rounds)}
    assert cells["mu"] == ["0.1", "0.2"]
    assert "mu" not in {column.head for column in round_columns([ROUND], [ROUND])}


def test_where_work_is_partial_its_share_of_the_steps_is_shown() -> None:
    """Of a secure round it is unknown, because its clients say no steps."""
    whole = ClientRecord("north", Fate.ACCEPTED, "the report counts", 30, steps_done=4, steps_planned=4)
    part = ClientRecord("south", Fate.PARTIAL, "1 of 4 steps counts", 30, steps_done=1, steps_planned=4)
    masked = ClientRecord("west", Fate.ACCEPTED, "the report counts", 0)
    rounds = [replace(ROUND, clients=clients) for clients in ((whole, part), (whole,), (masked,))]
    assert [one.work_share for one in rounds] == [0.625, 1.0, None]
    cells = {column.head: column.cells for column in round_columns(rounds, rounds)}
    assert cells["steps done"] == ["62%", "", ""]
    assert "steps done" not in {column.head for column in round_columns(rounds[1:], rounds)}


def test_pauses_and_those_who_are_turned_away_are_told_once_and_no_escape_reaches_the_log() -> None:
    events, away = Events(), (TurnedAway("h4", "its\x1b model does not fit", 1.7e9),)
    told(events, NEWS)
    paused = replace(NEWS, run=replace(RUN, status=RunStatus.PAUSED, reason="night shift"), turned_away=away)
    assert told(events, paused) == [
        "h4 turned away: its\N{REPLACEMENT CHARACTER} model does not fit",
        "ward: paused, night shift, 1 of 5 rounds is done",
    ]
    assert told(events, paused) == []


def test_a_reason_for_declining_is_told_once_in_the_life_of_a_log() -> None:
    events, why = Events(), "this site's policy does not allow this round, " * 9 + "so set minimum to 4"
    first = replace(ROUND, clients=(ClientRecord("h2", Fate.DECLINED, why, 30),))
    assert told(events, replace(NEWS, ended=(first,)))[1] == f"round 2: h2 declined: {why}"
    again = replace(first, attempt=2)
    assert told(events, replace(NEWS, ended=(again,)))[1] == "round 2 (attempt 2): h2 declined, as in round 2"


def test_every_line_bears_its_date_and_zone() -> None:
    first = next(Events().new_in(NEWS)).split()[0]
    assert len(first) == len("2026-01-31T23:59:59+00:00")


def test_a_narrow_table_keeps_sensitivity_and_auc_and_leaves_out_the_details_of_counts_first() -> None:
    figures = (
        "confusion.precision",
        "confusion.sensitivity",
        "personal.accuracy",
        "scores.auc",
        "scores.auc_error_max",
    )
    means: list[dict[str, float]] = [dict.fromkeys(figures, 0.5)]
    worth = {column.head: column.worth for column in measured("held-out", 60, means)}
    assert {head for head, one in worth.items() if one == 60} == {
        "confusion.sensitivity",
        "personal.accuracy",
        "scores.auc",
    }
    assert len(worth) == len(figures)


MADE_UP = {f"a{i}": 0.5 for i in range(24)}
HONEST = {"accuracy": 0.8125, "loss": 0.375}


def heads_at_100_columns(*rounds: RoundRecord) -> list[str]:
    """The heads of the newest round's table."""
    _, heads, *_ = table_lines(round_columns(rounds[-1:], rounds), 100)
    return heads.plain.split()


def test_made_up_metrics_do_not_push_out_those_that_earlier_rounds_had() -> None:
    first = replace(ROUND, metrics={"loss": 0.5}, evaluation=HONEST)
    later = replace(first, round=2, metrics={**MADE_UP, "loss": 0.5}, evaluation={**MADE_UP, **HONEST})
    heads = heads_at_100_columns(first, later)
    assert [head for head in heads if head in HONEST] == ["loss", "accuracy", "loss"], "training, then held-out"
    clients = (
        ClientRecord("hostile", Fate.ACCEPTED, "", 1, evaluation={**MADE_UP, **HONEST}),
        ClientRecord("ward", Fate.ACCEPTED, "", 9, evaluation=HONEST),
    )
    columns = client_columns(replace(later, clients=clients), (first, later))
    assert [column.head for column in columns if column.group][:2] == ["accuracy", "loss"]


def test_the_metric_of_early_stopping_comes_first_also_if_all_names_came_at_once() -> None:
    judged = Judged("evaluation.loss", 0.375, 3, "the median")
    only = replace(ROUND, metrics={"loss": 0.5}, evaluation={**MADE_UP, **HONEST}, judged=judged)
    columns = [column for column in round_columns([only], [only]) if column.group == "held-out"]
    assert columns[0].head == "loss"
    assert "loss" in heads_at_100_columns(only)
    of_training = replace(only, judged=replace(judged, metric="training.loss"))
    assert "loss" in heads_at_100_columns(of_training)
    without = replace(only, judged=None)
    assert "loss" not in heads_at_100_columns(without), "the test's names fill the table"
