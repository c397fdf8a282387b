"""`umbel doctor --distributed` on one rank: the checks in their order, of which rank 0 prints the findings."""

from dataclasses import dataclass

from umbel.aggregation.run.file import RunFile
from umbel.client.app import Client
from umbel.client.datacenter.doctor import facts, job, links, sums
from umbel.client.datacenter.doctor.facts import RankFacts
from umbel.client.datacenter.doctor.job import JobCheck, measured_job
from umbel.client.datacenter.doctor.links import Network
from umbel.client.datacenter.doctor.steps import NotTimed
from umbel.client.datacenter.doctor.sums import USUAL_BYTES, SumTimes
from umbel.client.datacenter.ranks.group import Group, joined
from umbel.client.datacenter.train.train import client_of_rank
from umbel.client.findings import ClientCheck, ClientFinding

_PATIENCE_S, _JOIN_S = 600.0, 180.0


@dataclass(frozen=True, slots=True)
class GroupCheck:
    """What was found, and the numbers behind it."""

    findings: tuple[ClientFinding, ...]
    ranks: tuple[RankFacts, ...]
    network: Network
    sums: SumTimes | None  # None for one rank
    job: JobCheck | None = None  # None if no job was named

    @property
    def wrong(self) -> tuple[ClientFinding, ...]:
        """What must be corrected."""
        return ClientCheck(self.findings).wrong


def check_group(file: RunFile | None = None, app: str | None = None) -> tuple[GroupCheck, bool]:
    """Check the ranks of this job and their network; with a run file and the name of a client also how it trains.

    `app`: as for `umbel train`. Returns what was found, and whether this is rank 0. Raises `ClientError` if the ranks
    cannot work together, and for a client that cannot be made.
    """
    with joined(timeout_s=_PATIENCE_S, join_s=_JOIN_S) as group:
        client = None if file is None or app is None else client_of_rank(app, group, file.seed)
        found = checked(group, file, client)
        group.gather(b"")  # no rank leaves while another one still measures
        return found, group.is_first


def checked(group: Group, file: RunFile | None = None, client: Client | None = None) -> GroupCheck:
    """All checks of a group that has been joined, the same on every rank. `client`: of this rank; trained by `file`."""
    ranks = facts.facts_of_all(group)
    hosts = [one.host for one in ranks]
    found = [*facts.findings_of(ranks)]
    network = links.measured_network(group, hosts)
    found += links.findings_of(network, ranks)
    own, of_own = None, list[ClientFinding]()
    if file is not None and client is not None:
        try:
            own = measured_job(group, file, client, hosts.count(hosts[group.rank]))
            of_own += job.findings_of(own, ranks)
        except NotTimed as error:
            of_own.append(job.finding_of_failure(error))
    times = sums.measured_sums(group, network, hosts, USUAL_BYTES if own is None else 4 * own.n_values)
    if times is not None:
        found += sums.findings_of(times)
    return GroupCheck((*found, *of_own), tuple(ranks), network, times, own)
