"""A picture of a run's progress: the round under way with its clients, then the rounds that ended.

A page shows all of it; a screen shows the newest part that fits.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from umbel.aggregation.phrases import counted
from umbel.aggregation.run.records import ClientRecord, Fate, LiveRound, RoundRecord, RunView, TurnedAway
from umbel.aggregation.trust.public_keys import short_groups
from umbel.client.cli.output import Column, left_out_words, table_lines
from umbel.client.cli.view_rounds import (
    LEGEND,
    Notes,
    absent_words,
    away_words,
    client_columns,
    if_known,
    lean_words,
    left_words,
    name_of,
    quantile_columns,
    round_columns,
)
from umbel.client.errors import printable

ENDED_SHOWN = 50
CLIENTS_SHOWN = 20
_ROWS_SHOWN = 10  # ended rounds on a screen
_PROSE_LINES_MAX = 3  # lines of one sentence on a screen
_ENDED_LINES_MIN = 5  # of the table of ended rounds, with its heads, that a screen shows beside many clients
_STYLES = {
    Fate.TRAINING: "cyan",
    Fate.ACCEPTED: "green",
    Fate.PARTIAL: "yellow",
    Fate.RELEASED: "dim",
    Fate.DECLINED: "magenta",
    Fate.LOST: "red",
    Fate.UNFIT: "red",
}
_AT_WORK_FIRST = (Fate.TRAINING, Fate.DECLINED, Fate.LOST, Fate.UNFIT, Fate.PARTIAL, Fate.ACCEPTED, Fate.RELEASED)


@dataclass(frozen=True, slots=True)
class RunPicture:
    run: RunView
    ended: Sequence[RoundRecord]
    live: LiveRound | None
    turned_away: Sequence[TurnedAway] = ()
    fits_screen: bool = False  # draw no more lines than the console has
    table_width: int | None = None  # of a page's tables; None: the console's width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        pen = _Pen(console, options.max_width)
        lines = self._screen(pen, console.height - 1) if self.fits_screen else self._page(pen)
        yield Text("\n", no_wrap=True).join(lines)

    def _page(self, pen: "_Pen") -> list[Text]:
        newest, notes = self.ended[-ENDED_SHOWN:], Notes()
        width = self.table_width or pen.width
        lines = pen.prose(_headline(self.run), *_terms(self.run))
        if self.live is not None:
            table = _client_lines(self.live.clients, width, CLIENTS_SHOWN)
            lines += pen.prose(*_live_words(self.live)) + table
            if (declined := notes.on_declined(self.live, table)) is not None:
                lines += pen.prose(declined)
        lines += pen.prose(*map(_away, self.turned_away))
        if newest:
            columns = round_columns(newest, self.ended)
            lines += table_lines(columns, width)
            lines += pen.prose(*_left_out(columns, width))
            lines += pen.prose(*_notes_on(self._with_notes(newest), notes))
            lines += _quantiles_of_newest(newest, width, pen)
            lines += _clients_of_newest(newest, self.ended, width, pen)
        if (lean := lean_words(self.ended)) is not None:
            lines += pen.prose(lean)
        if any(record.evaluation for record in newest):
            lines += pen.prose(Text(LEGEND, "dim"))
        if n_older := len(self.ended) - len(newest):
            older = counted(n_older, "older attempt is", "older attempts are")
            lines += pen.prose(Text(f"{older} not shown here; --json shows all of them", "dim"))
        return lines

    def _with_notes(self, newest: Sequence[RoundRecord]) -> Sequence[RoundRecord]:
        """The rounds to write notes on: the newest, and every canary."""
        older = self.ended[: len(self.ended) - len(newest)]
        return (*(record for record in older if record.task.tries_clients), *newest)

    def _screen(self, pen: "_Pen", height: int) -> list[Text]:
        lines = pen.prose(_headline(self.run), lines_max=_PROSE_LINES_MAX)
        n_heads = 2 if any(one.metrics or one.evaluation for one in self.ended[-_ROWS_SHOWN:]) else 1
        n_ended = min(len(self.ended) + n_heads, _ENDED_LINES_MIN) if self.ended else 0
        if self.live is not None:
            lines += pen.prose(*_live_words(self.live), lines_max=_PROSE_LINES_MAX)
            room = height - len(lines) - n_ended
            lines += _client_lines(self.live.clients, pen.width, min(room - 1, CLIENTS_SHOWN))
        away = pen.prose(*map(_away, self.turned_away), lines_max=_PROSE_LINES_MAX)
        lines += away[: max(0, height - len(lines) - n_ended)]
        if self.ended and (n_rows := min(height - len(lines) - n_heads, _ROWS_SHOWN)) > 0:
            lines += table_lines(round_columns(self.ended[-n_rows:], self.ended), pen.width)
            if (lean := lean_words(self.ended)) is not None:
                lines += pen.prose(lean, lines_max=_PROSE_LINES_MAX)[: max(0, height - len(lines))]
            lines += self._newest_notes(pen, height - len(lines))
        return lines[:height]

    def _newest_notes(self, pen: "_Pen", room: int) -> list[Text]:
        """The notes on the newest rounds that fit, oldest round first. Notes on a single round are cut to fit."""
        noted, fitting = list[RoundRecord](), list[Text]()
        for record in reversed(self.ended):
            if Notes().on(record) is None:
                continue
            noted.insert(0, record)
            lines = pen.prose(*_notes_on(noted, Notes()))  # the oldest round has the whole reasons
            if len(lines) > room:
                break
            fitting = lines
        return (
            fitting if fitting or not noted or room < 1 else pen.prose(*_notes_on(noted[-1:], Notes()), lines_max=room)
        )


@dataclass(frozen=True, slots=True)
class _Pen:
    """Writes sentences in lines of at most `width` characters."""

    console: Console
    width: int

    def prose(self, *sentences: Text, lines_max: int | None = None) -> list[Text]:
        """Wrap the sentences; one that needs more than `lines_max` lines ends in an ellipsis."""
        return [line for sentence in sentences for line in self._wrapped(sentence, lines_max)]

    def _wrapped(self, sentence: Text, lines_max: int | None) -> list[Text]:
        lines = list(sentence.wrap(self.console, self.width))
        if lines_max is None or len(lines) <= lines_max:
            return lines
        last = lines[lines_max - 1]
        last.truncate(self.width - 1)
        return [*lines[: lines_max - 1], last.append("…")]


def _headline(run: RunView) -> Text:
    line = Text.assemble(
        (printable(run.name), "bold"),
        f"  {run.rounds_done} of {counted(run.rounds_planned, 'round')}  ",
        run.status.value,
    )
    return line.append(f"  {printable(run.reason)}", "dim") if run.reason else line


def _notes_on(records: Sequence[RoundRecord], notes: Notes) -> list[Text]:
    return [text for record in records if (text := notes.on(record)) is not None]


def _quantiles_of_newest(records: Sequence[RoundRecord], width: int, pen: _Pen) -> list[Text]:
    """How metrics differ between clients, in the newest round of which this is known."""
    for record in reversed(records):
        if columns := quantile_columns(record):
            head = Text(f"{name_of(record)}, from client to client:")
            return [head, *table_lines(columns, width), *pen.prose(*_left_out(columns, width))]
    return []


def _clients_of_newest(
    records: Sequence[RoundRecord], of_run: Sequence[RoundRecord], width: int, pen: _Pen
) -> list[Text]:
    """The clients' own metrics in the newest round that keeps them."""
    for record in reversed(records):
        if columns := client_columns(record, of_run):
            head = Text(f"{name_of(record)}, each client's own values:")
            return [head, *table_lines(columns, width), *pen.prose(*_left_out(columns, width))]
    return []


