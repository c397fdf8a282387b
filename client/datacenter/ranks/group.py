"""The ranks of one job, and how they reach each other: a process group of its own for each attempt at the job.

`torchrun` starts the ranks, and starts all of them again after one has died. The new ranks find each other through the
store of torchrun's agent, which still holds the addresses of the dead ones. So each attempt has a prefix of its own in
that store, on which the ranks agree (`attempt.py`). (Without one, Gloo's ranks joined in one restart of six.)
"""

import atexit
import gc
import os
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from umbel.aggregation.collective.lanes import Lanes
from umbel.aggregation.collective.sums import broadcast_bytes, gather_bytes, reduced, sum_of_levels, sum_over_ranks
from umbel.aggregation.update.grid import IntegerSum
from umbel.client.datacenter.ranks.attempt import agreed_attempt
from umbel.client.datacenter.ranks.names import RANKS, RankNames
from umbel.client.datacenter.ranks.torch_errors import KILLED_OR_FAILED, cause_of, loss_of, unreachable
from umbel.client.datacenter.ranks.waiting import RankWaits
from umbel.client.errors import CannotGoOn

_JOIN_S = 300.0
_LOOK_S, _LOOK_S_MAX = 0.005, 0.5  # between two looks at the store
_WORDS = "umbel_words"  # a key of the store
_stores: Any = dist  # HashStore and others are documented there, but its types do not have them


class GroupError(CannotGoOn):
    """The ranks cannot work together, or one of them is lost; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Group:
    """This rank's place among all ranks. Every rank must make the same calls in the same order.

    Every call raises `GroupError` if another rank is lost.
    """

    rank: int  # from 0
    size: int
    device: torch.device  # of this rank's training
    process_group: dist.ProcessGroup = field(repr=False)
    names: RankNames = RANKS  # of its ranks in messages
    _wire: torch.device = field(default=torch.device("cpu"), repr=False)  # the device that tensors are sent from
    _board: Any = field(default=None, repr=False)  # the store, where a rank finds what another has written
    _waiting: RankWaits = field(default=RankWaits(0, 1, None), repr=False)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what the job leaves."""
        return self.rank == 0

    @property
    def wire(self) -> torch.device:
        """The device that tensors are sent from: the CPU for Gloo, a GPU for NCCL."""
        return self._wire

    def tell_all(self, words: str) -> None:
        """Write what others find when they ask `told`; not in turn with other calls."""
        self._board.set(_WORDS, words)

    def told(self) -> str:
        """What a rank has told all; empty if none has. It asks the store, and waits for no rank."""
        try:
            return self._board.get(_WORDS).decode() if self._board.check([_WORDS]) else ""
        except RuntimeError:  # the machine with the store is gone: the next sum says so
            return ""

    def waiting_for(self, what: str) -> AbstractContextManager[None]:
        """Log for which ranks this one waits if the calls in this block take long. All ranks must enter it, in the same
        order as their other calls. `what`: what this rank waits for, such as "the reports on round 3".
        """
        return self._waiting.told(what)

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank has given, in the order of the ranks."""
        with lost_ranks_named():
            return gather_bytes(data, self.process_group, self._wire)

    def from_first(self, data: bytes) -> bytes:
        """What rank 0 has given; what others give is ignored."""
        with lost_ranks_named():
            return broadcast_bytes(data, self.process_group, self._wire)

    def fill_from_first(self, tensor: Tensor) -> None:
        """Overwrite a tensor, of the same shape and dtype on each rank, with that of rank 0."""
        with lost_ranks_named():
            dist.broadcast(tensor, group=self.process_group, group_src=0)

    def add_numbers(self, numbers: Tensor) -> None:
        """Overwrite a tensor, of the same shape and dtype on each rank, with the sum of all ranks'."""
        with lost_ranks_named():
            dist.all_reduce(numbers, group=self.process_group)

    def pass_to_first(self, tensor: Tensor, source: int) -> Tensor | None:
        """Hand `tensor` of the rank `source` to rank 0, which gets it; others get None. On rank 0 `tensor` may be
        overwritten.
        """
        with lost_ranks_named():
            if self.rank == source != 0:
                dist.send(tensor, group=self.process_group, group_dst=0)
            elif self.is_first and source:
                dist.recv(tensor, group=self.process_group, group_src=source)
        return tensor if self.is_first else None

    def put(self, key: str, words: str) -> None:
        """Write what others find under this key; not in turn with other calls."""
        with lost_ranks_named():
            self._board.set(key, words)

    def forget(self, key: str) -> None:
        """Remove what was put under this key."""
        with lost_ranks_named():
            self._board.delete_key(key)

    def find(self, key: str, wait_s: float = 0.0) -> str | None:
        """What a rank has put under this key; None if none has within `wait_s` seconds."""
        pause, until = _LOOK_S, time.monotonic() + wait_s
        with lost_ranks_named():
            while not self._board.check([key]):  # the store's own wait writes a warning for each time that it ends
                if time.monotonic() >= until:
                    return None
                time.sleep(pause)
                pause = min(2 * pause, _LOOK_S_MAX)
            return str(self._board.get(key).decode())

    @contextmanager
    def on_processors(self) -> Generator["Group"]:
        """The same ranks in a group of their own whose tensors are on the CPU, whatever trains on GPUs beside it.
        Called by all ranks of the job together.
        """
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup), "all ranks are in it"
        try:
            yield replace(self, process_group=group, _wire=torch.device("cpu"))
        finally:
            dist.destroy_process_group(group)

    def among(
        self,
        ranks: Sequence[int],
        name: str,
        timeout_s: float,
        *,
        names: RankNames = RANKS,
        on_processors: bool = False,
    ) -> "Group | None":
        """These ranks as a group of their own; None on other ranks. All ranks of the job must call it together.

        `name`: unlike that of every other such group. `timeout_s`: how long a rank waits for the others in each call.
        `names`: of its ranks in messages. `on_processors`: whether its tensors are on the CPU, whatever trains on GPUs
        beside it.
        """
        backend, timeout = "gloo" if on_processors else None, timedelta(seconds=timeout_s)
        group = dist.new_group([*ranks], backend=backend, timeout=timeout)
        if self.rank not in ranks:
            return None
        assert isinstance(group, dist.ProcessGroup), "this rank is in it"
        place, store = ranks.index(self.rank), _stores.PrefixStore(f"umbel_{name}", self._board)
        return replace(
            self,
            rank=place,
            size=len(ranks),
            process_group=group,
            names=names,
            _wire=torch.device("cpu") if on_processors else self._wire,
            _board=store,
            _waiting=RankWaits(place, len(ranks), store, names),
        )

    def add_up(self, part: IntegerSum, whole: IntegerSum) -> None:
        """Add all ranks' parts of a sum to `whole`, an empty sum of the same codec."""
        with lost_ranks_named():
            sum_over_ranks(part, whole, self.process_group, self._wire)

    def add_levels(self, parts: Iterable[Tensor] | None, lanes: Lanes) -> Tensor:
        """The sums of all ranks' levels: int32, `lanes.n_values`. `parts`: of this rank; None: it adds none."""
        with lost_ranks_named():
            return sum_of_levels(parts, lanes, self.process_group, self._wire)

    def add_words(self, words: Tensor) -> Tensor:
        """The sum of all ranks' `words`: int64."""
        with lost_ranks_named():
            return reduced(words, self.process_group, self._wire)


