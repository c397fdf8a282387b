"""The tensors of a silo's model: parts of them on each rank, and all of them as one module on rank 0's CPU.

A rank may hold a tensor whole (DDP), a shard of it (FSDP2, tensor parallelism), or not at all (another stage of a
pipeline). Tensors travel one by one, so no GPU ever has a copy of the whole model.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from umbel.client.datacenter.ranks.group import Group, GroupError
from umbel.client.local.bare_names import bare_name
from umbel.client.local.gradients import Projection

_DDP_PREFIX = "module."


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor of the whole model, as a rank that holds it describes it."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: str  # as torch names it, such as "float32"
    is_parameter: bool
    trains: bool  # whether it is a parameter that requires gradients
    same_as: str = ""  # the name of an earlier one, with which it shares its values

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def n_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize


class SiloTensors:
    """All ranks must make each call together."""

    def __init__(self, model: nn.Module, ranks: Group) -> None:
        """Raises `GroupError` if ranks hold tensors of the same name that differ."""
        self._model, self._ranks = model, ranks
        self._held = dict[str, HeldTensor]()
        self._owner = dict[str, int]()  # the first rank that holds it
        by_rank = [_HELD.validate_json(one) for one in ranks.gather(_description(model))]
        for rank, held in enumerate(by_rank):
            for one in held:
                known = self._held.setdefault(one.name, one)
                if known != one:
                    raise GroupError(
                        f"{ranks.names.of(rank)} has another {one.name!r} ({_kind(one)}) than "
                        f"{ranks.names.of(self._owner[one.name])} "
                        f"({_kind(known)}): all ranks need the same model, or different stages of it"
                    )
                self._owner.setdefault(one.name, rank)
        self.is_staged = any({one.name for one in held} != self._held.keys() for held in by_rank)
        """Whether some rank holds only some of the tensors."""

    def whole(self) -> nn.Module:
        """A module with the tensors of the whole model, by their names and in their order. It computes nothing."""
        root, made = nn.Module(), dict[str, Tensor]()
        for one in self._held.values():
            *path, last = one.name.split(".")
            owner = root
            for part in path:
                if part not in dict(owner.named_children()):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            tensor = made[one.same_as] if one.same_as else torch.zeros(one.shape, dtype=one.torch_dtype)
            if one.is_parameter and not isinstance(tensor, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=one.trains)
            made[one.name] = tensor
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(last, tensor)
            else:
                owner.register_buffer(last, tensor)
        return root

    @property
    def n_bytes_here(self) -> int:
        """Of this rank's tensors and shards."""
        held = _tensors_of(self._model).values()
        return sum(one.to_local().nbytes if isinstance(one, DTensor) else one.nbytes for one in held)

    @property
    def names(self) -> list[str]:
        """Of all tensors that travel: without those that share the values of another one."""
        return [name for name, one in self._held.items() if not one.same_as]

    @torch.no_grad()
    def give(self, names: Collection[str], whole: Mapping[str, Tensor]) -> None:
        """Give every rank its parts of these tensors. `whole`: on rank 0; not read on other ranks."""
        mine = _tensors_of(self._model)
        for name, tensor in self._from_first(names, whole):
            if (target := mine.get(name)) is not None:
                target.copy_(_like(tensor, target))

    def parts_of(self, names: Collection[str], whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts, by their names in its model, of float32 tensors that have names and shapes of the whole
        model's, such as control variates.

        `whole`: on rank 0; not read on other ranks.
        """
        mine = _tensors_of(self._model)
        found = self._from_first(names, whole, torch.float32)
        return {local: _like(tensor, mine[name]) for name, tensor in found if (local := self.here(name)) is not None}

    def projections(self, within: Mapping[str, Projection]) -> dict[str, Projection]:
        """By this rank's names, how its gradients are projected. `within`: by the names of the whole model."""
        return {local: _of_whole(one) for name, one in within.items() if (local := self.here(name)) is not None}

    def whole_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """The L2 norm of the whole model's gradient. `parameters`: this rank's, of whose gradients it is made. What
        several ranks hold counts once.
        """
        owners = {id(one): self._owner[bare_name(name)] for name, one in self._model.named_parameters()}
        by_owner = defaultdict[int, list[Tensor]](list)
        for one in parameters:
            if one.grad is not None:
                by_owner[owners[id(one)]].append(one.grad)
        square = torch.zeros((), dtype=torch.float64)
        for owner, gradients in sorted(by_owner.items()):
            norm = get_total_norm(gradients)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # its shards' ranks are all here
            if owner == self._ranks.rank:
                square = norm.to(square).square()
        self._ranks.add_numbers(square)
        like = next(iter(by_owner.values()), [torch.zeros(())])[0]
        return square.sqrt().to(like.device, torch.float32)

    def here(self, name: str) -> str | None:
        """The name that the tensor has in this rank's model; None if this rank has nothing of it."""
        return _names_of(self._model).get(name)

    def require_same_copies(self) -> None:
        """Raise `GroupError` if ranks have trained copies of a parameter to different values."""
        mine = _tensors_of(self._model)
        sums = {name: _sum_of_bits(one) for name, one in mine.items() if self._held[name].trains and _is_whole(one)}
        first = dict[str, int]()
        for rank, by_name in enumerate(json.loads(one) for one in self._ranks.gather(json.dumps(sums).encode())):
            for name, one in by_name.items():
                if first.setdefault(name, one) != one:
                    raise GroupError(
                        f"{self._ranks.names.of(rank)} has trained its copy of {name!r} to other values than an "
                        "earlier rank, so each has trained alone: wrap the model in DistributedDataParallel, or apply "
                        "fully_shard to it"
                    )

    @torch.no_grad()
    def collect(self, whole: Mapping[str, Tensor]) -> None:
        """Write the ranks' tensors into those of rank 0; of copies, that of the first rank. `whole`: on rank 0."""
        mine = _tensors_of(self._model)
        for name in self.names:
            held, owner = self._held[name], self._owner[name]
            tensor = mine.get(name)
            if isinstance(tensor, DTensor):
                tensor = tensor.full_tensor()
            if self._ranks.rank == owner:
                assert isinstance(tensor, Tensor), "it holds it"
                sent = _as_bytes(tensor.to("cpu"))
            else:
                sent = torch.empty(held.n_bytes, dtype=torch.uint8)
            got = self._ranks.pass_to_first(sent, owner)
            if got is not None:
                whole[name].copy_(got.view(held.torch_dtype).view(held.shape))

    def _from_first(
        self, names: Collection[str], whole: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            held = self._held[name]
            kind = dtype or held.torch_dtype
            if self._ranks.is_first:
                sent = _as_bytes(whole[name].detach().to("cpu", kind))
            else:
                sent = torch.empty(torch.Size(held.shape).numel() * kind.itemsize, dtype=torch.uint8)
            self._ranks.fill_from_first(sent)
            yield name, sent.view(kind).view(held.shape)


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """By name in the whole model, in the order of the state dict; shards as DTensors. A stage may have none."""
    if not model.state_dict():
        return {}
    found: dict[str, Any] = get_model_state_dict(model)
    if other := [name for name, one in found.items() if not isinstance(one, Tensor)]:
        raise GroupError(f"the model's state has {other[0]!r}, which is no tensor: ranks of a silo cannot share it")
    names = _names_of(model)
    if hidden := [name for name in names if name not in found]:
        raise GroupError(
            f"umbel does not find the tensor {hidden[0]!r} in the model's state. If a part of the model is in "
            "DistributedDataParallel, wrap the whole model in it"
        )
    return {name: found[name] for name in names}


def _names_of(model: nn.Module) -> dict[str, str]:
    """By name in the whole model: the name in this rank's, where DDP adds a prefix."""
    prefix = _DDP_PREFIX if isinstance(model, DistributedDataParallel) else ""
    return {name.removeprefix(prefix): name for name in map(bare_name, model.state_dict())}


def _like(tensor: Tensor, target: Tensor) -> Tensor:
    """A whole tensor placed as `target` is: on its device, and sharded if that is."""
    placed = tensor.to(target.device)
    if not isinstance(target, DTensor):
        return placed
    return distribute_tensor(placed, target.device_mesh, target.placements, src_data_rank=None)


def _of_whole(project: Projection) -> Projection:
    """The same projection where the gradient may be a shard: its ranks put it together, one tensor at a time."""

    def projected(gradient: Tensor) -> Tensor:
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        return _like(project(whole), gradient)

    return projected


def _is_whole(tensor: Tensor) -> bool:
    return not isinstance(tensor, DTensor)


def _sum_of_bits(tensor: Tensor) -> int:
    """A number that differs, in all likelihood, if a value does."""
    whole = tensor.detach().contiguous().reshape(-1)
    return int(whole.view(_INTEGERS[whole.element_size()]).sum(dtype=torch.int64))


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _description(model: nn.Module) -> bytes:
    parameters = {bare_name(name): one for name, one in model.named_parameters(remove_duplicate=False)}
    local = _names_of(model)
    first = dict[int, str]()
    held = list[HeldTensor]()
    for name, tensor in _tensors_of(model).items():
        parameter = parameters.get(local[name])
        same_as = "" if parameter is None else first.setdefault(id(parameter), name)
        held.append(
            HeldTensor(
                name,
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                parameter is not None,
                parameter is not None and parameter.requires_grad,
                "" if same_as == name else same_as,
            )
        )
    return _HELD.dump_json(held)


_HELD = TypeAdapter(list[HeldTensor])


def _kind(held: HeldTensor) -> str:
    return f"{held.dtype} of shape {held.shape}{', trained' if held.trains else ''}"
