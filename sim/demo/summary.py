"""The demo's results: an object for programs, a table for people, and a line for each round in a file."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from umbel.aggregation.phrases import agreeing, counted
from umbel.aggregation.run.records import Fate
from umbel.sim.demo.board import Board, DemoRound, proof_lines
from umbel.sim.demo.sites import members_line


@dataclass(frozen=True, slots=True)
class DemoSummary:
    """Accuracies are shares of the held-out test set, 0 to 1. Counts and bytes are sums over all attempts."""

    accuracy: float
    pooled_accuracy: float
    local_accuracy_mean: float
    local_accuracy_min: float
    local_accuracy_max: float
    rounds: int
    attempts: int  # rounds that ended, abandoned ones included
    clients: int
    client_processes: int
    selected: int  # requests to train: reported + in_vain + dropped
    reported: int  # reports that count
    partial: int  # of these, with fewer steps than asked
    in_vain: int  # reports to attempts that were abandoned
    dropped: int  # no report in time
    lost: int  # of these, clients that fell silent
    bytes_up: int
    bytes_down: int
    wall_s: float  # of the whole demo, its start-up included
    seed: int
    model_sha256: str
    coordinator_kills: int
    chain: int  # audit bundles that were verified
    replayed: str  # the model hash of the replayed last round; empty where updates were masked
    members_sha256: str  # of the member list that every clinic has pinned; empty where updates were not masked


def summarize(board: Board, wall_s: float) -> DemoSummary:
    """Raises `ValueError` if no round was committed, or baselines or proof are missing."""
    last = next((ended for ended in reversed(board.rounds) if ended.score is not None), None)
    baselines, proof = board.baselines, board.proof
    if last is None or last.score is None or last.record.model_sha256 is None:
        raise ValueError("no round was committed, so there is no result to summarize")
    if baselines is None or proof is None:
        raise ValueError("the baselines or the proof are missing")
    every = [ended.record for ended in board.rounds]
    committed = [record for record in every if record.committed]
    reported = sum(record.reported for record in committed)
    return DemoSummary(
        accuracy=last.score.accuracy,
        pooled_accuracy=baselines.pooled,
        local_accuracy_mean=baselines.alone_mean,
        local_accuracy_min=min(baselines.alone),
        local_accuracy_max=max(baselines.alone),
        rounds=len(committed),
        attempts=len(every),
        clients=len(board.plan.clients),
        client_processes=len(board.plan.processes),
        selected=sum(record.selected for record in every),
        reported=reported,
        partial=sum(record.partial for record in committed),
        in_vain=sum(record.reported for record in every) - reported,
        dropped=sum(record.dropped for record in every),
        lost=sum(client.fate is Fate.LOST for record in every for client in record.clients),
        bytes_up=sum(record.bytes_up for record in every),
        bytes_down=sum(record.bytes_down for record in every),
        wall_s=wall_s,
        seed=board.plan.seed,
        model_sha256=last.record.model_sha256,
        coordinator_kills=int(board.coordinator_killed_in is not None),
        chain=proof.bundles,
        replayed=proof.model_sha256,
        members_sha256=board.members_sha256,
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
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim")
    facts.add_column()
    again = summary.attempts - summary.rounds
    facts.add_row("  rounds", f"{summary.rounds}" + (f", and {counted(again, 'abandoned attempt')}" if again else ""))
    facts.add_row("  clients", f"{summary.clients} in {summary.client_processes} processes, over HTTP on loopback")
    facts.add_row("  asked", counted(summary.selected, "time"))
    facts.add_row("    counted", f"{counted(summary.reported, 'report')}, {summary.partial} of them with partial work")
    facts.add_row("    no report", f"{summary.dropped}: {summary.lost} lost, the others told to stop or too late")
    if again:
        facts.add_row(
            "    discarded",
            f"{counted(summary.in_vain, 'report')} of the abandoned {agreeing(again, 'attempt', 'attempts')}",
        )
    facts.add_row("  on the wire", f"{si_bytes(summary.bytes_down)} down, {si_bytes(summary.bytes_up)} up")
    if summary.coordinator_kills:
        facts.add_row("  coordinator", "killed once in mid-round; no accepted report was lost")
    if not summary.replayed:
        secure = "every update was masked: the coordinator learnt only the sum, and no single clinic's update"
        facts.add_row("  secure", secure, style="green")
    if summary.members_sha256:
        facts.add_row("  members", members_line(summary.clients, summary.members_sha256), style="green")
    proof = proof_lines(summary.chain, summary.rounds, summary.replayed)
    for label, line in zip(("  audit", "  replay"), proof, strict=True):
        facts.add_row(label, line, style="green")
    facts.add_row("  took", f"{summary.wall_s:.0f} s")
    facts.add_row("  model", summary.model_sha256)
    return facts


def si_bytes(n_bytes: int) -> str:
    """Bytes for people: powers of ten, three digits."""
    size = float(n_bytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
