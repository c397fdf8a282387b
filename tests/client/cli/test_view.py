"""What `umbel run show` and `watch` say of ended rounds: who is missing and why, and what was measured when."""

import io
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from umbel.aggregation.messages import REASON_CHARS_MAX, RunStatus
from umbel.aggregation.plans.assignment import ModelRef
from umbel.aggregation.plans.round import Task
from umbel.aggregation.privacy.section import PrivacySpent
from umbel.aggregation.round.coverage import Gap
from umbel.aggregation.run.quantiles import Quantiles
from umbel.aggregation.run.records import (
    Absent,
    AbsentClient,
    AwayKind,
    ClientRecord,
    Fate,
    Judged,
    LiveRound,
    RoundRecord,
    RunView,
    TurnedAway,
)
from umbel.client.cli.view import ENDED_SHOWN, RunPicture
from umbel.client.cli.view_rounds import EXCEPTIONS_SHOWN

RUN = RunView("ward", RunStatus.RUNNING, "", 1, 5, 1.7e9, ModelRef(1, "a" * 64, 100, "b" * 64))
FINE = ClientRecord("h1", Fate.ACCEPTED, "the report counts", 30)
ROUND = RoundRecord(
    run="ward",
    round=2,
    attempt=1,
    committed=True,
    reason="the target of 1 report is in",
    model_version=2,
    model_sha256="a" * 64,
    opened_at=1.7e9,
    wall_s=3.0,
    selected=3,
    reported=1,
    partial=0,
    dropped=2,
    sample_count=30,
    bytes_up=100,
    bytes_down=100,
    metrics={"loss": 0.25},
    clients=(FINE,),
)


def told(
    records: Sequence[RoundRecord], run: RunView = RUN, live: LiveRound | None = None, width: int = 1000
) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        console.print(RunPicture(run, records, live))
    return [line.strip() for line in capture.get().splitlines()]


def test_each_clients_own_metrics_are_shown_of_the_newest_round_that_keeps_them() -> None:
    own = replace(
        FINE, metrics={"loss": 0.5}, evaluation={"confusion.sensitivity": 0.75, "scores.auc": 0.9}, client="h\x1b2"
    )
    older = replace(ROUND, clients=(replace(own, client="older"),))
    kept = replace(ROUND, round=3, clients=(FINE, own, replace(FINE, client="h3", metrics={"loss": 0.25})))
    lines = told([older, kept, replace(ROUND, round=4)])
    place = lines.index("round 3, each client's own values:")
    groups, heads, *rows = [line.split() for line in lines[place + 1 : place + 5]]
    assert groups == ["training", "held-out"]
    assert heads == ["client", "samples", "loss", "confusion.sensitivity", "scores.auc"]
    assert rows == [["h\ufffd2", "30", "0.5000", "0.7500", "0.9000"], ["h3", "30", "0.2500"]]
    assert not any("older" in line for line in lines)
    assert not any("own values" in line for line in told([ROUND]))


def test_how_metrics_differ_between_clients_is_shown_of_the_newest_round_in_which_several_measured() -> None:
    loss = Quantiles(12, 0.25, "h\x1b2", 0.3, 0.5, 0.9, 2.0, "worst")
    detail = {"confusion.precision": loss}
    known = replace(ROUND, metric_quantiles={"loss": loss, **detail}, evaluation_quantiles={"accuracy": loss})
    alone = replace(ROUND, round=4, metric_quantiles={"loss": replace(loss, clients=1)})
    lines = told([replace(known, round=1), replace(known, round=3), alone])
    place = lines.index("round 3, from client to client:")
    heads, *rows = [line.split() for line in lines[place + 1 : place + 4]]
    assert " ".join(heads) == "metric clients least of client 10 % median 90 % greatest of client"
    values = ["12", "0.2500", "h\ufffd2", "0.3000", "0.5000", "0.9000", "2.000", "worst"]
    assert rows == [["training", "loss", *values], ["held-out", "accuracy", *values]]
    assert sum("from client to client" in line for line in lines) == 1
    assert not any("from client to client" in line for line in told([ROUND, alone]))


