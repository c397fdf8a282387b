"""What a run is made of beside its file: data, traces and code, each told apart by its SHA-256."""

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from umbel.sim.data.data_set import DataSet
from umbel.sim.experiment.file import TrialSpec

Digests = Mapping[str, str]


def digests_of(trial: TrialSpec, data: DataSet | None, folder: Path, data_folder: Path | None) -> dict[str, str]:
    """By what each is called in a sentence. `folder`, `data_folder`: as `make_world` has them, which has read them all.

    Of one's own modules the file that is named, not what it imports; of data, what was read, however they were written.
    """
    fleet = trial.fleet
    found = {f"the run ({trial.name})": hashlib.sha256(repr((trial.point, trial.run)).encode()).hexdigest()}
    if data is not None:
        found[f"data ({trial.data.name})"] = _of_data(data)
    if fleet.recorded is not None:
        found[f"fleet.recorded ({fleet.recorded})"] = _of_file(folder / fleet.recorded)
    if fleet.presence is not None:
        found[f"fleet.presence.file ({fleet.presence.file})"] = _of_file(folder / fleet.presence.file)
    if fleet.network is not None and fleet.network.phones is not None and data_folder is not None:
        found[f"fleet.network.phones ({fleet.network.phones})"] = _of_file(data_folder / fleet.network.phones)
    if ":" in trial.model.name and (file := _module_file(trial.model.name)) is not None:
        found[f"model.name ({trial.model.name}, in {file.name})"] = _of_file(file)
    return found


def changed(before: Digests, now: Digests) -> list[str]:
    """What is not as it was."""
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def _module_file(name: str) -> Path | None:
    """Where one's own code was imported from; None of what has no file."""
    file = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
    return None if file is None else Path(file)


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _of_data(data: DataSet) -> str:
    digest = hashlib.sha256(str(data.n_classes).encode())
    natural = data.natural
    parts = [
        data.samples.inputs,
        data.samples.targets,
        data.test.inputs,
        data.test.targets,
        torch.from_numpy(data.rows),
    ]
    if natural is not None:
        digest.update("\0".join(natural.names).encode())
        parts += [torch.from_numpy(one) for one in (*natural.shards, *natural.holdouts)]
    for part in parts:
        digest.update(f"\0{part.dtype}\0{tuple(part.shape)}\0".encode())
        digest.update(_bytes(part))
    return digest.hexdigest()


def _bytes(values: Tensor) -> memoryview:
    flat = torch.empty(values.numel(), dtype=values.dtype)  # of its own, for no other stride can be seen as bytes
    return flat.copy_(values.reshape(-1)).view(torch.uint8).numpy().data
