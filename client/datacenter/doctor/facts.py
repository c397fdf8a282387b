"""What each rank says of its machine and its software, and what is wrong with that."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch.cuda import nccl

from umbel.aggregation.phrases import agreeing, counted, some
from umbel.client.datacenter.ranks.group import Group
from umbel.client.datacenter.ranks.versions import Difference, differences, versions
from umbel.client.findings import ClientFinding, passed, warned, wrong

_DRIVER = Path("/sys/module/nvidia/version")  # of Linux
NONE = "none"


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Of one rank. `device`: on which it trains. `n_gpus`, `n_processors`: of its machine that it may use."""

    host: str
    versions: Mapping[str, str]
    device: str
    n_gpus: int
    n_processors: int


_FACTS = TypeAdapter(RankFacts)


def facts_of_all(group: Group) -> list[RankFacts]:
    """The facts of all ranks, in their order."""
    mine = _FACTS.dump_json(facts_of_this_rank(group.device))
    return [_FACTS.validate_json(one) for one in group.gather(mine)]


def facts_of_this_rank(device: torch.device) -> RankFacts:
    """`device`: on which it trains."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "processor"
    own = {**versions(), "CUDA": torch.version.cuda or NONE, "NCCL": _nccl(), "GPU driver": _driver()}
    return RankFacts(socket.gethostname(), own, name, torch.cuda.device_count(), _n_processors())


def findings_of(facts: Sequence[RankFacts]) -> Iterator[ClientFinding]:
    """Whether the ranks' versions agree, and whether each rank has a device of its own."""
    found = differences([one.versions for one in facts])
    hosts = dict.fromkeys(one.host for one in facts)
    for one in found:
        advice = f"install the same {one.name} on all machines"
        yield wrong("versions", _sentence(one, facts), advice)
    if not found:
        who = f"{counted(len(facts), 'rank')} on {counted(len(hosts), 'host')} ({some([*hosts])})"
        has = agreeing(len(facts), "has", "have")
        yield passed("versions", f"{who} {has} {', '.join(f'{k} {v}' for k, v in facts[0].versions.items())}")
    for host in hosts:
        yield from _devices(host, [one for one in facts if one.host == host])
    kinds = sorted({one.device for one in facts})
    if len(kinds) > 1:
        said = f"the ranks train on different devices: {', '.join(kinds)}"
        yield warned("devices", said, "the slowest device sets the pace: give all ranks the same")


def _devices(host: str, facts: Sequence[RankFacts]) -> Iterator[ClientFinding]:
    """Whether the ranks of one host have enough devices."""
    n, first = len(facts), facts[0]
    ranks = counted(n, "rank")
    if first.device != "processor":
        yield passed("devices", f"{host}: {ranks}, each with a GPU of its own ({first.device})")
    elif first.n_gpus:
        gpus = f"{host} has {counted(first.n_gpus, 'GPU')} for {ranks}, so all ranks train on its processors"
        yield warned("devices", gpus, f"start {counted(first.n_gpus, 'rank')} there (--nproc-per-node)")
    elif first.n_processors < n:
        processors = f"{host} has {counted(first.n_processors, 'processor')} for {ranks}"
        yield warned("devices", processors, "ranks wait for each other's turn, so the times below are too long")
    else:
        yield passed("devices", f"{host}: {ranks}, {counted(first.n_processors, 'processor')}, no GPU")


def named(rank: int, facts: Sequence[RankFacts]) -> str:
    """A rank with its host."""
    return f"rank {rank} (on {facts[rank].host})"


def _sentence(one: Difference, facts: Sequence[RankFacts]) -> str:
    usual = named(one.usual_rank, facts)
    if one.n_usual > 1:
        usual += f" and {counted(one.n_usual - 1, 'other rank')}"
    have = agreeing(one.n_usual, "has", "have")
    return f"{named(one.rank, facts)} has {one.name} {one.value}, but {usual} {have} {one.usual}"


def _nccl() -> str:
    if not torch.distributed.is_nccl_available() or not torch.cuda.is_available():
        return NONE
    return ".".join(map(str, nccl.version()))


def _driver() -> str:
    try:
        return _DRIVER.read_text().strip()
    except OSError:
        return NONE


def _n_processors() -> int:
    """Those that this process may use, where the system says so."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
