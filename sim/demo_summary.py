"""What the demo ends with: one object for programs, one table for people, one line a round in a file."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from umbel.aggregation.records import Fate
from umbel.sim.demo_baselines import Baselines
from umbel.sim.demo_board import DemoRound
from umbel.sim.demo_plan import DemoPlan
from umbel.sim.demo_view import si_bytes


@dataclass(frozen=True, slots=True)
class DemoSummary:
    """Accuracies are shares of the held-out test set, 0 to 1; counts and bytes are sums over all rounds.

    `dropped`: asked, but no report in time; `lost`: those of them that fell silent. `attempts`: rounds that ended,
    abandoned ones included. `wall_s`: the whole demo, its start-up included.
    """

    accuracy: float
    pooled_accuracy: float
    local_accuracy_mean: float
    local_accuracy_min: float
    local_accuracy_max: float
    rounds: int
    attempts: int
    clients: int
    client_processes: int
    selected: int
    reported: int
    partial: int
    dropped: int
    lost: int
    bytes_up: int
    bytes_down: int
    wall_s: float
    seed: int
    model_sha256: str


def summarize(plan: DemoPlan, rounds: list[DemoRound], baselines: Baselines, wall_s: float) -> DemoSummary:
    """Raises `ValueError` if no round was committed."""
    last = next((ended for ended in reversed(rounds) if ended.score is not None), None)
    if last is None or last.score is None or last.record.model_sha256 is None:
        raise ValueError("no round was committed, so there is nothing to sum up")
    records = [ended.record for ended in rounds]
    return DemoSummary(
        accuracy=last.score.accuracy,
        pooled_accuracy=baselines.pooled,
        local_accuracy_mean=baselines.alone_mean,
        local_accuracy_min=min(baselines.alone),
        local_accuracy_max=max(baselines.alone),
        rounds=sum(record.committed for record in records),
        attempts=len(records),
        clients=len(plan.clients),
        client_processes=len(plan.processes),
        selected=sum(record.selected for record in records),
        reported=sum(record.reported for record in records),
        partial=sum(record.partial for record in records),
        dropped=sum(record.dropped for record in records),
        lost=sum(client.fate is Fate.LOST for record in records for client in record.clients),
        bytes_up=sum(record.bytes_up for record in records),
        bytes_down=sum(record.bytes_down for record in records),
        wall_s=wall_s,
        seed=plan.seed,
        model_sha256=last.record.model_sha256,
    )


def round_line(ended: DemoRound) -> str:
    """One line of `rounds.jsonl`: the coordinator's record, the measured accuracy and loss.

    The demo's clock is the wall's, so `virtual_s` equals `wall_s`.
    """
    score: dict[str, Any] = asdict(ended.score) if ended.score else {"accuracy": None, "loss": None}
    return json.dumps({**asdict(ended.record), **score, "virtual_s": ended.record.wall_s})


def table(summary: DemoSummary, out: Path) -> RenderableType:
    """The summary for people."""
    accuracy = Table(box=box.SIMPLE_HEAD, title="accuracy on held-out digits", title_justify="left")
    accuracy.add_column("trained on")
    accuracy.add_column("accuracy", justify="right")
    low, high = summary.local_accuracy_min, summary.local_accuracy_max
    accuracy.add_row("one clinic's own data, mean of all", f"{summary.local_accuracy_mean:.1%}")
    accuracy.add_row("  the worst and the best clinic", f"{low:.1%} to {high:.1%}", style="dim")
    accuracy.add_row("[bold]all clinics' data, none of which moved[/]", f"[bold green]{summary.accuracy:.1%}[/]")
    accuracy.add_row("all data in one place", f"{summary.pooled_accuracy:.1%}")
    gap = (summary.pooled_accuracy - summary.accuracy) * 100
    gain = (summary.accuracy - summary.local_accuracy_mean) * 100
    verdict = (
        f"{gain:+.1f} points over a clinic alone, {abs(gap):.1f} {'short of' if gap >= 0 else 'above'} pooled data"
    )
    return Group(accuracy, Text(f"  {verdict}\n"), _facts(summary), Text(f"  {out / 'curves.png'}", style="bold"))


def _facts(summary: DemoSummary) -> Table:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    again = summary.attempts - summary.rounds
    facts.add_row("  rounds", f"{summary.rounds}" + (f", and {again} abandoned attempts" if again else ""))
    facts.add_row("  clients", f"{summary.clients} in {summary.client_processes} processes, over HTTP on loopback")
    facts.add_row(
        "  asked", f"{summary.selected} times; {summary.reported} reported, {summary.partial} of them in part"
    )
    facts.add_row("  not used", f"{summary.dropped}: told to stop, too late, or lost ({summary.lost})")
    facts.add_row("  on the wire", f"{si_bytes(summary.bytes_down)} down, {si_bytes(summary.bytes_up)} up")
    facts.add_row("  took", f"{summary.wall_s:.0f} s")
    facts.add_row("  model", summary.model_sha256)
    return facts
