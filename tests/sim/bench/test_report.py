"""A promise is kept or broken by the figure it is about."""

import io

import pytest
from rich.console import Console

from umbel.sim.bench.report import BenchRow, Hold, Report


@pytest.mark.parametrize(
    ("promise", "hold", "holds"),
    [
        (None, None, None),
        (Hold(0.5), "<= 0.5", True),
        (Hold(0.2), "<= 0.2", False),
        (Hold(0.4, sense=">="), ">= 0.4", False),
        (Hold(1.0, of="ours"), "<= 1 s", True),
        (Hold(0.9, of="ours"), "<= 0.9 s", False),
    ],
)
def test_a_row_says_what_is_promised_and_whether_it_holds(
    promise: Hold | None, hold: str | None, holds: bool | None
) -> None:
    row = BenchRow("a round", 1.0, "the peer", 4.0, "s", promise)
    assert (row.ratio, row.hold, row.holds) == (0.25, hold, holds)


def test_the_json_of_a_row_has_the_promised_fields_in_order() -> None:
    row = BenchRow("a round", 1.0, "the peer", 4.0, "s", Hold(1.0))
    assert list(row.to_json()) == ["what", "ours", "against", "theirs", "unit", "ratio", "hold", "holds"]


def test_a_report_names_its_broken_rows_and_draws_them_all() -> None:
    good, bad = BenchRow("good", 1, "x", 2, "s", Hold(1)), BenchRow("bad", 3, "x", 2, "s", Hold(1))
    report = Report("name", (good, bad, BenchRow("free", 1, "x", 0, "s")), ("a note [of ours]",))
    assert report.broken == [bad]
    assert [row["what"] for row in report.to_json()["rows"]] == ["good", "bad", "free"]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report.to_table())
    text = console.export_text()
    assert "✔" in text
    assert "✖" in text
    assert "a note [of ours]" in text


def test_what_was_missed_is_told_in_the_figure_that_is_promised() -> None:
    ratio = BenchRow("reports", 886.0, "an empty application", 2881.0, "/s", Hold(0.4, sense=">="))
    assert ratio.sentence == "reports: 0.308 x an empty application (886 /s / 2,881 /s), promised >= 0.4 x"
    assert BenchRow("a round", 1.5, "x", 4, "s", Hold(1.0, of="ours")).sentence == "a round: 1.5 s, promised <= 1 s"
