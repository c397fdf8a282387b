"""How the command line prints: nothing in a file or a pipe is wrapped; a table fits its width."""

import re
import subprocess
import sys

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from umbel.client.cli.output import (
    ERROR_STATUS,
    FINAL_STATUS,
    Column,
    left_out_words,
    one_sentence_errors,
    table_lines,
)
from umbel.client.errors import CoordinatorUnreachable, NotEnrolled, StateError, refusal_of

LOG = """
import logging
from umbel.client.cli.output import log_to_stderr
log_to_stderr()
logging.getLogger("umbel.client").warning("%s", "word " * 60 + "end")
"""
PRINT = """
from rich.text import Text
from umbel.client.cli.output import screen
screen().print(Text("word " * 60 + "end"))
"""


@pytest.mark.slow
def test_a_log_that_goes_to_a_pipe_has_a_line_a_message_with_date_and_time() -> None:
    told = subprocess.run([sys.executable, "-c", LOG], capture_output=True, text=True, check=True).stderr
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} WARNING (word ){60}end\n", told)


@pytest.mark.slow
def test_what_is_printed_to_a_pipe_is_not_wrapped() -> None:
    told = subprocess.run([sys.executable, "-c", PRINT], capture_output=True, text=True, check=True).stdout
    assert told == "word " * 60 + "end\n"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (refusal_of("client-removed", "the operator did it", 403), FINAL_STATUS),
        (refusal_of("token-used", "by another client", 409), FINAL_STATUS),
        (refusal_of("key-taken", "by another client", 409), FINAL_STATUS),
        (NotEnrolled("this client is not enrolled yet"), FINAL_STATUS),
        (refusal_of("stale-signature", "the clock is wrong", 401), ERROR_STATUS),
        (refusal_of("bad-signature", "perhaps by a proxy", 401), ERROR_STATUS),
        (refusal_of("admin-key-refused", "no client's", 401), ERROR_STATUS),
        (refusal_of("not-found", "no such page", 404), ERROR_STATUS),
        (CoordinatorUnreachable("no answer"), ERROR_STATUS),
        (StateError("another process uses it"), ERROR_STATUS),
        (ValueError("a policy that is not valid"), ERROR_STATUS),
        (OSError(28, "No space left on device"), ERROR_STATUS),
    ],
    ids=str,
)
def test_only_an_error_that_no_restart_helps_against_has_the_status_that_keeps_a_service_stopped(
    error: Exception, status: int
) -> None:
    with pytest.raises(typer.Exit) as ended, one_sentence_errors():
        raise error
    assert ended.value.exit_code == status


def column(head: str, cell: str, worth: int, least: int | None = None) -> Column:
    return Column(head, worth, [cell], least)


COLUMNS = (column("name", "north", 3, 4), column("bytes", "123456", 1), column("why", "it has said so", 2, 6))


def told(width: int) -> list[str]:
    return [line.plain.rstrip() for line in table_lines(COLUMNS, width)]


def test_a_table_that_fits_is_whole() -> None:
    assert told(80) == ["name   bytes   why", "north  123456  it has said so"]


def test_columns_are_cut_before_the_least_is_left_out() -> None:
    assert told(22) == ["name   bytes   why", "north  123456  it has\N{HORIZONTAL ELLIPSIS}"]
    assert told(19) == ["name   why", "north  it has said\N{HORIZONTAL ELLIPSIS}"]
    assert told(4) == ["name", "nor\N{HORIZONTAL ELLIPSIS}"]


def test_no_line_is_wider_than_it_may_be() -> None:
    for width in range(4, 60):
        assert max(len(line) for line in told(width)) <= width


def test_the_columns_that_do_not_fit_are_named_with_the_way_to_see_them() -> None:
    assert left_out_words(COLUMNS, 80) is None
    words = left_out_words(COLUMNS, 4)
    assert words is not None
    assert words.plain == "no room for: bytes, why (--all and --json show them)"


@given(
    st.lists(
        st.tuples(st.sampled_from(["", "training", "held-out"]), st.text("ab", max_size=9), st.text("1", max_size=9)),
        min_size=1,
        max_size=8,
    ),
    st.integers(12, 120),
)
def test_every_column_is_shown_whole_or_named_as_left_out(rows: list[tuple[str, str, str]], width: int) -> None:
    columns = [
        Column(f"{place}{head}", place % 3, [f"c{place}{cell}"], group=group)
        for place, (group, head, cell) in enumerate(rows)
    ]
    lines, left_out = [line.plain for line in table_lines(columns, width)], left_out_words(columns, width)
    *groups, heads, cells = lines
    shown = [column for column in columns if column.cells[0] in cells.split()]
    assert heads.split() == [column.head for column in shown]
    assert max(map(len, lines)) <= width
    assert len(groups) == any(column.group for column in shown)
    assert (left_out is None) == (len(shown) == len(columns))


def test_a_group_is_written_once_above_its_columns() -> None:
    columns = (
        column("round", "1", 9),
        Column("auc", 5, ["0.5000"], group="training"),
        Column("loss", 5, ["0.2500"], group="training"),
        Column("auc", 5, ["0.7500"], group="held-out"),
    )
    assert [line.plain.rstrip() for line in table_lines(columns, 80)] == [
        "       training        held-out",
        "round  auc     loss    auc",
        "1      0.5000  0.2500  0.7500",
    ]
