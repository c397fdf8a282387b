"""Words for people and for files: nothing that goes to a file or a pipe is wrapped, padded or without its date."""

import re
import subprocess
import sys

import pytest

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
