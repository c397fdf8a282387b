"""Sharded tensors in what ranks save. A save has a rank's shards and where they lie in the whole tensors, so that the
shards of some ranks give those of others, whatever their number.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

_SHARD, _LIKE, _BEGINS = "umbel.shard", "umbel.like", "umbel.begins"
_Path = tuple[object, ...]


def without_shards(value: Any, model: nn.Module) -> Any:
    """The nested values with this rank's shard in the place of each sharded tensor, and the name of a parameter that is
    sharded alike. Raises `ValueError` if no parameter is.
    """
    alike = {_place(one): name for name, one in model.named_parameters() if isinstance(one, DTensor)}

    def packed(value: Any, _: _Path) -> Any:
        if not isinstance(value, DTensor):
            return value
        if (name := alike.get(_place(value))) is None:
            raise ValueError("a sharded tensor is unlike every parameter of the model")
        return {_SHARD: value.to_local(), _LIKE: name, _BEGINS: _begins(value)}

    return _mapped(value, packed)


def with_shards(value: Any, saves: Sequence[Any], model: nn.Module) -> Any:
    """The inverse of `without_shards`, for the shards of this rank's model.

    `value`: one of the saves, or made of them. `saves`: of all ranks that may hold a part of these shards. Raises
    `ValueError` if they do not make them up.
    """
    parameters = dict(model.named_parameters())
    pieces = defaultdict[_Path, list[Mapping[str, Any]]](list)
    for save in saves:
        for path, piece in _pieces(save):
            pieces[path].append(piece)

    def unpacked(value: Any, path: _Path) -> Any:
        if not _is_piece(value):
            return value
        like = parameters.get(value[_LIKE])
        if not isinstance(like, DTensor):
            raise ValueError(f"{value[_LIKE]!r} was sharded and is not")
        local = _put_together(like, pieces[path])
        return DTensor.from_local(
            local.to(like.device),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )

    return _mapped(value, unpacked)


def _put_together(like: DTensor, pieces: Sequence[Mapping[str, Any]]) -> Tensor:
    """What this rank holds of a tensor that is sharded as `like` is, on the CPU."""
    shape, begins = like.to_local().shape, _begins(like)
    found, n_found, seen = torch.zeros(shape, dtype=pieces[0][_SHARD].dtype), 0, set[object]()
    for piece in pieces:
        shard, at = piece[_SHARD], piece[_BEGINS]
        if at is None or begins is None:
            if len(pieces) > 1:
                raise ValueError("a tensor's shards are not blocks of it")
            return cast(Tensor, shard)
        if (key := (*at, *shard.shape)) in seen:  # several ranks hold it
            continue
        seen.add(key)
        common = [
            range(max(here, there), min(here + n, there + m))
            for here, n, there, m in zip(begins, shape, at, shard.shape, strict=True)
        ]
        if size := prod(len(one) for one in common):
            found[_block(common, begins)] = shard[_block(common, at)]
            n_found += size
    if n_found != found.numel():
        raise ValueError("the shards do not make up a tensor")
    return found


def _block(common: Sequence[range], begins: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(one.start - begin, one.stop - begin) for one, begin in zip(common, begins, strict=True))


def _begins(tensor: DTensor) -> list[int] | None:
    """Where this rank's shard begins in the whole tensor, by dimension; None if the shard is no block of it."""
    begins, sizes = [0] * tensor.ndim, [*tensor.shape]
    coordinates = tensor.device_mesh.get_coordinate() or ()
    for placement, place, n in zip(tensor.placements, coordinates, tensor.device_mesh.shape, strict=True):
        if isinstance(placement, Shard):
            size = sizes[placement.dim]
            each = -(-size // n)  # as `torch.chunk` divides it
            begins[placement.dim] += min(place * each, size)
            sizes[placement.dim] = max(0, min(each, size - place * each))
        elif not isinstance(placement, Replicate):
            return None
    return begins


def _place(tensor: DTensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements)


def _is_piece(value: Any) -> bool:
    return isinstance(value, Mapping) and _SHARD in value


def _pieces(value: Any) -> list[tuple[_Path, Mapping[str, Any]]]:
    found = list[tuple[_Path, Mapping[str, Any]]]()

    def noted(value: Any, path: _Path) -> Any:
        if not _is_piece(value):
            return value
        found.append((path, value))
        return None

    _mapped(value, noted)
    return found


def _mapped(value: Any, change: Callable[[Any, _Path], Any], path: _Path = ()) -> Any:
    """The nested values, each as `change` returns it for its value and its path; what it returns as it was is looked
    into.
    """
    if (changed := change(value, path)) is not value:
        return changed
    match value:
        case Mapping():
            return {key: _mapped(one, change, (*path, key)) for key, one in value.items()}
        case list() | tuple():
            items = enumerate(cast(Sequence[Any], value))
            return type(value)(_mapped(one, change, (*path, number)) for number, one in items)
        case _:
            return value