def test_a_private_run_says_what_it_has_cost_of_its_budget_and_a_bound_one_whose_list_it_is_bound_to() -> None:
    spent = PrivacySpent(epsilon=5.327, delta=1e-6, budget=8.0, sums=2, sums_max=4)
    run = replace(RUN, privacy=spent, members_sha256="07f5be6fa2bdb100" + "0" * 48, audit_head="c" * 64)
    assert told([replace(ROUND, epsilon=5.327)], run=run)[1:5] == [
        "privacy: epsilon 5.33 of 8 is spent, at delta 1e-06, by 2 of at most 4 sums",
        "member list 07F5 BE6F A2BD B100 … (--json shows the whole hash)",
        "audit head " + "c" * 64,
        told([replace(ROUND, epsilon=5.327)])[1],  # the table begins
    ]
    unlimited = replace(spent, budget=None, sums=0, sums_max=1)
    assert told([], run=replace(RUN, privacy=unlimited))[1] == (
        "privacy: epsilon 5.33 is spent, at delta 1e-06, by 0 of at most 1 sum"
    )


def test_the_epsilon_of_a_round_is_what_the_run_had_cost_with_it() -> None:
    header, first, second = told([replace(ROUND, epsilon=3.6171), replace(ROUND, round=3, epsilon=None)])[2:]
    assert first.index("3.62") == header.index("epsilon so far")
    assert "3.62" not in second
    assert "epsilon" not in told([ROUND])[2]


def test_a_round_that_went_as_planned_has_one_line() -> None:
    assert len(told([ROUND])) == 4


def test_an_ended_round_says_who_was_missing_and_why() -> None:
    clients = (
        FINE,
        ClientRecord("h2", Fate.PARTIAL, "7 of 28 steps count", 30),
        ClientRecord("h3", Fate.DECLINED, "the update is not finite", 30),
        ClientRecord("h4", Fate.LOST, "silent for 12.0 s", 30),
    )
    assert told([replace(ROUND, clients=clients)])[-1] == (
        "round 2: h3 declined: the update is not finite; h4 lost: silent for 12.0 s; h2 partial: 7 of 28 steps count"
    )


def test_a_round_that_measured_says_what_early_stopping_goes_by() -> None:
    judged = Judged(
        "evaluation.loss", 0.48, 10, "the mean over 8 of 10 clients, without the 1 least and the 1 greatest"
    )
    none = Judged("evaluation.loss", None, 2, "2 clients have measured it, and it counts only if at least 3 do")
    assert told([replace(ROUND, judged=judged), replace(ROUND, round=3, judged=none)])[-2:] == [
        "round 2: evaluation.loss: early stopping uses 0.4800, " + judged.why,
        "round 3: evaluation.loss: " + none.why,
    ]


def test_an_ended_round_says_how_much_data_is_in_and_what_is_not_covered() -> None:
    gaps = (Gap("site", "north", "low battery", 500), Gap("samples", "", "50 of 550 samples are in", 500))
    header, row, note = told([replace(ROUND, samples_share=0.0909, uncovered=gaps)])[2:]
    assert row.index("9%") >= header.index("data in")
    assert note == (
        "round 2: site north not covered, 500 samples: low battery; "
        "the share of samples not covered, 500 samples: 50 of 550 samples are in"
    )


def test_abandoned_attempts_show_their_number_and_their_reason() -> None:
    lost = replace(ROUND, committed=False, model_sha256=None, reason="the window of 9 s is over with 0 reports")
    lines = told([lost, replace(lost, attempt=2, reason="everyone has declined"), replace(ROUND, attempt=3)])
    assert "2 abandoned" in lines[3]
    assert "2 (attempt 2) abandoned" in lines[4]
    assert "2 (attempt 3) " in lines[5]
    assert lines[6:] == [
        "round 2: abandoned: the window of 9 s is over with 0 reports",
        "round 2 (attempt 2): abandoned: everyone has declined",
    ]


def test_a_long_list_of_the_missing_ends_in_counts_and_a_long_reason_is_cut() -> None:
    lost = [ClientRecord(f"h{number:02}", Fate.LOST, "silent " * 99, 30) for number in range(EXCEPTIONS_SHOWN + 3)]
    line = told([replace(ROUND, clients=tuple(lost))])[-1]
    assert line.endswith("…; and 3 lost")
    assert len(line) < 150 * EXCEPTIONS_SHOWN


