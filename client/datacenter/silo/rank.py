"""One rank of a silo: it does what rank 0 asks, with the site's own code on its own part of the model."""

import json
import logging
import signal
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from umbel.aggregation.codec.vector_update import GradientProjections
from umbel.aggregation.model.layout import Layout
from umbel.client.app import Client
from umbel.client.datacenter.ranks.apart import ApartFromJob, require_apart
from umbel.client.datacenter.ranks.group import Group, GroupError, is_loss, lost_rank
from umbel.client.datacenter.ranks.names import RANKS, RankNames
from umbel.client.datacenter.ranks.samples import require_same_samples
from umbel.client.datacenter.silo.checkpoint import RankCheckpoint
from umbel.client.datacenter.silo.orders import Order, OrderKind, planned
from umbel.client.datacenter.silo.results import evaluation_as_json, training_as_json
from umbel.client.datacenter.silo.tensors import SiloTensors
from umbel.client.errors import ClientError, RankFailed, TrainingFailed
from umbel.client.files import make_private
from umbel.client.local.batches import WHOLE, BatchPart
from umbel.client.local.checkpoint import Checkpoint
from umbel.client.local.gradients import Projection
from umbel.client.local.plan import LocalPlan
from umbel.client.local.results import TrainResult
from umbel.client.rounds.site_code import evaluated, require_kind
from umbel.client.state.packing import Packing, unpack
from umbel.client.user_code import where_raised

_ALL_SETTLE_S = 10.0  # in which all ranks are through with their work, if they do not wait for the one that has failed
_LOST_S = 1.0  # in which the words of a rank whose code has failed are there, once it is lost
_LOOK_S = 0.1
_ORDER_S = 2.0  # between two looks at whether this rank must leave
_LEAVES_S = 10.0  # torchrun kills a rank 30 s after SIGTERM
_GO_ON, _STOP, _SAVE = range(3)
log = logging.getLogger("umbel.client")


