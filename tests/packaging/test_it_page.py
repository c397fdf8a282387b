"""What the page for a hospital's IT quotes is in the code: words of the log, keys, times, limits and the unit."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache

import pytest

from tests.repository import ROOT
from umbel.aggregation.messages import WAIT_S_MAX
from umbel.client.policy.policy import SitePolicy
from umbel.client.wire.timing import CHUNK_BYTES_MAX

PAGE = (ROOT / "docs" / "explanation" / "for-a-hospitals-it.md").read_text()


def log_rows() -> list[tuple[str, str]]:
    """Words in the log, and their level."""
    rows = re.findall(r"^\| (`[^|]+`) \| ((?:INFO|WARNING|ERROR)[^|]*) \|", PAGE, re.MULTILINE)
    return [(words, level.split(",")[0]) for cell, level in rows for words in re.findall(r"`([^`]+)`", cell)]


@cache
def sentences() -> tuple[str, ...]:
    """All texts in the code of clients and rounds, without docstrings; each value in them is `%s`."""
    trees = [
        ast.parse(file.read_text()) for part in ("client", "aggregation/round") for file in (ROOT / part).rglob("*.py")
    ]
    return tuple(_texts(trees))


def _texts(trees: Iterable[ast.AST]) -> Iterator[str]:
    for node in (node for tree in trees for node in ast.walk(tree)):
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.JoinedStr):
                yield "".join(str(one.value) if isinstance(one, ast.Constant) else "%s" for one in inner.values)
            elif isinstance(inner, ast.Constant) and isinstance(inner.value, str) and not isinstance(node, ast.Expr):
                yield inner.value


def test_the_page_has_log_lines() -> None:
    assert len(log_rows()) > 12


@pytest.mark.parametrize("words", [words for words, _ in log_rows()])
def test_words_of_the_log_are_in_the_code(words: str) -> None:
    pattern = re.compile(r"%[.\w]+".join(map(re.escape, words.split("…"))))
    assert any(pattern.search(one) for one in sentences())


def test_keys_of_the_policy_on_the_page_exist() -> None:
    keys = set(re.findall(r"`([a-z_]+) = [^`]+`", PAGE))
    assert {"secure_aggregation", "share_metrics", "share_sample_count", "links"} <= keys
    assert keys | {"allowed_runs"} <= {field.name for field in fields(SitePolicy)}


def test_times_and_sizes_of_the_page_are_those_of_the_code() -> None:
    assert f"an answer may take {WAIT_S_MAX:g} s when there is no work" in PAGE
    assert f"requests up to {CHUNK_BYTES_MAX >> 20} MiB" in PAGE


def test_what_the_page_says_of_the_service_is_in_its_unit() -> None:
    unit = dict(
        line.split("=", 1) for line in (ROOT / "deploy/umbel-client.service").read_text().splitlines() if "=" in line
    )
    assert unit["EnvironmentFile"] in PAGE
    assert f"/var/lib/{unit['StateDirectory']}" in PAGE
    assert (unit["Restart"], unit["StateDirectoryMode"]) == ("on-abnormal", "0700")
    assert f"starts again after {unit['RestartSec']} s" in PAGE
    assert unit["TimeoutStopSec"] == "600", "the page says ten minutes"
