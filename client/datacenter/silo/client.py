"""The silo as one client: what rank 0's loop sees of all ranks."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from umbel.aggregation.codec.vector_update import GradientProjections
from umbel.aggregation.plans.tensors import TensorKind
from umbel.client.app import Client
from umbel.client.datacenter.ranks.group import GroupError
from umbel.client.datacenter.silo.orders import Order, OrderKind, told
from umbel.client.datacenter.silo.rank import OrderFailed, SiloRank
from umbel.client.datacenter.silo.results import evaluation_of, one_evaluation, one_training, training_of
from umbel.client.errors import WorkRefused
from umbel.client.local.plan import LocalPlan
from umbel.client.local.results import Evaluation, TrainResult


class SiloClient(Client):
    """`model` has the tensors of the whole model, on the CPU. Everything else is asked of all ranks.

    Only rank 0 makes it. Then the other ranks must `follow`.
    """

    def __init__(self, rank: SiloRank) -> None:
        self._rank = rank
        self.model = rank.tensors.whole()
        self._known = dict[str, tuple[int, int]]()  # by name: which values all ranks have, as place and version

    @property
    def sample_count(self) -> int:  # type: ignore[override]  # it is read only
        return self._rank.app.sample_count

    def begin(self) -> None:
        """Take the ranks' first tensors."""
        self._rank.tensors.collect(self._whole())
        self._note_known()

    def shares(self, name: str) -> TensorKind | None:
        return self._rank.app.shares(name)

    def prepare(self, plan: LocalPlan) -> None:
        self._ask(Order(OrderKind.PREPARE, plan=told(plan), has_state=True), plan)

    def evaluate(self, model: nn.Module) -> Evaluation | None:
        answers = self._ask(self._loading(OrderKind.EVALUATE))
        return one_evaluation(self._rank.parts, [evaluation_of(one) for one in answers], self._rank.ranks.names)

    def training_loss(self, model: nn.Module) -> float | None:
        return next((one for one in self._ask(self._loading(OrderKind.LOSS)) if one is not None), None)

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        """Train on all ranks. Raises `WorkRefused` for what ranks with parts of the model cannot do."""
        if plan.may_accumulate:
            raise WorkRefused("a client of several ranks does not measure its inexactness")
        order = Order(
            OrderKind.TRAIN,
            self._stale(),
            told(plan),
            tuple(plan.pulls),
            own=tuple(sorted(plan.rules.own)),
            has_state=True,
            belongs_to=plan.checkpoint.belongs_to,
        )
        if within := plan.within:
            assert isinstance(within, GradientProjections), "the client's loop makes it of the round's codec"
            order = replace(order, within=within.plan, layout=within.layout.to_json())
        self._known.clear()  # until all ranks have trained, nobody knows what they have
        answers = self._ask(order, plan)
        self._note_known()
        plan.rules.is_applied |= answers[0]["is_applied"]
        plan.site_applies.update(answers[0]["by_site"])
        return one_training(self._rank.parts, [training_of(one["found"]) for one in answers], self._rank.ranks.names)

    def end(self, words: str, failed: bool) -> None:
        """Tell the other ranks that there is no more work, and why."""
        self._rank.give_last_order(Order(OrderKind.END, words=words, failed=failed))

    def _loading(self, task: OrderKind) -> Order:
        order = Order(task, self._stale())
        self._note_known()
        return order

    def _ask(self, order: Order, plan: LocalPlan | None = None) -> list[Any]:
        self._rank.give_order(order)
        try:
            return self._rank.do(order, self._whole(), plan)
        except OrderFailed as failed:
            raise failed.error from None

    def _whole(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()

    def _stale(self) -> tuple[str, ...]:
        """The tensors that have changed since the ranks had them."""
        whole = self._whole()
        return tuple(name for name in self._rank.tensors.names if self._known.get(name) != _version(whole[name]))

    def _note_known(self) -> None:
        self._known = {name: _version(tensor) for name, tensor in self._whole().items()}


def _version(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor._version


@contextmanager
def leading(rank: SiloRank) -> Generator[SiloClient]:
    """Lead the other ranks of a silo, on rank 0: as one client, until the end of this block. They end with it; after an
    error, they say so.
    """
    client = SiloClient(rank)
    client.begin()
    try:
        yield client
    except BaseException as error:
        with suppress(GroupError):  # the store, too, may be lost
            client.end(str(error), failed=True)
        raise
    client.end("there is no more work", failed=False)
