"""How the command line prints: nothing in a file or a pipe is wrapped; a table fits its width."""

import re
import subprocess
import sys

import pytest

from umbel.client.cli.output import Column, table_lines

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
