"""A job whose clients have several ranks each (`train/division.py`): a step is one of a whole client.

The first rank of each client measures, as the only rank of a client does elsewhere, and sums between clients go over
these first ranks. The others follow theirs, so what the ranks of a client add up among themselves is part of its step.
"""

from dataclasses import dataclass, replace

from torch import nn

from umbel.aggregation.plans.tensors import TensorKind
from umbel.aggregation.run.file import RunFile
from umbel.client.app import Client
from umbel.client.datacenter.doctor.job import JobCheck, measured_job
from umbel.client.datacenter.doctor.links import measured_network
from umbel.client.datacenter.doctor.pipeline import have_stages, measured_stages
from umbel.client.datacenter.doctor.stages import PipelineStages
from umbel.client.datacenter.doctor.steps import NotTimed, SeveralRanks, on_one_batch
from umbel.client.datacenter.doctor.sums import USUAL_BYTES, SumTimes, measured_sums
from umbel.client.datacenter.silo.client import SiloClient, leading
from umbel.client.datacenter.silo.rank import SiloRank, follow
from umbel.client.datacenter.train.division import ClientRanks
from umbel.client.local.plan import LocalPlan
from umbel.client.local.results import Evaluation, TrainResult

_ONE_BATCH = "umbel.one_batch"  # an option of a plan, which orders carry to all ranks of a client


@dataclass(frozen=True, slots=True)
class DividedCheck:
    """What the first rank of a client has found."""

    job: JobCheck | None  # None: it could not be timed
    sums: SumTimes | None  # between the first ranks; None for one client
    failed: NotTimed | None = None  # why the job could not be timed
    stages: PipelineStages | None = None  # of this client, if its ranks are the stages of a pipeline


def measured_clients(
    ranks: ClientRanks, file: RunFile, app: Client, hosts: list[str], *, budget_s: float | None = None
) -> DividedCheck | None:
    """Measure the job. All ranks of it must make the call; None on a rank that follows.

    `app`: of this rank. `hosts`: of all ranks of the job. `budget_s`: as for `measured_job`. Raises `ClientError` if
    the ranks cannot work together.
    """
    silo, size = SiloRank(app, ranks.own), ranks.own.size
    repeated = _repeated(ranks, app, file.training.batch_size)
    if repeated is not None:
        silo.app = _WithOneBatch(app, repeated)
    stages = _stages(ranks, file, app)
    if ranks.first_ranks is None:
        follow(silo)
        return None
    first, n_on_host = ranks.first_ranks, hosts.count(hosts[ranks.number * size])
    with leading(silo) as whole:
        several = SeveralRanks(size, app.model, None if repeated is None else _Repeating(whole))
        budget = {} if budget_s is None else {"budget_s": budget_s}
        own, failed = None, None
        try:
            own = measured_job(first, file, whole, n_on_host, several, **budget)
        except NotTimed as error:  # it is the same on all first ranks, and other ranks are still in step
            failed = error
        hosts = hosts[::size]
        n_bytes = USUAL_BYTES if own is None else 4 * own.n_values
        sums = measured_sums(first, measured_network(first, hosts), hosts, n_bytes)
    return DividedCheck(own, sums, failed, stages)


def _stages(ranks: ClientRanks, file: RunFile, app: Client) -> PipelineStages | None:
    """The work of this client's stages; None if they cannot be timed, which the whole client's failure says too."""
    try:
        return measured_stages(ranks.own, file, app) if have_stages(ranks.own, app) else None
    except NotTimed:
        return None


def _repeated(ranks: ClientRanks, app: Client, batch_size: int) -> Client | None:
    """This rank's client with one repeated batch; None if a rank of this client can be given no other data."""
    found = on_one_batch(app, batch_size)
    all_can = all(one == b"1" for one in ranks.own.gather(b"0" if found is None else b"1"))
    return found if all_can else None


class _WithOneBatch(Client):
    """The client on one rank. A plan with an option of the doctor's is for the same client with one repeated batch."""

    def __init__(self, app: Client, repeated: Client) -> None:
        self._app, self._repeated, self.part = app, repeated, app.part

    @property
    def model(self) -> nn.Module:  # type: ignore[override]  # it is read only
        return self._app.model

    @property
    def sample_count(self) -> int:  # type: ignore[override]  # the same
        return self._app.sample_count

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        return self._asked(plan).train(model, _without_option(plan))

    def prepare(self, plan: LocalPlan) -> None:
        self._asked(plan).prepare(_without_option(plan))

    def evaluate(self, model: nn.Module) -> Evaluation | None:
        return self._app.evaluate(model)

    def training_loss(self, model: nn.Module) -> float | None:
        return self._app.training_loss(model)

    def shares(self, name: str) -> TensorKind | None:
        return self._app.shares(name)

    def _asked(self, plan: LocalPlan) -> Client:
        return self._repeated if _ONE_BATCH in plan.options else self._app


class _Repeating(Client):
    """A client of several ranks as a whole, all of which repeat one batch."""

    def __init__(self, whole: SiloClient) -> None:
        self._whole, self.model = whole, whole.model
        self.sample_count = whole.sample_count

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        return self._whole.train(model, _with_option(plan))

    def prepare(self, plan: LocalPlan) -> None:
        self._whole.prepare(_with_option(plan))


def _with_option(plan: LocalPlan) -> LocalPlan:
    return replace(plan, options={**plan.options, _ONE_BATCH: True})


def _without_option(plan: LocalPlan) -> LocalPlan:
    return replace(plan, options={name: one for name, one in plan.options.items() if name != _ONE_BATCH})
