"""Actors of a Ray cluster that share work, for more than one machine (the extra `ray`).

Ray restarts an actor that dies, if necessary on another node; the actor repeats its work and gives the same bits. umbel
and the user's own module must be installed on every node.
"""

import logging
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.aggregation.phrases import counted
from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.partition.partition import Indices
from umbel.sim.engines.work import EngineError

RAY_MISSING = (
    'the engine "ray" needs Ray, which is not installed; '
    "in a clone of umbel: pip install -c constraints.txt '.[sim,ray]'"
)
_RETRIES = 2  # of one chunk, when its actor dies
_IN_FLIGHT = 2  # chunks queued at an actor, so that it never waits


def packed(tensor: Tensor) -> NDArray[np.uint8]:
    """A tensor's bytes, (..., bytes of an element): numpy lacks some of torch's types."""
    return tensor.detach().cpu().contiguous().unsqueeze(-1).view(torch.uint8).numpy()


def unpacked(array: NDArray[np.uint8], dtype: str) -> Tensor:
    """The inverse, without a copy: read only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array).view(getattr(torch, dtype)).squeeze(-1)


def unpacked_samples(inputs: NDArray[np.uint8], targets: NDArray[np.uint8], dtypes: Sequence[str]) -> SampleSet:
    """In an actor: the samples that `RayCluster.samples` has put into the object store."""
    return SampleSet(*map(unpacked, (inputs, targets), dtypes))


def dtypes_of(samples: SampleSet) -> list[str]:
    """Torch's names of the types of inputs and targets."""
    return [str(tensor.dtype).removeprefix("torch.") for tensor in (samples.inputs, samples.targets)]


class RayCluster:
    """Actors of the class `worker`, made with this process's module paths (`use_paths`), the number of actors, and
    `arguments`.

    `n_workers`: actors, by default one for each CPU of the cluster, or with `device = "cuda"` for each GPU; further
    actors share them. `address`: of a running cluster, or "auto"; None: a cluster of this machine alone. An existing
    connection of the process is used. Raises `EngineError` if Ray is not installed or has no such resource, and for one
    GPU by its number.
    """

    def __init__(
        self, worker: type, arguments: Sequence[object], n_workers: int | None, device: str, address: str | None
    ) -> None:
        if find_spec("ray") is None:
            raise EngineError(RAY_MISSING)
        if device.startswith("cuda:"):
            raise EngineError('Ray assigns the GPUs of its cluster; use device = "cuda"')
        self._samples: tuple[SampleSet, Any, Any] | None = None
        self._ray, self._is_ours = _connected(address)
        paths = [os.path.abspath(path) for path in sys.path]
        self._actors = self._started(worker, paths, arguments, "GPU" if device == "cuda" else "CPU", n_workers)

    def __len__(self) -> int:
        return len(self._actors)

    def put(self, value: Any) -> Any:
        """Put a value into Ray's object store; the reference to it."""
        return self._ray.put(value)

    def samples(self, samples: SampleSet) -> tuple[Any, Any]:
        """Inputs and targets in the object store, put there when they are first seen. They must not change later."""
        known = self._samples
        if known is None or samples.inputs is not known[0].inputs or samples.targets is not known[0].targets:
            inputs, targets = packed(samples.inputs), packed(samples.targets)
            self._samples = known = samples, self.put(inputs), self.put(targets)
        return known[1:]

    def run(self, chunks: Iterable[Indices], begin: Callable[[Any, Indices], Any]) -> Iterator[tuple[Indices, Any]]:
        """Have all chunks done; each with its result, in the order in which they finish. `begin`: gives an actor a
        chunk, and returns the reference to the result. Raises `EngineError` if an actor's code fails.
        """
        waiting, running = deque(chunks), dict[Any, tuple[Any, Indices]]()  # by the reference to the result

        def give(actor: Any) -> None:
            if waiting:
                positions = waiting.popleft()
                running[begin(actor, positions)] = actor, positions

        for actor in self._actors * _IN_FLIGHT:
            give(actor)
        while running:
            (done,), _ = self._ray.wait(list(running), num_returns=1)
            actor, positions = running.pop(done)
            result = self._result(done, positions)
            give(actor)
            yield positions, result

    def close(self) -> None:
        """End the actors, and Ray if this object has started it."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
        if self._is_ours:
            self._ray.shutdown()

    def _started(
        self, worker: type, paths: list[str], arguments: Sequence[object], resource: str, n_workers: int | None
    ) -> list[Any]:
        there = self._ray.cluster_resources().get(resource, 0)
        if there < 1 or (n_workers is not None and n_workers < 1):
            raise EngineError(
                f"there must be at least one {resource} and at least one worker; Ray has {there:g} {resource}s, and "
                f"the number of workers is {'not set' if n_workers is None else n_workers}"
            )
        n_actors = n_workers or int(there)
        share = {f"num_{resource.lower()}s": min(1.0, there / n_actors)}
        kind = self._ray.remote(worker).options(max_restarts=-1, max_task_retries=_RETRIES, **{"num_cpus": 0, **share})
        return [kind.remote(paths, n_actors, *arguments) for _ in range(n_actors)]

    def _result(self, done: Any, positions: Indices) -> Any:
        try:
            return self._ray.get(done)
        except self._ray.exceptions.RayActorError as error:
            raise EngineError(
                f"a Ray actor died {_RETRIES + 1} times while it did the work of the same "
                f"{counted(len(positions), 'client')}, or could not start: {error}"
            ) from error
        except self._ray.exceptions.RayTaskError as error:
            raise EngineError(f"training failed in a Ray actor: {error}") from error


def use_paths(paths: Sequence[str]) -> None:
    """In an actor: import modules from the caller's paths too, for nodes that have them at the same place."""
    sys.path.extend(path for path in paths if path not in sys.path)


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
