"""The beginning of a group's run: the ranks agree on what they run, and on the model and the round to begin with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter
from torch import Tensor

from umbel.aggregation.model.artifact import decode_model, encode_model
from umbel.aggregation.model.kinds import require_fitting, require_steppable
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.optimizers.build import optimizer_of
from umbel.aggregation.phrases import counted
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.model_state import ModelState
from umbel.aggregation.run.standing import beginning
from umbel.aggregation.types import client_name
from umbel.client.app import Client
from umbel.client.datacenter.ranks.group import Group, GroupError
from umbel.client.datacenter.ranks.names import RANKS, RankNames
from umbel.client.datacenter.ranks.versions import differences, versions
from umbel.client.datacenter.train.checkpoint import GroupCheckpoint
from umbel.client.datacenter.train.rank_client import RankClient


@dataclass(frozen=True, slots=True)
class Hello:
    """What each rank says of itself before the first round."""

    run_file: str
    sample_count: int
    layout: str  # digest of the model's
    versions: Mapping[str, str]


_HELLO, _RUN_FILE = TypeAdapter(Hello), TypeAdapter(RunFile)


@dataclass(frozen=True, slots=True)
class Agreed:
    """What the ranks have agreed on. `sizes`: the sample count of each."""

    rank_client: RankClient
    layout: Layout
    sizes: Sequence[int]


def agreed(group: Group, file: RunFile, app: Client, told_to_stop: Callable[[], str | None] = lambda: None) -> Agreed:
    """Compare what the ranks are about to run. `told_to_stop`: see `RankClient`.

    Raises `GroupError` for ranks that differ in what must be the same, and for a run that a group cannot have.
    """
    require_possible(file, group.size, group.names)
    rank_client = RankClient(app, file.tensor_rules, client_name(group.rank), told_to_stop)
    layout = rank_client.shared.layout_in(file.training)
    mine = Hello(_RUN_FILE.dump_json(file).decode(), app.sample_count, layout.digest, versions())
    with group.waiting_for("the other ranks' clients"):
        hellos = [_HELLO.validate_json(one) for one in group.gather(_HELLO.dump_json(mine))]
    _require_alike(hellos, group.names)
    require_fitting(file.tensor_rules, layout, file.coarsest_step)
    require_steppable(file.aggregation, file.training, layout)
    return Agreed(rank_client, layout, [one.sample_count for one in hellos])


def first_checkpoint(
    group: Group, file: RunFile, on: Agreed, first: Mapping[str, Tensor] | None = None
) -> GroupCheckpoint:
    """Before the first round, the same on every rank. `first`: rank 0's first model; None: as its client made it."""
    own, body = on.layout.model, b""
    if group.is_first:
        if first is not None:
            own.require(first, "the file of --model")
        body = encode_model(on.rank_client.shared.shared() if first is None else first, own)
    _, state = decode_model(group.from_first(body))
    model = ModelState.first(state, on.layout, optimizer_of(*file.server_terms()))
    return GroupCheckpoint(beginning(file, model), model)


def next_checkpoint(group: Group, file: RunFile, on: Agreed, saved: bytes, own: Path) -> GroupCheckpoint:
    """Where a run goes on, the same on every rank. `saved`: rank 0's. `own`: the folder of this rank's client.

    Raises `GroupError` if the run cannot go on here.
    """
    found = GroupCheckpoint.decode(group.from_first(saved), on.layout)
    if found.standing.file != file:
        raise GroupError(
            "the run file has changed since this run began, so that its rounds would not belong together: restore it, "
            "or start another run with another folder (--out)"
        )
    if any(found.keeps) and len(found.keeps) != group.size:
        raise GroupError(
            f"the clients of this run keep something from round to round, and it began with "
            f"{counted(len(found.keeps), group.names.noun)}: "
            "start as many, or another run with another folder (--out)"
        )
    if any(found.keeps) and found.keeps[group.rank]:
        on.rank_client.read(own, found.standing.model.version)
    return found


def require_possible(file: RunFile, n_ranks: int, names: RankNames = RANKS) -> None:
    """Raise `GroupError` for a run file that this many ranks cannot carry out. `names`: of the ranks."""
    if file.canary is not None:
        raise GroupError("a canary tries unknown devices, and the ranks of a group are known: leave [canary] out")
    if file.privacy is not None:
        raise GroupError(
            "[privacy] protects clients from the coordinator, and inside a group nothing is masked: leave it out, or "
            "train over a coordinator"
        )
    for name, wanted in file.clients_needed():
        if wanted > n_ranks:
            raise GroupError(
                f"rounds.{name} is {wanted}, but there {_are(n_ranks, names.noun)}: set it to {n_ranks} at most, or "
                "start more ranks with torchrun --nproc-per-node"
            )


def _are(n_ranks: int, noun: str) -> str:
    return f"{'is' if n_ranks == 1 else 'are'} only {counted(n_ranks, noun)}"


def _require_alike(hellos: list[Hello], names: RankNames) -> None:
    """Raise `GroupError`, which names the ranks that differ from most others, and in what."""
    facts = [{"run file": one.run_file, "model": one.layout, **one.versions} for one in hellos]
    for one in differences(facts)[:1]:
        shown = f": {one.value}, but most have {one.usual}" if one.name in hellos[0].versions else ""
        raise GroupError(
            f"{names.of(one.rank)} has another {one.name} than the other {names.plural}{shown}; start all ranks alike"
        )