class OrderFailed(Exception):
    """The site's code has failed, but all ranks are still in step. `error`: this rank's, or that of the first rank that
    has one.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class SiloRank:
    """`folder`: for what the ranks keep of a training in progress, each in its own part; None: nothing is kept."""

    def __init__(self, app: Client, ranks: Group, folder: Path | None = None) -> None:
        """Raises `GroupError` for ranks whose models or parts do not fit together, or reach other clients, and
        `OSError` or `StateError` for a folder that cannot be used.
        """
        self.app, self.ranks = app, ranks
        require_apart(app.model, ranks)
        self.parts = [BatchPart(*json.loads(one)) for one in ranks.gather(json.dumps(astuple(app.part)).encode())]
        require_parts(self.parts, ranks.names)
        if app.part != WHOLE:
            require_same_samples(ranks, app)
        self.tensors = SiloTensors(app.model, ranks)
        self._folder = folder
        if folder is not None:
            make_private(folder / str(ranks.rank))
        self._number = 0  # of the next order
        self._apart = ApartFromJob(ranks)

    def next_order(self, must_leave: Callable[[], float | None] = lambda: None) -> Order:
        """Wait for rank 0's next order. `must_leave`: when this rank was told to leave, on the monotonic clock.

        Raises `GroupError` if rank 0 gives no order long after that: it is lost, then.
        """
        began = time.monotonic()
        while (text := self.ranks.find(f"order {self._number}", wait_s=_ORDER_S)) is None:
            if (told := must_leave()) is not None and time.monotonic() >= max(began, told) + _LEAVES_S:
                raise GroupError(
                    f"{self._name(self.ranks.rank)} must leave, and {self._name(0)} has said nothing for "
                    f"{_LEAVES_S:.0f} s: see its log. Start the same command again to go on"
                )
        return Order.from_json(text)

    def give_order(self, order: Order) -> None:
        """On rank 0: write what all ranks are to do next."""
        self.ranks.put(f"order {self._number}", order.to_json())

    def give_last_order(self, order: Order) -> None:
        """On rank 0: write that there is no more work. Others may be through with an order in which this rank has
        failed, and wait for the one after it.
        """
        for number in (self._number, self._number + 1):
            self.ranks.put(f"order {number}", order.to_json())

    def do(self, order: Order, whole: Mapping[str, Tensor] | None = None, asked: LocalPlan | None = None) -> list[Any]:
        """Do an order together with all other ranks; returns what each has to say, in the order of the ranks.

        `whole`: on rank 0, the tensors of the whole model; after a training they have its weights. `asked`: on rank 0,
        the round's plan. Raises `OrderFailed` if the site's code fails, and `GroupError` and `RankFailed` if the ranks
        are no longer together.
        """
        whole = whole or {}
        self.tensors.give(order.loads, whole)
        pulls = self.tensors.parts_of(order.pulls, {} if asked is None else asked.pulls)
        state = self._state(order, asked)
        plan = replace(
            planned(order),
            part=self.app.part,
            pulls=pulls,
            within=self._within(order, asked),
            state=state,
            checkpoint=self._checkpoint(order),
        )
        answers = self._answers_of(lambda: self._said(order, plan, asked))
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
        steps = _Steps(self.ranks, asked, plan.checkpoint, self._apart)
        own = [local for name in order.own if (local := self.tensors.here(name)) is not None]
        norm = self.tensors.whole_norm if self.tensors.is_staged else None
        bound = replace(plan.bound_to(self.app.model, own, norm), told_to_stop=steps.told_to_stop)
        result = self.app.train(self.app.model, bound)
        require_kind(result, TrainResult, "train")
        applied = {"is_applied": bound.rules.is_applied, "by_site": sorted(bound.site_applies)}
        return {"found": training_as_json(result), **applied}

    def _checkpoint(self, order: Order) -> Checkpoint:
        if order.belongs_to is None or self._folder is None:
            return Checkpoint()
        return RankCheckpoint(
            self._folder,
            order.belongs_to,
            self.app.model,
            self.ranks,
            self.app.part,
            self.tensors.n_bytes_here,
            is_staged=self.tensors.is_staged,
        )

    def _within(self, order: Order, asked: LocalPlan | None) -> Mapping[str, Projection]:
        if order.within is None:
            return {}
        made = asked.within if asked is not None else GradientProjections(order.within, Layout.from_json(order.layout))
        return self.tensors.projections(made)

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

    def _answers_of(self, work: Callable[[], Any]) -> list[Any]:
        """Do the work; returns what it returns on each rank."""
        own: BaseException | None = None
        try:
            answer = {"said": work()}
            self._apart.require()
        except (Exception, SystemExit) as error:
            if isinstance(error, GroupError):
                raise
            self._fail(error)
            own, answer = error, {"failed": type(error).__name__, "words": where_raised(error)}
        else:
            self._settle("")
        try:
            answers = [json.loads(one) for one in self.ranks.gather(json.dumps(answer).encode())]
        except GroupError as error:
            raise self._cause_of(error) from error
        failed = {rank: one for rank, one in enumerate(answers) if "failed" in one}
        if not failed:
            return [one["said"] for one in answers]
        self._done()
        first, why = next(iter(failed.items()))
        raise OrderFailed(own or _failed_at(self._name(first), why))

    def _fail(self, error: BaseException) -> None:
        """Wait until all others have settled, too. Raises `RankFailed` if they do not: some may wait for this one."""
        is_lost = is_loss(error)
        self._settle("" if is_lost else f"{type(error).__name__} {where_raised(error)}")
        until = time.monotonic() + (_LOST_S if is_lost else _ALL_SETTLE_S)
        while len(found := self._settled()) < self.ranks.size and time.monotonic() < until:
            time.sleep(_LOOK_S)
        if is_lost or len(found) < self.ranks.size:
            raise self._cause_of(lost_rank(error)) from error

    def _settle(self, failure: str) -> None:
        """Say that this rank is through with its work. `failure`: the error's type and words; empty without one."""
        self.ranks.put(f"settled {self.ranks.rank}", f"{self._number} {failure}")

    def _settled(self) -> dict[int, str]:
        """The failure of each rank that is through with this order."""
        said = {rank: self.ranks.find(f"settled {rank}") for rank in range(self.ranks.size)}
        own = f"{self._number} "
        return {rank: one.removeprefix(own) for rank, one in said.items() if one is not None and one.startswith(own)}

    def _name(self, rank: int) -> str:
        return self.ranks.names.of(rank)

    def _cause_of(self, loss: GroupError) -> ClientError:
        """The error to raise for a lost rank: what it has failed with, if it has said that."""
        for rank, failure in self._settled().items():
            kind, _, words = failure.partition(" ")
            if kind:
                return RankFailed(
                    f"the client's own code failed on {self._name(rank)} with {words}. Other ranks did not fail with "
                    f"it, so they may wait for this one, and the {self.ranks.names.whole} ends",
                    _public(kind),
                )
        return loss


