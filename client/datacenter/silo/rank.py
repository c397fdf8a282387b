"""One rank of a silo: it does what rank 0 asks, with the site's own code on its own part of the model."""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from umbel.client.app import Client
from umbel.client.datacenter.ranks.group import Group, GroupError, lost_rank
from umbel.client.datacenter.ranks.torch_errors import loss_of
from umbel.client.datacenter.silo.checkpoint import RankCheckpoint, forget_others
from umbel.client.datacenter.silo.orders import Order, OrderKind, planned
from umbel.client.datacenter.silo.results import evaluation_as_json, training_as_json
from umbel.client.datacenter.silo.tensors import SiloTensors
from umbel.client.errors import RankFailed, TrainingFailed
from umbel.client.files import make_private
from umbel.client.local.batches import BatchPart
from umbel.client.local.checkpoint import Checkpoint
from umbel.client.local.plan import LocalPlan
from umbel.client.local.results import TrainResult
from umbel.client.rounds.site_code import evaluated, require_kind
from umbel.client.state.packing import Packing, unpack
from umbel.client.user_code import where_raised

_ALL_FAIL_S = 10.0  # in which the same error reaches all ranks, if it does
_LOST_S = 1.0  # in which the words of a rank whose code has failed are there, once it is lost
_LOOK_S = 0.1
_GO_ON, _STOP, _SAVE = range(3)
log = logging.getLogger("umbel.client")


class AllFailed(Exception):
    """The site's code has failed on every rank, so the ranks are still in step. `error`: this rank's."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class SiloRank:
    """`folder`: for what this rank keeps of a training in progress."""

    def __init__(self, app: Client, ranks: Group, folder: Path) -> None:
        """Raises `GroupError` for ranks whose models or parts do not fit together, and `OSError` or `StateError` for a
        folder that cannot be used.
        """
        self.app, self.ranks = app, ranks
        self.parts = [BatchPart(*json.loads(one)) for one in ranks.gather(json.dumps(astuple(app.part)).encode())]
        require_parts(self.parts)
        self.tensors = SiloTensors(app.model, ranks)
        self._folder = folder / str(ranks.rank)
        make_private(self._folder)
        forget_others(folder, ranks.size)
        self._number = 0  # of the next order

    def next_order(self) -> Order:
        """Wait for rank 0's next order."""
        while (text := self.ranks.find(f"order {self._number}", wait_s=60.0)) is None:
            pass
        return Order.from_json(text)

    def give_order(self, order: Order) -> None:
        """On rank 0: write what all ranks are to do next."""
        self.ranks.put(f"order {self._number}", order.to_json())

    def do(self, order: Order, whole: Mapping[str, Tensor] | None = None, asked: LocalPlan | None = None) -> list[Any]:
        """Do an order together with all other ranks; returns what each has to say, in the order of the ranks.

        `whole`: on rank 0, the tensors of the whole model; after a training they have its weights. `asked`: on rank 0,
        the round's plan. Raises `AllFailed` if the site's code fails on every rank, `GroupError` and `RankFailed` if
        the ranks are no longer together.
        """
        whole = whole or {}
        self.tensors.give(order.loads, whole)
        pulls = self.tensors.parts_of(order.pulls, {} if asked is None else asked.pulls)
        state = self._state(order, asked)
        plan = replace(planned(order), part=self.app.part, pulls=pulls, state=state, checkpoint=self._checkpoint(order))
        said = self._together(lambda: json.dumps(self._said(order, plan, asked)).encode())
        answers = [json.loads(one) for one in self.ranks.gather(said)]
        if order.task is OrderKind.TRAIN:
            self.tensors.require_same_copies()
            self.tensors.collect(whole)
            plan.checkpoint.forget()
        self._done()
        return answers

    def _said(self, order: Order, plan: LocalPlan, asked: LocalPlan | None) -> Any:
        app = self.app
        match order.task:
            case OrderKind.PREPARE:
                app.prepare(plan)
            case OrderKind.EVALUATE:
                return evaluation_as_json(evaluated(app))
            case OrderKind.LOSS:
                loss = app.training_loss(app.model)
                return None if loss is None else float(loss)
            case OrderKind.TRAIN:
                return self._trained(order, plan, asked)
            case OrderKind.END:
                raise AssertionError("an end is not done, but obeyed")
        return None

    def _trained(self, order: Order, plan: LocalPlan, asked: LocalPlan | None) -> Any:
        steps = _Steps(self.ranks, asked, plan.checkpoint)
        own = [local for name in order.own if (local := self.tensors.here(name)) is not None]
        bound = replace(plan.bound_to(self.app.model, own), told_to_stop=steps.told_to_stop)
        result = self.app.train(self.app.model, bound)
        require_kind(result, TrainResult, "train")
        applied = {"is_applied": bound.rules.is_applied, "by_site": sorted(bound.site_applies)}
        return {"found": training_as_json(result), **applied}

    def _checkpoint(self, order: Order) -> Checkpoint:
        if order.belongs_to is None:
            return Checkpoint()
        n_bytes = self.tensors.n_bytes_here
        return RankCheckpoint(self._folder, order.belongs_to, self.app.model, self.ranks, n_bytes)

    def _state(self, order: Order, asked: LocalPlan | None) -> dict[str, Any]:
        """Rank 0's `plan.state` itself there, and a copy of it on the others."""
        if not order.has_state:
            return {}
        packing = Packing()
        packed = packing.pack({} if asked is None else asked.state)
        text = self.ranks.from_first(json.dumps(packed).encode())
        tensors = self.ranks.from_first(save(packing.separate()))
        return asked.state if asked is not None else unpack(json.loads(text), load(tensors))

    def _done(self) -> None:
        """All ranks have done the order."""
        if self.ranks.is_first:
            self.ranks.forget(f"order {self._number}")
        self._number += 1

    # --- when the site's own code fails ---

    def _together(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except (Exception, SystemExit) as error:
            if isinstance(error, GroupError):
                raise
            self._fail(error)
            raise AllFailed(error) from error

    def _fail(self, error: BaseException) -> None:
        """Wait for all others to fail, too. Raises `RankFailed` if they do not, as some may wait for this one."""
        is_lost = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and loss_of(error) is not None)
        words = f"the client's own code failed on rank {self.ranks.rank} with {where_raised(error)}"
        own = f"failed {self._number} "
        self.ranks.put(f"{own}{self.ranks.rank}", "" if is_lost else f"{type(error).__name__} {words}")
        until = time.monotonic() + (_LOST_S if is_lost else _ALL_FAIL_S)
        found = dict[int, str]()
        while len(found) < self.ranks.size and time.monotonic() < until:
            said = {rank: self.ranks.find(f"{own}{rank}") for rank in range(self.ranks.size) if rank not in found}
            found |= {rank: one for rank, one in said.items() if one is not None}
            time.sleep(_LOOK_S)
        causes = [one for one in found.values() if one]
        if len(causes) == self.ranks.size:
            self._done()
            return
        if causes:
            kind, _, words = causes[0].partition(" ")
            raise RankFailed(
                f"{words}. Other ranks did not fail with it, so they may wait for this one, and the silo ends",
                f"the client's own code failed with {kind}; see the client's log",
            ) from error
        raise lost_rank(error) from error


