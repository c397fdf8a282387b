"""The engine "ray": divides clients among the actors of a Ray cluster, for more than one machine (the extra `ray`).

Each actor holds one resident model. Samples go into Ray's object store once, the start once for each cohort. An actor
gets the clients to train and their rows, and returns a block of changes. Ray restarts an actor that dies, if necessary
on another node; it repeats its work and gives the same bits. umbel and the module of the recipe must be installed on
every node.
"""

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.aggregation.model.layout import Layout
from umbel.client.local.devices import whole_float32
from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import CohortData
from umbel.sim.engines.device import chunks, one_thread, part_of, rows_of_block
from umbel.sim.engines.model import ModelRecipe
from umbel.sim.engines.training import Arithmetic, LocalTrainer, Losses, changes_of, require_trainable
from umbel.sim.engines.work import Changes, CohortWork, EngineError


def packed(tensor: Tensor) -> NDArray[np.uint8]:
    """A tensor's bytes, (..., bytes of an element): numpy lacks some of torch's types."""
    return tensor.detach().cpu().contiguous().unsqueeze(-1).view(torch.uint8).numpy()


def unpacked(array: NDArray[np.uint8], dtype: str) -> Tensor:
    """The inverse, without a copy: read only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array).view(getattr(torch, dtype)).squeeze(-1)


class RayWorker:
    """`paths`: of the caller's modules, for nodes that have them at the same place."""

    def __init__(self, recipe: str, device: str, arithmetic: Arithmetic, paths: Sequence[str]) -> None:
        sys.path.extend(path for path in paths if path not in sys.path)
        self._trainer = LocalTrainer(ModelRecipe.from_json(recipe), device, arithmetic)
        self._cohort: int | None = None

    def train(
        self,
        cohort: int,
        start: NDArray[np.uint8],
        inputs: NDArray[np.uint8],
        targets: NDArray[np.uint8],
        part: Sequence[NDArray[Any]],
        terms: Mapping[str, Any],
    ) -> tuple[NDArray[np.float32], Losses]:
        """Train some clients of a cohort; their changes (k, n_values) and losses (k, 3)."""
        rows, starts, seeds, steps = part
        samples = SampleSet(*map(unpacked, (inputs, targets), terms["dtypes"]))
        work = CohortWork.on(CohortData(samples, rows, starts), seeds, steps, terms)
        values = torch.empty(len(seeds), self._trainer.layout.n_values)
        with one_thread(), whole_float32(self._trainer.device):
            if cohort != self._cohort:
                self._trainer.begin(unpacked(start, "float32"), work)
                self._cohort = cohort
            losses = self._trainer.train(work, np.arange(len(seeds)), values)
        return values.numpy(), losses


RAY_MISSING = (
    'the engine "ray" needs Ray, which is not installed; '
    "in a clone of umbel: pip install -c constraints.txt '.[sim,ray]'"
)
_RETRIES = 2  # of one chunk, when its actor dies
_IN_FLIGHT = 2  # chunks queued at an actor, so that it never waits


