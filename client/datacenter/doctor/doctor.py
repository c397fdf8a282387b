"""`umbel doctor --distributed` on one rank: the checks in their order, of which rank 0 prints the findings."""

from dataclasses import dataclass

from umbel.aggregation.run.file import RunFile
from umbel.client.app import Client
from umbel.client.datacenter.doctor import facts, job, links, sums
from umbel.client.datacenter.doctor.divided import measured_clients
from umbel.client.datacenter.doctor.facts import RankFacts
from umbel.client.datacenter.doctor.job import JobCheck, measured_job
from umbel.client.datacenter.doctor.links import RankNetwork
from umbel.client.datacenter.doctor.pipeline import have_stages, measured_stages
from umbel.client.datacenter.doctor.stages import PipelineStages, finding_of_stages
from umbel.client.datacenter.doctor.steps import NotTimed
from umbel.client.datacenter.doctor.sums import USUAL_BYTES, SumTimes
from umbel.client.datacenter.ranks.group import Group, joined
from umbel.client.datacenter.train.division import ClientRanks, divided
from umbel.client.datacenter.train.named_client import client_of
from umbel.client.findings import ClientCheck, ClientFinding

_PATIENCE_S, _JOIN_S = 600.0, 180.0


@dataclass(frozen=True, slots=True)
class GroupCheck:
    """The findings, and the measurements behind them."""

    findings: tuple[ClientFinding, ...]
    ranks: tuple[RankFacts, ...]
    network: RankNetwork
    sums: SumTimes | None  # over all ranks, or over the first ranks of clients of several; None for one rank
    job: JobCheck | None = None  # None if no job was named, and for a pipeline
    stages: PipelineStages | None = None  # of the ranks, or of the first client's; None if all have the whole model

    @property
    def wrong(self) -> tuple[ClientFinding, ...]:
        """What must be corrected."""
        return ClientCheck(self.findings).wrong


def check_group(
    file: RunFile | None = None, app: str | None = None, ranks_per_client: int = 1
) -> tuple[GroupCheck, bool]:
    """Check the ranks of this job and their network; with a run file and the name of a client also how it trains.

    `app`, `ranks_per_client`: as for `umbel train`. Returns what was found, and whether this is rank 0. Raises
    `ClientError` if the ranks cannot work together, and for a client that cannot be made.
    """
    with joined(timeout_s=_PATIENCE_S, join_s=_JOIN_S) as group:
        if file is None or app is None:
            found = checked(group)
        elif ranks_per_client == 1:
            found = checked(group, file, client_of(app, group.rank, group.size, file.seed))
        else:
            ranks = divided(group, ranks_per_client, _PATIENCE_S)
            client = client_of(app, ranks.number, ranks.n_clients, file.seed, ranks.mesh)
            found = checked_clients(group, file, client, ranks)
        group.gather(b"")  # no rank leaves while another one still measures
        return found, group.is_first


def checked_clients(group: Group, file: RunFile, client: Client, ranks: ClientRanks) -> GroupCheck:
    """The same checks where clients have several ranks. What is found of the job is complete on first ranks alone.
    `client`: of this rank.
    """
    facts_of_ranks = facts.facts_of_all(group)
    hosts = [one.host for one in facts_of_ranks]
    found = [*facts.findings_of(facts_of_ranks)]
    network = links.measured_network(group, hosts)
    found += links.findings_of(network, facts_of_ranks)
    of_job = measured_clients(ranks, file, client, hosts)
    if of_job is None:
        return GroupCheck(tuple(found), tuple(facts_of_ranks), network, None)
    if of_job.sums is not None:
        found += sums.findings_of(of_job.sums)
    if of_job.failed is not None:
        found.append(job.finding_of_failure(of_job.failed))
    if of_job.job is not None:
        found += job.findings_of(of_job.job, facts_of_ranks)
    if of_job.stages is not None:
        of_client = facts_of_ranks[ranks.number * ranks.own.size :][: ranks.own.size]
        found.append(finding_of_stages(of_job.stages, of_client))
    return GroupCheck(tuple(found), tuple(facts_of_ranks), network, of_job.sums, of_job.job, of_job.stages)


def checked(group: Group, file: RunFile | None = None, client: Client | None = None) -> GroupCheck:
    """All checks of a group that has been joined, the same on every rank. `client`: of this rank; trained by `file`."""
    ranks = facts.facts_of_all(group)
    hosts = [one.host for one in ranks]
    found = [*facts.findings_of(ranks)]
    network = links.measured_network(group, hosts)
    found += links.findings_of(network, ranks)
    own, stages, of_own = None, None, list[ClientFinding]()
    if file is not None and client is not None:
        try:
            if have_stages(group, client):
                stages = measured_stages(group, file, client)
                of_own.append(finding_of_stages(stages, ranks))
            else:
                own = measured_job(group, file, client, hosts.count(hosts[group.rank]))
                of_own += job.findings_of(own, ranks)
        except NotTimed as error:
            of_own.append(job.finding_of_failure(error))
    times = sums.measured_sums(group, network, hosts, USUAL_BYTES if own is None else 4 * own.n_values)
    if times is not None:
        found += sums.findings_of(times)
    return GroupCheck((*found, *of_own), tuple(ranks), network, times, own, stages)
