"""What became of everyone who was asked, over all attempts: each request is counted once, in one of three ways."""

from collections.abc import Iterable
from dataclasses import dataclass

from umbel.aggregation.run.records import Fate, RoundRecord


@dataclass(frozen=True, slots=True)
class Tally:
    """`asked` = `reported` + `in_vain` + `dropped`.

    `reported`: and the report counts, `partial` of them with fewer steps; `in_vain`: reports of attempts that were
    abandoned; `dropped`: no report in time, `lost` of them because they fell silent. Bytes are of all attempts.
    """

    rounds: int
    abandoned: int
    asked: int
    reported: int
    partial: int
    in_vain: int
    dropped: int
    lost: int
    bytes_down: int
    bytes_up: int


def tally(records: Iterable[RoundRecord]) -> Tally:
    """Count attempts, committed and abandoned."""
    every = list(records)
    committed = [record for record in every if record.committed]
    reports = sum(record.reported for record in every)
    counted = sum(record.reported for record in committed)
    return Tally(
        rounds=len(committed),
        abandoned=len(every) - len(committed),
        asked=sum(record.selected for record in every),
        reported=counted,
        partial=sum(record.partial for record in committed),
        in_vain=reports - counted,
        dropped=sum(record.dropped for record in every),
        lost=sum(client.fate is Fate.LOST for record in every for client in record.clients),
        bytes_down=sum(record.bytes_down for record in every),
        bytes_up=sum(record.bytes_up for record in every),
    )