class _Steps:
    """What rank 0 decides after each step for all ranks: to go on, to stop, or to save first.

    `asked`: on rank 0, the round's plan; None on other ranks. The ranks ask equally often.
    """

    def __init__(self, ranks: Group, asked: LocalPlan | None, checkpoint: Checkpoint) -> None:
        self._ranks, self._asked, self._checkpoint = ranks, asked, checkpoint
        self._asked_at, self._word = time.monotonic(), _GO_ON
        if isinstance(checkpoint, RankCheckpoint):
            checkpoint.must_save = lambda: self._word == _SAVE

    def told_to_stop(self) -> str | None:
        reason = None if self._asked is None else self._reason(self._asked)
        checkpoint = self._checkpoint
        must_save = self._asked is not None and isinstance(checkpoint, RankCheckpoint) and checkpoint.has_waited()
        word = torch.tensor([_STOP if reason else _SAVE if must_save else _GO_ON])
        self._ranks.fill_from_first(word)
        self._word = int(word)
        return (reason or "rank 0 stops") if self._word == _STOP else None

    def _reason(self, asked: LocalPlan) -> str | None:
        now = time.monotonic()
        self._asked_at, step_s = now, now - self._asked_at
        if reason := asked.should_stop():
            return reason
        return "there is no time for another step" if asked.seconds_left < step_s else None


def require_parts(parts: Sequence[BatchPart]) -> None:
    """Raise `GroupError` unless all ranks take whole batches, or together take all parts of them."""
    counts = {one.count for one in parts}
    if len(counts) > 1 or {one.index for one in parts} != set(range(parts[0].count)):
        told = ", ".join(f"rank {rank} takes part {one.index} of {one.count}" for rank, one in enumerate(parts))
        raise GroupError(
            f"the ranks' parts of a batch make no whole: {told}. Give each rank its own (part=rank_part()), or none any"
        )


def follow(rank: SiloRank) -> None:
    """On every rank but 0: do what rank 0 asks until it ends. Raises `GroupError` or `RankFailed` if it cannot."""
    while (order := rank.next_order()).task is not OrderKind.END:
        try:
            rank.do(order)
        except AllFailed as failed:
            log.debug("order %s failed on all ranks: %s", order.task, failed)
    if order.failed:
        raise TrainingFailed(f"rank 0 has ended: {order.words}")
