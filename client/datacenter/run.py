"""A run of a group from its beginning: the ranks agree on what they run, and begin with the model of rank 0."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import TypeAdapter
from torch import Tensor

import umbel
from umbel.aggregation.model.artifact import decode_model, encode_model
from umbel.aggregation.model.kinds import require_fitting, require_steppable
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.optimizers.build import optimizer_of
from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.round import Weighting
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.model_state import ModelState
from umbel.aggregation.run.standing import beginning
from umbel.aggregation.types import client_name
from umbel.client.app import Client
from umbel.client.datacenter.federation import GroupFederation
from umbel.client.datacenter.group import Group, GroupError
from umbel.client.datacenter.member import Member


@dataclass(frozen=True, slots=True)
class Hello:
    """What each rank says of itself before the first round."""

    run_file: str
    sample_count: int
    layout: str  # digest of the model's
    versions: Mapping[str, str]


_HELLO = TypeAdapter(Hello)


def begun(
    group: Group, text: str, file: RunFile, app: Client, first: Mapping[str, Tensor] | None = None
) -> GroupFederation:
    """The run of this file on these ranks. `text`: the file's. `first`: rank 0's first model; None: as its client made
    it. Raises `GroupError` for ranks that differ in what must be the same, and for a run that a group cannot have.
    """
    require_possible(file, group.size)
    member = Member(app, file.tensor_rules, client_name(group.rank))
    layout = member.shared.layout_in(file.training)
    mine = Hello(text, app.sample_count, layout.digest, _versions())
    hellos = [_HELLO.validate_json(one) for one in group.gather(_HELLO.dump_json(mine))]
    _require_alike(hellos)
    require_fitting(file.tensor_rules, layout, file.coarsest_step)
    require_steppable(file.aggregation, file.training, layout)
    state = _from_first(group, member.shared.shared() if first is None else first, layout.model)
    model = ModelState.first(state, layout, optimizer_of(*file.server_terms()))
    return GroupFederation(group, member, [one.sample_count for one in hellos], beginning(file, model), model)


def require_possible(file: RunFile, n_ranks: int) -> None:
    """Raise `GroupError` for a run file that this many ranks cannot carry out."""
    if file.canary is not None:
        raise GroupError("a canary tries unknown devices, and the ranks of a group are known: leave [canary] out")
    if file.privacy is not None:
        raise GroupError(
            "[privacy] protects clients from the coordinator, and inside a group nothing is masked: leave it out, or "
            "train over a coordinator"
        )
    for number in file.rounds_of_change():
        rounds = file.rounds_of(number)
        counts_clients = rounds.weighting is Weighting.SAMPLES  # else the target counts draws
        for name, wanted in (("target", rounds.target if counts_clients else 1), ("minimum", rounds.minimum)):
            if wanted > n_ranks:
                raise GroupError(
                    f"rounds.{name} is {wanted}, but there {_are(n_ranks)}: set it to {n_ranks} at most, or start more "
                    "ranks with torchrun --nproc-per-node"
                )


def _are(n_ranks: int) -> str:
    return f"{'is' if n_ranks == 1 else 'are'} only {counted(n_ranks, 'rank')}"


def _versions() -> dict[str, str]:
    return {"umbel": umbel.__version__, "Python": platform.python_version(), "torch": str(torch.__version__)}


def _require_alike(hellos: list[Hello]) -> None:
    """Raise `GroupError`, which names the ranks that differ from most others, and in what."""
    facts = [{"run file": one.run_file, "model": one.layout, **one.versions} for one in hellos]
    for name in facts[0]:
        values = [one[name] for one in facts]
        usual = max(values, key=values.count)
        for rank, value in enumerate(values):
            if value != usual:
                shown = f": {value}, but most have {usual}" if name in hellos[0].versions else ""
                raise GroupError(f"rank {rank} has another {name} than the other ranks{shown}; start all ranks alike")


def _from_first(group: Group, state: Mapping[str, Tensor], layout: Layout) -> Mapping[str, Tensor]:
    """The state of rank 0 on every rank. `layout`: of the model."""
    _, found = decode_model(group.from_first(encode_model(state, layout) if group.is_first else b""))
    return found
