"""Hand-made records of a demo: what the coordinator would say of each of its situations."""

from dataclasses import replace

from umbel.aggregation.run.records import ClientRecord, Fate, LiveRound, RoundRecord
from umbel.sim.data.data_set import Score
from umbel.sim.demo.board import DemoRound
from umbel.sim.demo.plan import DemoPlan

MODEL_BYTES = 135_000


def client(name: str, fate: Fate, reason: str = "") -> ClientRecord:
    reports = fate in (Fate.ACCEPTED, Fate.PARTIAL)
    steps = {Fate.ACCEPTED: 28, Fate.PARTIAL: 7}.get(fate, 0)
    return ClientRecord(
        client=name,
        fate=fate,
        reason=reason,
        sample_count=100,
        steps_done=steps,
        steps_planned=28 if reports else 0,
        bytes_up=MODEL_BYTES if reports else 0,
        bytes_down=MODEL_BYTES,
        report_s=0.4 if reports else None,
        silent_s=2.3 if fate is Fate.LOST else 0.0,
    )


def clients_of_round(plan: DemoPlan, number: int) -> tuple[ClientRecord, ...]:
    """A kill in round 3, the victim away until round 10, the slow ones in part or told to stop."""
    is_down = 3 <= number < 10
    fates = dict.fromkeys((c.name for c in plan.clients), Fate.ACCEPTED)
    fates["clinic-10"] = Fate.LOST if is_down else Fate.ACCEPTED
    fates["clinic-11"] = Fate.PARTIAL if is_down else Fate.RELEASED
    fates["clinic-12"] = Fate.RELEASED
    asked = [(name, fate) for name, fate in fates.items() if not (is_down and number > 3 and name == "clinic-10")]
    return tuple(client(name, fate, "the target of 10 reports is in") for name, fate in asked)


def ended_round(plan: DemoPlan, number: int, *, committed: bool = True, attempt: int = 1) -> DemoRound:
    clients = clients_of_round(plan, number)
    reported = [c for c in clients if c.fate in (Fate.ACCEPTED, Fate.PARTIAL)]
    if not committed:  # such records call those released that had reported
        clients = tuple(replace(c, fate=Fate.RELEASED) if c in reported else c for c in clients)
    record = RoundRecord(
        run="demo",
        round=number,
        attempt=attempt,
        committed=committed,
        reason="the target of 10 reports is in",
        model_version=number,
        model_sha256=f"{number:064x}" if committed else None,
        opened_at=1000.0 + number,
        wall_s=2.5 if 3 <= number < 10 else 0.7,
        selected=len(clients),
        reported=len(reported),
        partial=sum(c.fate is Fate.PARTIAL for c in clients),
        dropped=len(clients) - len(reported),
        sample_count=1000,
        bytes_up=sum(c.bytes_up for c in clients),
        bytes_down=sum(c.bytes_down for c in clients),
        clients=clients,
    )
    return DemoRound(record, Score(1 - 0.55 * 0.8**number, 0.1) if committed else None)


def live_round(plan: DemoPlan, number: int, phase: str) -> LiveRound:
    clients = tuple(
        client(c.name, fate)
        for c, fate in zip(
            plan.clients,
            [Fate.ACCEPTED] * 6 + [Fate.TRAINING] * 3 + [Fate.LOST, Fate.PARTIAL, Fate.RELEASED],
            strict=True,
        )
    )
    training = phase == "training"
    return LiveRound(
        round=number,
        attempt=1,
        phase=phase,
        why="7 of 10 reports, 5 clients may still report",
        waiting=2,
        target=10,
        closes_in_s=1.7 if training else None,
        clients=clients if phase != "recruiting" else (),
    )