REMEDY = ", so set minimum to 4"
REFUSAL = ("this site's policy does not allow" + " this round" * 100)[: REASON_CHARS_MAX - len(REMEDY)] + REMEDY


def test_a_reason_for_declining_is_whole_and_written_once_for_all_who_give_it() -> None:
    clients = (
        ClientRecord("h2", Fate.DECLINED, REFUSAL, 30),
        ClientRecord("h3", Fate.DECLINED, "no data", 30),
        ClientRecord("h4", Fate.DECLINED, REFUSAL, 30),
    )
    assert told([replace(ROUND, clients=clients)], width=4000)[-1] == (
        f"round 2: h2, h4 declined: {REFUSAL}; h3 declined: no data"
    )


def test_a_later_attempt_refers_to_the_one_that_has_the_reason_for_declining() -> None:
    attempts = [
        replace(ROUND, attempt=number, clients=(ClientRecord(name, Fate.DECLINED, REFUSAL, 30),))
        for number, name in enumerate(("h2", "h3", "h2"), 1)
    ]
    assert told(attempts, width=4000)[-3:] == [
        f"round 2: h2 declined: {REFUSAL}",
        "round 2 (attempt 2): h3 declined, as in round 2",
        "round 2 (attempt 3): h2 declined, as in round 2",
    ]


def test_a_reason_for_declining_the_round_under_way_is_whole_where_the_table_cuts_it() -> None:
    clients = (ClientRecord("h2", Fate.DECLINED, REFUSAL, 0), ClientRecord("h3", Fate.DECLINED, "no data", 0))
    live = LiveRound(3, 1, "training", "0 of 2 reports are in", 0, 2, 60.0, clients)
    ended = [replace(ROUND, clients=clients[:1])]
    whole = " ".join(told(ended, live=live, width=100))
    assert whole.count(f"h2 declined: {REFUSAL}") == 1
    assert "h3 declined:" not in whole, "its row in the table has it"
    assert whole.endswith("round 2: h2 declined, as in round 3")
    assert "h2 declined:" not in " ".join(told([], live=live, width=4000)), "so has this row, if it is wide enough"


def test_of_many_clients_that_decline_for_one_reason_the_first_are_named() -> None:
    clients = tuple(ClientRecord(f"h{number:02}", Fate.DECLINED, "no data", 30) for number in range(15))
    line = told([replace(ROUND, clients=clients)])[-1]
    assert line.startswith("round 2: h00, h01, ")
    assert line.endswith("h11 and 3 more declined: no data")


def test_on_a_screen_the_oldest_notes_that_are_shown_have_the_reason_for_declining() -> None:
    ended = [
        replace(ROUND, attempt=number, clients=(ClientRecord("h2", Fate.DECLINED, REFUSAL, 30),))
        for number in range(1, 40)
    ]
    console = Console(file=io.StringIO(), width=120, height=24)
    with console.capture() as capture:
        console.print(RunPicture(RUN, ended, None, fits_screen=True))
    lines = capture.get().splitlines()
    assert len(lines) < 24
    whole = " ".join(line.strip() for line in lines)
    first = next(number for number in range(1, 40) if f"(attempt {number}): h2 declined: {REFUSAL}" in whole)
    assert whole.endswith(f"round 2 (attempt 39): h2 declined, as in round 2 (attempt {first})")


def test_on_a_screen_without_room_for_a_reason_as_much_of_it_is_shown_as_fits() -> None:
    ended = [replace(ROUND, clients=(ClientRecord("h2", Fate.DECLINED, REFUSAL, 30),))]
    console = Console(file=io.StringIO(), width=60, height=8)
    with console.capture() as capture:
        console.print(RunPicture(RUN, ended, None, fits_screen=True))
    lines = capture.get().splitlines()
    assert len(lines) == 7
    assert lines[4].startswith("round 2: h2 declined: this site's policy")
    assert lines[-1].endswith("…")


def test_training_and_the_evaluation_of_the_model_before_are_told_apart() -> None:
    picture, console = RunPicture(RUN, [replace(ROUND, evaluation={"loss": 0.5})], None), Console(width=1000)
    with console.capture() as capture:
        console.print(picture)
    groups, header, row, *_, legend = capture.get().splitlines()[1:]
    assert header.split()[-2:] == ["loss", "loss"]
    assert row.index("0.2500") == groups.index("training") == header.index("loss")
    assert row.index("0.5000") == groups.index("held-out") == header.rindex("loss")
    assert "the model that they receive" in legend