def _left_out(columns: Sequence[Column], width: int) -> list[Text]:
    return [] if (words := left_out_words(columns, width)) is None else [words]


def _terms(run: RunView) -> Iterator[Text]:
    """The run's privacy cost, member list and audit head."""
    if run.privacy is not None:
        yield Text(f"privacy: {run.privacy.words}")
    if run.members_sha256:
        yield Text(f"member list {printable(short_groups(run.members_sha256))} … (--json shows the whole hash)", "dim")
    if run.audit_head:
        yield Text(f"audit head {printable(run.audit_head)}", "dim")


def _live_words(live: LiveRound) -> list[Text]:
    line = Text(f"{name_of(live)}: {printable(live.phase)}{left_words(live)}").append(f"  {printable(live.why)}", "dim")
    return [line, Text(absent_words(live.absent), "yellow")] if live.absent and live.absent.clients else [line]


def _away(one: TurnedAway) -> Text:
    return Text(away_words(one), "magenta")


def _client_lines(clients: Sequence[ClientRecord], width: int, n_max: int) -> list[Text]:
    """One row for each client. Beyond `n_max` rows, clients at work come first and the others are counted."""
    if not clients or n_max < 1:
        return []
    if len(clients) <= n_max:
        return _client_table(clients, width)
    in_order = sorted(clients, key=lambda one: (_AT_WORK_FIRST.index(one.fate), one.client))
    rest = Counter(client.fate.value for client in in_order[n_max - 1 :])
    counts = Text("… " + ", ".join(f"{count} {fate}" for fate, count in sorted(rest.items())))
    counts.truncate(width, overflow="ellipsis")
    return [*(_client_table(in_order[: n_max - 1], width) if n_max > 1 else []), counts]


def _client_table(clients: Sequence[ClientRecord], width: int) -> list[Text]:
    steps = [f"{one.steps_done} of {one.steps_planned}" if one.steps_planned else "" for one in clients]
    columns = [
        Column("client", 50, [printable(one.client) for one in clients], least=16),
        Column("state", 40, [Text(one.fate.value, _STYLES[one.fate]) for one in clients]),
        Column("steps", 20, steps),
        *if_known(Column("samples", 10, [str(one.sample_count or "") for one in clients])),
        Column("", 30, [printable(one.reason) for one in clients], least=20),
    ]
    return table_lines(columns, width)
