"""How much coordinator a fleet needs: measured costs, multiplied out. `docs/explanation/scale.md` explains it.

A fleet of N devices a day comes and goes with the day: at the busiest moment `peak` times as many check in as on
average. Pace steering spreads check-ins evenly over whoever is there, and lets each device come `check_ins_a_day`
times. Rounds ask `cohort` devices each, and begin every `round_every_s`.
"""

import math
from dataclasses import dataclass

DAY_S = 86_400.0
BUSY = 0.6  # of a core or a link: beyond it, waiting times grow faster than the load


@dataclass(frozen=True, slots=True)
class Costs:
    """What single things cost on the machine where they were measured. CPU seconds are of one core of a replica.

    `check_in_cpu_s`: a signed check-in without work, its rows included; `request_cpu_s`: any other signed request;
    `report_cpu_s`: what a report costs beyond its requests (the step of the round); `update_bytes_per_cpu_s`: take in,
    hash, check and fold; `model_bytes_per_cpu_s`: hand out, when models pass through the coordinator.
    `*_rows`: rows written; `*_row_bytes`: bytes that a row and its index entries take; `rows_per_s`: what one
    PostgreSQL primary writes with its commits synced.
    """

    check_in_cpu_s: float
    request_cpu_s: float
    report_cpu_s: float
    update_bytes_per_cpu_s: float
    model_bytes_per_cpu_s: float
    rows_per_s: float
    check_in_rows: float = 2.1  # a nonce, a waiter, and now and then when the client was heard of
    request_rows: float = 1.0  # a nonce
    assignment_rows: float = 7.0  # the assignment three times, the upload twice, a chunk twice
    waiter_bytes: float = 230.0
    nonce_bytes: float = 190.0
    client_bytes: float = 420.0
    assignment_bytes: float = 3000.0  # its row, its signed report, its parts of the record and of the audit bundle


MEASURED = Costs(
    check_in_cpu_s=200e-6,
    request_cpu_s=2.0e-3,
    report_cpu_s=10e-3,
    update_bytes_per_cpu_s=350e6,
    model_bytes_per_cpu_s=1.0e9,
    rows_per_s=50_000,
)
"""On two shared cores of a small virtual machine; `docs/explanation/scale.md` says how."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is asked. `model_bytes` down and `update_bytes` up for each device of a cohort; `window_s` of a round.

    `peak`: the busiest hour against the mean; `nonce_s`: how long a nonce is kept.
    """

    devices: int
    check_ins_a_day: float = 24.0
    peak: float = 2.0
    cohort: int = 300
    round_every_s: float = 300.0
    window_s: float = 600.0
    model_bytes: float = 10e6
    update_bytes: float = 10e6
    chunk_bytes: float = 4e6
    links: bool = True
    link_bytes_per_s: float = 1.25e9
    nonce_s: float = 600.0
    days_kept: float = 30.0

    @property
    def check_ins_per_s(self) -> float:
        """At the busiest moment."""
        return self.devices * self.check_ins_a_day / DAY_S * self.peak

    @property
    def reports_per_s(self) -> float:
        return self.cohort / self.round_every_s

    @property
    def requests_per_report(self) -> float:
        """Beside the check-in: the model, a look at the round every 25 s, the chunks, the report."""
        return 2 + self.window_s / 2 / 25 + math.ceil(self.update_bytes / self.chunk_bytes)


@dataclass(frozen=True, slots=True)
class Need:
    """What a fleet needs at its busiest moment. Shares are of one core, one link, one database primary."""

    check_ins_per_s: float
    reports_per_s: float
    cpu_cores: float
    links: float
    rows_per_s: float
    database_share: float
    database_bytes: float
    replicas: int
    saturates_first: str


def need(fleet: Fleet, costs: Costs) -> Need:
    """Multiply out."""
    check_ins, reports = fleet.check_ins_per_s, fleet.reports_per_s
    requests = reports * fleet.requests_per_report
    model_bytes = 0.0 if fleet.links else reports * fleet.model_bytes
    update_bytes = reports * fleet.update_bytes
    cores = (
        check_ins * costs.check_in_cpu_s
        + requests * costs.request_cpu_s
        + reports * costs.report_cpu_s
        + update_bytes / costs.update_bytes_per_cpu_s
        + model_bytes / costs.model_bytes_per_cpu_s
    )
    links = (model_bytes + update_bytes) / fleet.link_bytes_per_s
    rows = check_ins * costs.check_in_rows + requests * costs.request_rows + reports * costs.assignment_rows
    stored = (
        fleet.devices * (costs.client_bytes + costs.waiter_bytes)
        + (check_ins + requests) * fleet.nonce_s * costs.nonce_bytes
        + reports * DAY_S * fleet.days_kept * costs.assignment_bytes
    )
    by_cpu = cores / BUSY  # a replica is one process, and Python runs on one core at a time
    replicas = max(math.ceil(by_cpu), math.ceil(links / BUSY), 1) + 1  # one may die
    shares = {
        "the replicas' processors": by_cpu / replicas,
        "the replicas' links": links / BUSY / replicas,
        "the database's writes": rows / costs.rows_per_s / BUSY,
    }
    return Need(
        check_ins_per_s=check_ins,
        reports_per_s=reports,
        cpu_cores=cores,
        links=links,
        rows_per_s=rows,
        database_share=rows / costs.rows_per_s,
        database_bytes=stored,
        replicas=replicas,
        saturates_first=max(shares, key=lambda name: shares[name]),
    )