@pytest.mark.parametrize("hostile", ["\x1b[2J", "[red]x[/nonsense]"])
def test_no_word_of_a_client_reaches_the_terminal_as_a_command(hostile: str) -> None:
    client = ClientRecord("h3", Fate.DECLINED, hostile, 30)
    text = "\n".join(told([replace(ROUND, clients=(client,), metrics={hostile: 1.0})]))
    assert "\x1b" not in text
    assert hostile.replace("\x1b", "\N{REPLACEMENT CHARACTER}") in text


EAST = Absent(1, 114, (AbsentClient("east", 114, 1.7e9),))


def test_who_was_not_there_to_be_asked_is_named_and_so_is_what_share_of_the_known_data_is_in() -> None:
    record = replace(ROUND, selected=2, reported=2, dropped=0, samples_selected=229, samples_in=229, absent=EAST)
    header, row, note = told([record])[2:]
    assert row.index("67%") == header.index("of all known data")
    assert note == "round 2: absent: east (114 samples, last seen 22:13Z); the round has 67% of all known data"
    line = told([replace(record, absent=replace(EAST, clients=9, samples=500))])[-1]
    assert "east (114 samples, last seen 22:13Z) and 8 more, 500 samples in all;" in line


def test_of_absent_clients_whose_samples_nobody_knows_none_are_told() -> None:
    absent = Absent(2, 0, (AbsentClient("east", 0, 1.7e9), AbsentClient("west", 0, 1.7e9)))
    assert told([replace(ROUND, absent=absent)])[-1] == (
        "round 2: absent: east (last seen 22:13Z), west (last seen 22:13Z)"
    )
    assert told([replace(ROUND, absent=replace(absent, clients=9))])[-1].endswith("west (last seen 22:13Z) and 7 more")
    one = Absent(3, 1, (AbsentClient("east", 1, 1.7e9),))
    assert "east (1 sample, last seen 22:13Z) and 2 more, 1 sample in all" in told([replace(ROUND, absent=one)])[-1]
    some_told = Absent(3, 1, (AbsentClient("east", 1, 1.7e9), AbsentClient("west", 0, 1.7e9)))
    assert told([replace(ROUND, absent=some_told)])[-1].endswith("and 1 more"), "of whom nobody knows"


def test_of_clients_at_work_whose_samples_nobody_knows_none_are_told() -> None:
    live = LiveRound(3, 1, "training", "0 of 2 reports are in", 0, 2, 60.0, (replace(FINE, sample_count=0),))
    header, row = told([], live=live)[-2:]
    assert "samples" not in header
    assert "0" not in row
    assert "samples" in told([], live=replace(live, clients=(FINE,)))[-2]


def test_numbers_and_their_nouns_agree() -> None:
    assert told([], run=replace(RUN, rounds_planned=1))[0].startswith("ward  1 of 1 round  running")
    lines = told([replace(ROUND, round=number) for number in range(1, ENDED_SHOWN + 2)])
    assert lines[-1] == "1 older attempt is not shown here; --json shows all of them"


def test_a_site_that_is_not_covered_has_the_samples_that_are_known_of_it_or_none_are_told() -> None:
    gap = Gap("site", "east", "was not waiting when the cohort was drawn", 0)
    assert "site east not covered, 114 samples: was not" in told([replace(ROUND, uncovered=(gap,), absent=EAST)])[-1]
    assert told([replace(ROUND, uncovered=(gap,))])[-1].startswith("round 2: site east not covered: was not")


def test_a_page_tells_of_every_canary_and_how_many_rounds_it_leaves_out() -> None:
    canary = replace(ROUND, task=Task.CANARY, reason="3 of 3 pass", clients=(replace(FINE, reason="takes 9 s"),))
    lines = told([canary] + [replace(ROUND, round=number) for number in range(1, ENDED_SHOWN + 10)])
    assert "h1 passes: takes 9 s" in lines
    assert lines[-1] == "10 older attempts are not shown here; --json shows all of them"


