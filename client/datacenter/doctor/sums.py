"""The time of a sum of the model's size by each algorithm: predicted by the cost models, and measured."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from umbel.aggregation.collective.cost_models import (
    COST_MODELS,
    LinkModel,
    double_tree_pieces,
    parameter_server,
    ring,
    two_level,
)
from umbel.client.datacenter.doctor.algorithms import Algorithm, algorithms, all_reduce
from umbel.client.datacenter.doctor.links import RankNetwork, seconds, sized
from umbel.client.datacenter.doctor.timing import agreed_time, time_of
from umbel.client.datacenter.ranks.group import Group
from umbel.client.findings import ClientFinding, passed

USUAL_BYTES = 4 << 20  # without a model
_SERVER_S_MAX, _BUDGET_S = 3.0, 1.5  # of one sum by a parameter server, the slowest; of all sums of one algorithm
_EXPLAINED = 2.0  # times the predicted seconds, or their half: further off, the cost model does not hold
_ADDED_VALUES = 1 << 20


@dataclass(frozen=True, slots=True)
class SumTime:
    """Seconds of one sum."""

    algorithm: str
    predicted_s: float  # with the latency and bandwidth of single messages
    fitted_s: float  # with the latency and bandwidth that are fitted to all-reduces of many lengths
    measured_s: float | None = None  # None: this algorithm was not tried

    @property
    def ratio(self) -> float | None:
        """The measured time as a multiple of the predicted one."""
        return None if self.measured_s is None else self.measured_s / self.predicted_s


@dataclass(frozen=True, slots=True)
class SumTimes:
    """Of sums of `n_bytes` over all ranks, by algorithm."""

    n_bytes: int
    times: tuple[SumTime, ...]


def measured_sums(group: Group, network: RankNetwork, hosts: Sequence[str], n_bytes: int) -> SumTimes | None:
    """Predict and measure. Returns the same on every rank; None for one rank.

    `hosts`: of each rank. If a sum of `n_bytes` would take long, shorter ones are measured, as the result says.
    """
    inside, between = network.usual(inside=True), network.usual(inside=False)
    link = between or inside
    if link is None or network.of_sums is None:
        return None
    adds = _adds_bytes_per_s(group)
    link, of_sums = replace(link, adds_bytes_per_s=adds), replace(network.of_sums, adds_bytes_per_s=adds)
    n_bytes = length_to_try(n_bytes, group.size, link)
    found = [SumTime("all_reduce", *(ring(n_bytes, group.size, one) for one in (link, of_sums)))]
    found += [
        SumTime(name, *(model(n_bytes, group.size, one) for one in (link, of_sums)))
        for name, model in COST_MODELS.items()
    ]
    if (levels := _levels(hosts)) is not None and inside is not None:
        inside = replace(inside, adds_bytes_per_s=adds)
        found.append(SumTime("two-level", *(two_level(n_bytes, *levels, inside, one) for one in (link, of_sums))))
    tried = {"all_reduce": all_reduce, **algorithms(hosts, double_tree_pieces(n_bytes, group.size, link))}
    found = [replace(one, measured_s=_measured(group, tried.get(one.algorithm), n_bytes)) for one in found]
    return SumTimes(n_bytes, tuple(found))


def length_to_try(n_bytes: int, n_ranks: int, link: LinkModel) -> int:
    """The bytes of a vector of `n_bytes`, in whole values, with which no algorithm takes more than seconds."""
    share = min(1.0, _SERVER_S_MAX / parameter_server(n_bytes, n_ranks, link))
    return 4 * max(n_ranks, int(n_bytes * share) // 4)


def findings_of(sums: SumTimes) -> Iterator[ClientFinding]:
    """A line for each measured algorithm, and one for those that were only predicted."""
    untried = list[str]()
    for one in sums.times:
        if one.measured_s is None or one.ratio is None:
            untried.append(f"{one.algorithm} {seconds(one.predicted_s)}")
        else:
            said = f"{sized(sums.n_bytes)} by {one.algorithm}: predicted {seconds(one.predicted_s)} (fitted "
            said += f"{seconds(one.fitted_s)}), measured {seconds(one.measured_s)}, {one.ratio:.2f} x"
            if not 1 / _EXPLAINED < one.ratio < _EXPLAINED:
                said += ". The measured links do not explain this time: ranks may wait for processors or other work"
            yield passed("sum times", said)
    if untried:
        yield passed("sum times", f"{sized(sums.n_bytes)}, predicted only: {', '.join(untried)}")


def _measured(group: Group, algorithm: Algorithm | None, n_bytes: int) -> float | None:
    """Seconds of a sum by this algorithm; None without one."""
    if algorithm is None:
        return None
    values = torch.zeros(n_bytes // 4, device=group.wire)
    is_apart = algorithm is not all_reduce
    return time_of(group, lambda: algorithm(values, group.process_group), _BUDGET_S, apart=is_apart)


def _adds_bytes_per_s(group: Group) -> float:
    """How fast the slowest rank adds two vectors."""
    values = torch.zeros(_ADDED_VALUES, device=group.wire)
    other = torch.ones_like(values)
    took = time_of(group, lambda: values.add_(other), 0.1)
    return 4 * _ADDED_VALUES / agreed_time(group, took)


def _levels(hosts: Sequence[str]) -> tuple[int, int] | None:
    """The number of hosts and of ranks on each; None unless there are several of both."""
    n_hosts = len(set(hosts))
    n_on_host = max(map(hosts.count, hosts))
    return (n_hosts, n_on_host) if n_hosts > 1 and n_on_host > 1 else None
