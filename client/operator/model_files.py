"""Model files on an operator's disk: written and checked without a second copy of the model in memory."""

from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.artifact import layout_of, metadata_of
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.state import State


def write_model(path: Path, state: State) -> Layout:
    """Write a state dict as a model file: the bytes that `encode_model` gives. Raises `LayoutError`."""
    layout = Layout.of_state(state)
    owned = {spec.name: state[spec.name].detach().cpu().contiguous() for spec in layout.owners()}
    save_file(owned, path, metadata_of(layout))
    return layout


def layout_in(path: Path) -> Layout:
    """The layout of a model file. Raises `LayoutError`, which names the file, if it is no model; `OSError` for none."""
    with path.open("rb"):
        pass  # so that a missing file is told as one
    try:
        with safe_open(path, framework="pt") as file:
            return layout_of(file.metadata(), {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that safetensors knows and torch does not
        raise LayoutError(
            f"{path} is not a safetensors model, or is incomplete ({error}): make a model with "
            "`umbel model init --app APP --out FILE`, or copy the file again"
        ) from error
    except LayoutError as error:
        raise LayoutError(f"{path}: {error}") from error