@pytest.mark.parametrize(("width", "height"), [(60, 12), (60, 24), (80, 24), (120, 40), (200, 60)])
@pytest.mark.parametrize("n_clients", [0, 3, 100])
def test_on_a_screen_the_round_under_way_is_first_and_nothing_is_wrapped_or_cut_off(
    width: int, height: int, n_clients: int
) -> None:
    clients = tuple(ClientRecord(f"hospital-{number:03}", Fate.TRAINING, "busy", 9) for number in range(n_clients))
    live = LiveRound(40, 1, "training", "1 of 2 reports is in", 0, 2, 41.2, clients, absent=EAST)
    means = {f"a-metric-of-some-length-{number}": 0.123456 for number in range(4)}
    ended = [replace(ROUND, round=number, metrics=means, absent=EAST) for number in range(1, 40)]
    away = tuple(TurnedAway(f"h{number}", "its model does not fit " * 9, 1.7e9) for number in range(20))
    console = Console(file=io.StringIO(), width=width, height=height)
    with console.capture() as capture:
        console.print(RunPicture(RUN, ended, live, away, fits_screen=True))
    lines = capture.get().splitlines()
    assert len(lines) < height
    assert max(map(len, lines)) <= width
    assert lines[1].startswith("round 40: training, closes in 41 s")
    assert any(line.startswith("round  reported  data in") for line in lines)
    assert any(line.startswith("39     1 of 3") for line in lines)
    assert sum("training  " in line and "busy" in line for line in lines) >= min(n_clients, 1)


def test_the_reason_of_an_abandoned_round_is_told_once() -> None:
    why = "rolled back to version 1: it diverged"
    clients = (
        ClientRecord("h1", Fate.RELEASED, f"the round was abandoned: {why}", 30),
        ClientRecord("h2", Fate.LOST, f"silent for 9.0 s when the round ended; had not reported: {why}", 30),
    )
    assert told([replace(ROUND, committed=False, reason=why, clients=clients)])[-1] == (
        f"round 2: abandoned: {why}; h2 lost: silent for 9.0 s when the round ended; had not reported; "
        "h1 released: the round was abandoned"
    )


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


@pytest.mark.parametrize("kind", ["stays away", "not ready"])
def test_the_own_word_of_a_client_is_shown_as_such(kind: str) -> None:
    away = (TurnedAway("h4", "a person must decide", 1.7e9, AwayKind(kind)),)
    console = Console(file=io.StringIO(), width=1000)
    with console.capture() as capture:
        console.print(RunPicture(RUN, (), None, away))
    assert capture.get().splitlines()[-1] == f"h4 {kind}: a person must decide"


def test_a_page_says_which_way_the_rounds_lean_if_the_amounts_of_data_are_known() -> None:
    known = replace(ROUND, samples_in=30, samples_left_out=600, samples_selected=630, samples_share=30 / 630)
    [line] = [line for line in told([known, replace(known, round=3, partial=1)]) if "leans" in line]
    assert line == (
        "2 committed rounds: 1 of 2 reports was partial; 4 of 6 asked clients were left out; clients have on average "
        "30 samples if their reports count, 300 if they were left out; 5% of the asked samples count, so the model "
        "leans to clients with little data"
    )
    of_others = [replace(known, committed=False), replace(known, task=Task.EVALUATION), ROUND]
    assert not [line for line in told(of_others) if "lean" in line]


def test_a_screen_with_room_says_which_way_the_rounds_lean() -> None:
    known = replace(ROUND, samples_in=30, samples_left_out=600, samples_selected=630, samples_share=30 / 630)
    for height, is_said in ((30, True), (4, False)):
        console = Console(file=io.StringIO(), width=100, height=height)
        with console.capture() as capture:
            console.print(RunPicture(RUN, [known], None, fits_screen=True))
        text = " ".join(capture.get().split())
        assert ("leans to clients with little data" in text) is is_said
        assert len(capture.get().splitlines()) < height


def test_a_metric_that_is_not_shown_is_named_once_with_the_reason() -> None:
    why = "fewer than 3 clients have it, which is the minimum of this round"
    left_out = {"evaluation.auc": why, "training.f1": why}
    rounds = [replace(ROUND, not_shown={"evaluation.auc": why}), replace(ROUND, round=3, not_shown=left_out)]
    assert told(rounds, width=4000)[-2:] == [
        f"round 2: not shown: evaluation.auc ({why})",
        f"round 3: not shown: training.f1 ({why})",
    ]
