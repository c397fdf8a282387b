"""One rank as a client: it trains or measures with the site's own code, by the functions of the SDK, in memory."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from umbel.aggregation.codec.feedback import Residual
from umbel.aggregation.codec.update_codec import UpdateCodec, codec_for
from umbel.aggregation.codec.vector_update import GradientProjections, VectorUpdateCodec
from umbel.aggregation.errors import UpdateRefused
from umbel.aggregation.model.state import State
from umbel.aggregation.plans.assignment import Assignment
from umbel.aggregation.plans.tensors import TensorRules
from umbel.aggregation.reports import EvaluationDone, WorkDone
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.secagg.numbers.contribution import (
    Contribution,
    ContributionRefused,
    LocalWork,
    contribution,
    nothing,
    seeded_secret,
)
from umbel.aggregation.types import ClientId, RunId
from umbel.client.app import Client
from umbel.client.datacenter.ranks.group import GroupError
from umbel.client.errors import WorkRefused
from umbel.client.files import make_private
from umbel.client.local.devices import seed_generators
from umbel.client.local.plan import LocalPlan
from umbel.client.rounds.inexactness import MissingGamma
from umbel.client.rounds.site_code import Trained, asked_of_site, train_from, with_kept
from umbel.client.rounds.work import (
    NO_HASH,
    NOTHING_HELD_OUT,
    changes_from,
    kept_of_update,
    measure_from,
    unfit_refused,
    with_fair_metrics,
    work_done,
)
from umbel.client.state.model_files import read_tensors, write_tensors
from umbel.client.state.site_state import SiteState, read_state, write_state
from umbel.client.training.kept import control_as_read
from umbel.client.training.shared_state import SharedState
from umbel.client.wire.timing import Bandwidth

_STATE, _LEFT = ".safetensors", ".feedback.safetensors"


@dataclass(frozen=True, slots=True)
class RankWork:
    """What a rank has made in a round. `report` None: it declines, and says why, or its own code has failed."""

    report: WorkDone | EvaluationDone | None
    refusal: str = ""
    failed: str = ""
    update: bytes = field(default=b"", repr=False)  # as a client would upload it
    contribution: Contribution | None = field(default=None, repr=False)  # in its place, of a round with masks' numbers
    change: Callable[[], Iterator[Tensor]] | None = field(default=None, repr=False)  # what was encoded, until the next
    samples_seen: int = 0  # of all steps, where the training has counted them


@dataclass(slots=True)
class _KeptByRank:
    """What the client keeps of a training once its round has made a model."""

    state: SiteState
    left: Residual | None = None


class RankClient:
    """The client of this rank. `name`: as the round machine knows it."""

    def __init__(
        self,
        app: Client,
        rules: TensorRules | None,
        name: ClientId,
        told_to_stop: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`told_to_stop`: why training should end with what is done, None while it may go on."""
        self.app, self.name, self.told_to_stop = app, name, told_to_stop
        self.shared = SharedState(app).under(rules)
        self._first_private, self._missing = self.shared.private(), MissingGamma()
        self._kept, self._waiting = _KeptByRank(SiteState()), _KeptByRank(SiteState())

    def train(self, weights: State, offer: Assignment, composition: Composition | None, deadline: float) -> RankWork:
        """Train from these weights. `composition`: of a round with masks' numbers. `deadline`: on the monotonic clock.

        Raises `TrainingFailed` if the site's code fails.
        """
        seed_generators(offer.seed)
        try:
            self.shared.require_base()
            plan = replace(
                self._asked(offer),
                deadline=deadline,
                within=GradientProjections(offer.codec, self.shared.layout_in(offer.training)),
            )
            done = train_from(self.app, self.shared, weights, plan, self._missing)
            self.shared.require_base()
            with unfit_refused(offer):
                done = with_fair_metrics(self.shared, lambda: weights, offer, done)
                report = work_done(self.app, done, NO_HASH, offer, Bandwidth())
                if composition is not None:
                    return self._contributed(weights, offer, composition, plan, done, report)
                return self._encoded(weights, offer, plan, done, report)
        except (WorkRefused, ContributionRefused, UpdateRefused) as error:
            return RankWork(None, error.public_reason if isinstance(error, WorkRefused) else str(error))

    def measure(self, weights: State, offer: Assignment, composition: Composition | None) -> RankWork:
        """Measure these weights on the client's held-out data. Raises `TrainingFailed` if the site's code fails."""
        seed_generators(offer.seed)
        try:
            self.app.prepare(self._asked(offer))
            found = measure_from(self.app, self.shared, weights, offer)
        except WorkRefused as error:
            return RankWork(None, error.public_reason)
        if composition is None:
            return RankWork(found, "" if found else NOTHING_HELD_OUT)
        held = LocalWork.measured_in(found)
        secret = seeded_secret(offer.seed, offer.attempt)
        return RankWork(
            found or EvaluationDone(1, {}), contribution=contribution(composition, nothing(composition), held, secret)
        )

    def keep(self) -> None:
        """Keep what the last training has left, because its report was accepted and the round has made a model."""
        self._kept = self._waiting

    @property
    def keeps(self) -> bool:
        """Whether it has anything to keep from one round to the next."""
        return bool(self._kept.state) or self._kept.left is not None

    def write(self, folder: Path, run: RunId, version: int) -> None:
        """Write what it keeps, durably, for a run that goes on from this model version."""
        make_private(folder)
        write_state(folder / f"{version}{_STATE}", self._kept.state, run, version)
        if (left := self._kept.left) is not None:
            write_tensors(folder / f"{version}{_LEFT}", left.to_tensors(), {})

    def read(self, folder: Path, version: int) -> None:
        """Keep what was written for this version. Raises `GroupError` if that is missing or damaged."""
        path = folder / f"{version}{_STATE}"
        if not path.exists() or (state := read_state(path)) is None:
            raise GroupError(
                f"{path} is missing or damaged, and it has what this rank keeps from round to round: let all machines "
                "see the same folder (--out), or start again with another one"
            )
        left = folder / f"{version}{_LEFT}"
        try:
            self._kept = _KeptByRank(state, Residual.from_tensors(read_tensors(left)[1]) if left.exists() else None)
        except (SafetensorError, ValueError) as error:
            raise GroupError(f"{left} is damaged: start again with another folder (--out)") from error

    @staticmethod
    def forget_before(folder: Path, version: int) -> None:
        """Remove what was written for older versions."""
        for path in folder.glob("*.safetensors"):
            if (number := path.name.partition(".")[0]).isdigit() and int(number) < version:
                path.unlink(missing_ok=True)

    def _asked(self, offer: Assignment) -> LocalPlan:
        plan = asked_of_site(
            offer.training, offer.seed, offer.share, run=offer.run, number=offer.round, client=self.name
        )
        before = self._kept.state
        own = replace(before, state=copy.deepcopy(before.state))  # the site's code changes it in place
        return replace(with_kept(plan, self.shared, own, self._first_private), told_to_stop=self.told_to_stop)

    def _encoded(self, weights: State, offer: Assignment, plan: LocalPlan, done: Trained, report: WorkDone) -> RankWork:
        codec: UpdateCodec = codec_for(offer.codec, offer.grid, self.shared.layout_in(offer.training))
        change, left = partial(changes_from, self.shared, weights, offer.training, done), None
        if isinstance(codec, VectorUpdateCodec) and offer.codec.feedback:
            fed = codec.encode_fed(change, offer.rank, offer.model.version, self._kept.left)
            update, left = b"".join(fed.pieces), fed.left
        else:
            update = b"".join(codec.encode(change, offer.rank))
        self._wait(plan, kept_of_update(self.shared, update, offer, done), left)
        return RankWork(report, update=update, change=change, samples_seen=done.result.samples_seen)

    def _contributed(
        self,
        weights: State,
        offer: Assignment,
        composition: Composition,
        plan: LocalPlan,
        done: Trained,
        report: WorkDone,
    ) -> RankWork:
        change = partial(changes_from, self.shared, weights, offer.training, done)
        made = contribution(composition, change, LocalWork.of(report), seeded_secret(offer.seed, offer.attempt))
        if (control := done.control) is not None:
            read, layout = made.decoded.to("cpu", torch.float64), composition.layout
            kept = control_as_read(layout, control.scale, lambda start, stop: read[start:stop], control.before)
            done = replace(done, kept=kept)
        self._wait(plan, done, None)
        return RankWork(report, contribution=made, change=change, samples_seen=done.result.samples_seen)

    def _wait(self, plan: LocalPlan, done: Trained, left: Residual | None) -> None:
        self._waiting = _KeptByRank(SiteState(plan.state, self.shared.private(), done.kept), left)
