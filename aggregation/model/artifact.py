"""A model as safetensors bytes: the owners' tensors, with the layout as metadata, so that ties and order survive."""

import json
from collections.abc import Mapping

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.state import State

LAYOUT_KEY = "umbel.layout"
MASTER_KEY = "umbel.master_of"


def metadata_of(layout: Layout) -> dict[str, str]:
    """The safetensors metadata that carries the layout."""
    return {LAYOUT_KEY: layout.to_json()}


def master_metadata_of(layout: Layout, *, has_more: bool = False) -> dict[str, str]:
    """The safetensors metadata of a master copy, if that is a file of its own. `has_more`: whether it has more than the
    model's tensors. One in the model's own dtypes, with nothing beside them, is a model file like any other.
    """
    return {MASTER_KEY: layout.digest} if has_more or not layout.is_full_precision else metadata_of(layout)


def layout_of(metadata: Mapping[str, str] | None, owned: State) -> Layout:
    """The layout in a model file's metadata; without one, the layout of its tensors.

    Raises `LayoutError` if the metadata does not describe the tensors.
    """
    if not metadata or LAYOUT_KEY not in metadata:
        return Layout.of_state(owned)
    layout = Layout.from_json(metadata[LAYOUT_KEY])
    described = {(s.name, s.shape, s.dtype) for s in layout.owners()}
    present = {(s.name, s.shape, s.dtype) for s in Layout.of_state(owned).tensors}
    if described != present:
        raise LayoutError("the model file's layout does not describe its tensors; export the model again")
    return layout


def encode_model(state: State, layout: Layout | None = None) -> bytes:
    """A state dict as safetensors bytes. The same state and layout give the same bytes.

    `layout`: of the state; by default the one in which every tensor has the kind mean.
    """
    layout = Layout.of_state(state) if layout is None else layout
    owned = {spec.name: state[spec.name].detach().cpu().contiguous() for spec in layout.owners()}
    return save(owned, metadata_of(layout))


def decode_model(data: bytes) -> tuple[Layout, dict[str, Tensor]]:
    """Layout and full state dict, including tied names. Raises `LayoutError` for bytes that are not a model."""
    try:
        owned = load(data)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that safetensors knows and torch does not
        raise LayoutError(f"the file is not a safetensors model: {error}") from error
    metadata = metadata_in(data)
    layout = layout_of(metadata, owned)
    return layout, layout.full_state(owned)


def tensor_offsets(header: bytes) -> dict[str, int]:
    """Where each tensor's bytes begin in a valid safetensors file. `header`: its JSON."""
    entries = json.loads(header)
    return {
        name: 8 + len(header) + int(entry["data_offsets"][0])
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def metadata_in(data: bytes) -> dict[str, str] | None:
    """The `__metadata__` of valid safetensors bytes."""
    header_bytes = int.from_bytes(data[:8], "little")
    header: dict[str, dict[str, str]] = json.loads(data[8 : 8 + header_bytes])
    return header.get("__metadata__")