@contextmanager
def joined(timeout_s: float = 1800.0, join_s: float = _JOIN_S) -> Generator[Group]:
    """Join the other ranks of this job, and leave them at the end. A process that no launcher has started is alone.

    `timeout_s`: how long a rank waits for the others in each call. `join_s`: how long it looks for the store in which
    ranks find each other. Raises `GroupError` if they do not come.
    """
    rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    device, backend = _device(_number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1))
    try:
        store = _store(rank, size, join_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError, TimeoutError) as error:
        if (why := cause_of(error)) is None:
            loss = loss_of(error) or "start all ranks with torchrun, and check MASTER_ADDR and MASTER_PORT"
            why = f"another rank does not answer: {loss}"
        said = f"rank {rank} could not join the {size} ranks of this job: {why} ({_first_line(error)})"
        raise GroupError(said) from error
    _end_groups_at_exit()
    try:
        ranks, wire = dist.group.WORLD, device if backend == "nccl" else torch.device("cpu")
        assert ranks is not None, "it was made above"
        waits = RankWaits(rank, size, store if size > 1 else None)
        yield Group(rank, size, device, ranks, _wire=wire, _board=store, _waiting=waits)
    finally:
        dist.destroy_process_group()


@cache
def _end_groups_at_exit() -> None:
    """End the threads of Gloo's groups before the interpreter ends.

    A thread lets go of a finished call's tensors a moment later than the caller goes on, and it needs the interpreter
    for this. If the interpreter is ending, the process aborts (pytorch/pytorch#179291). A group ends its threads when
    nothing holds it any more, and an error that was caught may hold it in a cycle.
    """
    atexit.register(gc.collect)


def _store(rank: int, size: int, join_s: float) -> Any:
    """What the ranks of this attempt write to each other, apart from what earlier attempts have written."""
    if size == 1:
        return _stores.HashStore()
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), _number("MASTER_PORT", 29_500)
    is_master, wait = not is_agents and rank == 0, timedelta(seconds=join_s)
    try:
        store = _stores.TCPStore(host, port, size, is_master=is_master, timeout=wait)
    except RuntimeError as error:
        if is_master:
            raise
        raise GroupError(
            f"rank {rank} did not reach the other ranks in {join_s:.0f} s: {unreachable(host, port)}"
        ) from error
    return _stores.PrefixStore(f"umbel_attempt_{agreed_attempt(store, rank, size, join_s)}", store)


def _device(local_rank: int, n_local: int) -> tuple[torch.device, str]:
    """The device of a rank and the backend between ranks. NCCL wants a GPU for each rank."""
    if not torch.cuda.is_available() or torch.cuda.device_count() < n_local:
        return torch.device("cpu"), "gloo"
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device, "nccl"


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    if not text.isdigit():
        raise GroupError(f"the environment variable {name} is {text!r}; it must be a number, as torchrun sets it")
    return int(text)


@contextmanager
def lost_ranks_named() -> Generator[None]:
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        if (cause := cause_of(error)) is not None:
            raise GroupError(f"a sum over the ranks failed: {cause} ({_first_line(error)})") from error
        raise lost_rank(error) from error


@contextmanager
def losses_named() -> Generator[None]:
    """As `lost_ranks_named`, around code that may fail for other reasons, too."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        if is_loss(error):
            raise lost_rank(error) from error
        raise


def is_loss(error: BaseException) -> bool:
    """Whether torch says that another rank no longer answers."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and loss_of(error) is not None)


def lost_rank(error: BaseException) -> GroupError:
    """What to raise because another rank no longer answers. `error`: as torch says it."""
    return GroupError(
        f"another rank of this job is lost: {loss_of(error) or KILLED_OR_FAILED}. Start the same "
        "command again to go on; torchrun --max-restarts does so by itself"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
