"""Tables that fit: whole columns or none, and the elastic ones cut."""

from rich.text import Text

from umbel.client.cli.output import Column, table_lines


def column(head: str, cell: str, worth: int, least: int | None = None) -> Column:
    return Column(head, [Text(cell)], worth, least)


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