def _failed_at(rank: str, answer: Mapping[str, str]) -> TrainingFailed:
    return TrainingFailed(f"the client's own code failed on {rank} with {answer['words']}", _public(answer["failed"]))


def _public(kind: str) -> str:
    """What the coordinator sees: an error's message may quote data."""
    return f"the client's own code failed with {kind}; see the client's log"


class _Steps:
    """What rank 0 decides after each step for all ranks: to go on, to stop, or to save first.

    `asked`: on rank 0, the round's plan; None on other ranks. The ranks ask equally often.
    """

    def __init__(self, ranks: Group, asked: LocalPlan | None, checkpoint: Checkpoint, apart: ApartFromJob) -> None:
        self._ranks, self._asked, self._checkpoint, self._apart = ranks, asked, checkpoint, apart
        self._asked_at, self._word = time.monotonic(), _GO_ON
        if isinstance(checkpoint, RankCheckpoint):
            checkpoint.must_save = lambda: self._word == _SAVE

    def told_to_stop(self) -> str | None:
        self._apart.require()  # after the first step, because clients with unequal steps would soon wait without end
        reason = None if self._asked is None else self._reason(self._asked)
        checkpoint = self._checkpoint
        must_save = self._asked is not None and isinstance(checkpoint, RankCheckpoint) and checkpoint.has_waited()
        word = torch.tensor([_STOP if reason else _SAVE if must_save else _GO_ON])
        self._ranks.fill_from_first(word)
        self._word = int(word)
        return (reason or f"{self._ranks.names.of(0)} stops") if self._word == _STOP else None

    def _reason(self, asked: LocalPlan) -> str | None:
        now = time.monotonic()
        self._asked_at, step_s = now, now - self._asked_at
        if reason := asked.should_stop():
            return reason
        return "there is no time for another step" if asked.seconds_left < step_s else None


def require_parts(parts: Sequence[BatchPart], names: RankNames = RANKS) -> None:
    """Raise `GroupError` unless all ranks take whole batches, or together take all parts of them."""
    counts = {one.count for one in parts}
    if len(counts) > 1 or {one.index for one in parts} != set(range(parts[0].count)):
        own = "rank_part(mesh)" if names.suffix else "rank_part()"
        told = ", ".join(f"{names.of(rank)} takes part {one.index} of {one.count}" for rank, one in enumerate(parts))
        raise GroupError(f"the ranks' parts of a batch make no whole: {told}. Give each rank its own part: part={own}")


def follow(rank: SiloRank) -> None:
    """On every rank but 0: do what rank 0 asks until it ends, which decides on signals, too. A rank that was told to
    leave, and hears nothing more from rank 0, leaves.

    Raises `GroupError` or `RankFailed` if this rank cannot go on, and `TrainingFailed` if rank 0 has failed.
    """
    with _signals_noted() as told_to_leave:
        rank.tensors.collect({})
        while (order := rank.next_order(told_to_leave)).task is not OrderKind.END:
            try:
                rank.do(order)
            except OrderFailed as failed:
                log.debug("order %s failed: %s", order.task, failed)
    if order.failed:
        raise TrainingFailed(f"{rank.ranks.names.of(0)} has ended: {order.words}")


@contextmanager
def _signals_noted() -> Generator[Callable[[], float | None]]:
    """Neither SIGINT nor SIGTERM ends this block. Its value says when the first SIGTERM came, which torchrun sends to
    all ranks once one of them is lost; None before.
    """
    came: list[float] = []
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: came.append(time.monotonic())),
    }
    try:
        yield lambda: came[0] if came else None
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