class RayEngine:
    """`n_workers`: actors, by default one for each CPU of the cluster, or with `device = "cuda"` for each GPU; further
    actors share them. `address`: of a running cluster, or "auto"; None: a cluster of this machine alone. An existing
    connection of the process is used.

    Samples are sent when they are first seen and must not be changed in place afterwards. Raises `EngineError` if Ray
    is not installed or has no such resource, and for one GPU by its number.
    """

    name = "ray"

    def __init__(
        self,
        recipe: ModelRecipe,
        n_workers: int | None = None,
        device: str = "cpu",
        arithmetic: Arithmetic = "auto",
        address: str | None = None,
    ) -> None:
        if find_spec("ray") is None:
            raise EngineError(RAY_MISSING)
        if device.startswith("cuda:"):
            raise EngineError('Ray assigns the GPUs of its cluster; use device = "cuda"')
        self._arguments = recipe.to_json(), "cuda:0" if device == "cuda" else device, arithmetic, _paths()
        self._layout = Layout.of_state(recipe.make().state_dict())
        self._rows = rows_of_block(self._layout.n_values)
        self._samples: tuple[SampleSet, Any, Any] | None = None
        self._cohort = 0
        self._ray, self._is_ours = _connected(address)
        self._actors = self._started("GPU" if device == "cuda" else "CPU", n_workers)

    def train(self, start: Tensor, work: CohortWork) -> Iterator[Changes]:
        """As `Engine.train`. One cohort at a time."""
        require_trainable(work, start, self._layout)
        self._cohort += 1
        common = self._cohort, self._ray.put(packed(start)), *self._shared(work.data.samples)
        waiting = chunks(work.steps, len(self._actors), self._rows)
        running = dict[Any, tuple[Any, Indices]]()  # by the reference to the result

        def give(actor: Any) -> None:
            if (positions := next(waiting, None)) is not None:
                running[actor.train.remote(*common, *_message(part_of(work, positions)))] = actor, positions

        for actor in self._actors * _IN_FLIGHT:
            give(actor)
        while running:
            (done,), _ = self._ray.wait(list(running), num_returns=1)
            actor, positions = running.pop(done)
            values, losses = self._result(done, positions)
            give(actor)
            yield changes_of(positions, torch.from_numpy(values.copy()), losses.copy())

    def close(self) -> None:
        """End the actors, and Ray if this engine has started it."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
        if self._is_ours:
            self._ray.shutdown()

    def _started(self, resource: str, n_workers: int | None) -> list[Any]:
        there = self._ray.cluster_resources().get(resource, 0)
        if there < 1 or (n_workers is not None and n_workers < 1):
            raise EngineError(
                f"there must be at least one {resource} and at least one worker; Ray has {there:g} {resource}s, and "
                f"the number of workers is {'not set' if n_workers is None else n_workers}"
            )
        n_actors = n_workers or int(there)
        share = {f"num_{resource.lower()}s": min(1.0, there / n_actors)}
        kind = self._ray.remote(RayWorker).options(
            max_restarts=-1, max_task_retries=_RETRIES, **{"num_cpus": 0, **share}
        )
        return [kind.remote(*self._arguments) for _ in range(n_actors)]

    def _shared(self, samples: SampleSet) -> tuple[Any, Any]:
        """Inputs and targets in the object store, put there once."""
        known = self._samples
        if known is None or samples.inputs is not known[0].inputs or samples.targets is not known[0].targets:
            self._samples = known = (
                samples,
                self._ray.put(packed(samples.inputs)),
                self._ray.put(packed(samples.targets)),
            )
        return known[1:]

    def _result(self, done: Any, positions: Indices) -> Any:
        try:
            return self._ray.get(done)
        except self._ray.exceptions.RayActorError as error:
            raise EngineError(
                f"a Ray actor died {_RETRIES + 1} times while it trained the same {len(positions)} clients, or could "
                f"not start: {error}"
            ) from error
        except self._ray.exceptions.RayTaskError as error:
            raise EngineError(f"training failed in a Ray actor: {error}") from error


def _connected(address: str | None) -> tuple[Any, bool]:
    """Ray, and whether this call has connected to it."""
    # By default Ray reports its use to its makers, and warns about a changing default.
    for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")):
        os.environ.setdefault(name, value)
    ray: Any = import_module("ray")  # takes a second to import
    if ray.is_initialized():
        return ray, False
    local = {"include_dashboard": False} if address is None else {}
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
    return ray, True


def _message(part: CohortWork) -> tuple[list[Any], dict[str, Any]]:
    samples = part.data.samples
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in (samples.inputs, samples.targets)]
    return [part.data.rows, part.data.starts, part.seeds, part.steps], {**part.terms, "dtypes": dtypes}


def _paths() -> list[str]:
    return [os.path.abspath(path) for path in sys.path]
