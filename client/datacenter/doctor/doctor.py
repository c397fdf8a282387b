"""`umbel doctor --distributed` on one rank: the checks in their order, of which rank 0 prints the findings."""

from dataclasses import dataclass

from umbel.client.datacenter.doctor import facts, links, sums
from umbel.client.datacenter.doctor.facts import RankFacts
from umbel.client.datacenter.doctor.links import Network
from umbel.client.datacenter.doctor.sums import USUAL_BYTES, SumTimes
from umbel.client.datacenter.group import Group, joined
from umbel.client.findings import ClientCheck, ClientFinding

_PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class GroupCheck:
    """What was found, and the numbers behind it."""

    findings: tuple[ClientFinding, ...]
    ranks: tuple[RankFacts, ...]
    network: Network
    sums: SumTimes | None  # None for one rank

    @property
    def wrong(self) -> tuple[ClientFinding, ...]:
        """What must be corrected."""
        return ClientCheck(self.findings).wrong


def check_group() -> tuple[GroupCheck, bool]:
    """Check the ranks of this job and their network. Returns what was found, and whether this is rank 0.

    Raises `GroupError` if the ranks cannot work together.
    """
    with joined(timeout_s=_PATIENCE_S) as group:
        found = checked(group)
        group.gather(b"")  # no rank leaves while another one still measures
        return found, group.is_first


def checked(group: Group) -> GroupCheck:
    """All checks of a group that has been joined, the same on every rank."""
    ranks = facts.facts_of_all(group)
    hosts = [one.host for one in ranks]
    network = links.measured_network(group, hosts)
    found = [*facts.findings_of(ranks), *links.findings_of(network, ranks)]
    times = sums.measured_sums(group, network, hosts, USUAL_BYTES)
    if times is not None:
        found += sums.findings_of(times)
    return GroupCheck(tuple(found), tuple(ranks), network, times)
