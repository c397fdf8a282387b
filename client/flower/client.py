"""A Flower ClientApp as a client of umbel.

```python
from umbel.client import flower_client

client = flower_client("my-flower-app", node_config="partition-id=0 num-partitions=4")
```
"""

import logging
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn

from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.state import State
from umbel.client.errors import AppError, TooLittleDone, TrainingFailed, WorkRefused
from umbel.client.flower.calls import AppCaller, AppFailed, AppReply, AppStopped, Call, CallKind, FirstMessage, Numbers
from umbel.client.flower.process import AppProcess
from umbel.client.flower.project import Config, ConfigValue, config_of, read_project
from umbel.client.local.arrays import Array, ArrayModel, NamedArrays
from umbel.client.local.plan import LocalPlan
from umbel.client.local.results import Evaluation, TrainResult
from umbel.client.state.model_files import layout_in, read_tensors
from umbel.client.training.array_client import ArrayClient

_STATE = "flower.context.state"  # in `plan.state`
log = logging.getLogger("umbel.client")


class FlowerClient(ArrayClient):
    """Calls a ClientApp for each training and each measurement.

    Args:
        caller: calls the app.
        kinds: what the app can be asked.
        model: the first model.
        sample_count: the samples that the site trains on; None: the app is asked when a run needs the number.
    """

    trains_in_one_call = True

    def __init__(
        self, caller: AppCaller, kinds: tuple[CallKind, ...], model: ArrayModel, sample_count: int | None = None
    ) -> None:
        self.model = model
        self._caller, self._kinds, self._known_count = caller, kinds, sample_count
        self._plan = LocalPlan()  # of the round
        self._left_out = set[str]()  # metrics that are no numbers

    @property
    def sample_count(self) -> int:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride]
        """The samples that the site trains on. The app is asked once if nobody has said it.

        Raises `WorkRefused` if it cannot say it.
        """
        if self._known_count is None:
            self._known_count = self._asked_count()
        return self._known_count

    def prepare(self, plan: LocalPlan) -> None:
        self._plan = plan

    def train_arrays(self, arrays: dict[str, Array], plan: LocalPlan) -> tuple[NamedArrays, TrainResult]:
        _require_possible(plan)
        answer = self._call("train", arrays, plan)
        plan.state[_STATE] = np.frombuffer(answer.state, np.uint8).copy()
        count = answer.sample_count or 0
        self._known_count = max(count, self._known_count or 0)
        steps = plan.full_steps_for(math.ceil(count / plan.batch_size))
        return answer.arrays, TrainResult(count, steps, steps, self._metrics(answer.metrics))

    def evaluate_arrays(self, arrays: dict[str, Array]) -> Evaluation | None:
        if "evaluate" not in self._kinds:
            return None
        answer = self._call("evaluate", arrays, self._plan)
        if not answer.sample_count:
            return None  # a legacy client without `evaluate` says so
        return Evaluation(answer.sample_count, self._metrics(answer.metrics))

    def _call(self, kind: CallKind, arrays: Mapping[str, Array], plan: LocalPlan) -> AppReply:
        state = plan.state.get(_STATE)
        call = Call(
            kind,
            _config_of(plan),
            {} if kind == "query" else arrays,
            b"" if state is None else state.tobytes(),
            plan.run,
            plan.client,
            plan.round,
            plan.seed,
        )
        try:
            return self._caller.call(call, plan.should_stop)
        except AppFailed as error:
            raise TrainingFailed(str(error), error.public) from None  # the app's own traceback is in the log
        except AppStopped as stopped:
            raise TooLittleDone(
                f"{stopped}, and a Flower app cannot stop early, so its process was ended and its work is lost"
            ) from stopped

    def _asked_count(self) -> int:
        """The number of samples, by a query, or else by a training whose result is thrown away."""
        if "query" in self._kinds and (count := self._call("query", {}, LocalPlan()).sample_count):
            return count
        log.warning(
            "the run needs this site's sample count, which a Flower app says only after a training: the app trains "
            "once for it now. Give --sample-count to spare this"
        )
        arrays = _array_model(self.model).arrays()
        count = self._call("train", arrays, self._plan).sample_count
        if not count:
            raise WorkRefused("the Flower app trained on no samples, so this site has nothing to give to a run")
        return count

    def _metrics(self, found: Mapping[str, Numbers]) -> dict[str, float]:
        """The metrics that are numbers; the log names the others once."""
        kept = {name: float(value) for name, value in found.items() if not isinstance(value, list)}
        if lists := found.keys() - kept.keys() - self._left_out:
            self._left_out |= lists
            log.warning(
                "metrics that are lists of numbers stay at this site, because umbel has only numbers: %s",
                ", ".join(sorted(lists)),
            )
        return kept


def flower_client(
    app: str,
    run_config: str = "",
    node_config: str = "",
    sample_count: int | None = None,
    model: Path | str | None = None,
) -> FlowerClient:
    """The client of a Flower app, whose ClientApp runs in a process of its own.

    Args:
        app: the folder of the Flower app, with its `pyproject.toml`, or its ClientApp as module:attribute.
        run_config: overrides of the app's configuration, as `flwr run --run-config` takes them.
        node_config: as `flower-supernode --node-config` takes it, such as "partition-id=0 num-partitions=4".
        sample_count: the samples that this site trains on; None: the app is asked if a run needs the number.
        model: the file of the run's first model; None: the first arrays of the app's own ServerApp.

    Raises `AppError` with a sentence.
    """
    project = read_project(app, run_config)
    process = AppProcess(project, config_of(node_config, "--node-config") if node_config else {})
    first = ArrayModel(process.first_message().arrays) if model is None else _model_in(Path(model))
    process.start()
    if "train" not in process.kinds:
        raise AppError(f"the ClientApp {project.component('clientapp')} has no train function (@app.train())")
    return FlowerClient(process, tuple(process.kinds), first, sample_count)


def first_message_of(app: str, run_config: str, seed: int) -> FirstMessage:
    """What the app's ServerApp would send to the first clients that train, with all generators at `seed`.

    Raises `AppError` with a sentence.
    """
    return AppProcess(read_project(app, run_config), {}).first_message(seed)


def _model_in(path: Path) -> ArrayModel:
    """The model in a file. Its bfloat16 tensors are float32 arrays, because Flower's arrays know no bfloat16.

    Raises `AppError` with a sentence.
    """
    try:
        layout_in(path)  # refuses what is no model
        tensors: State = read_tensors(path)[1]
    except (LayoutError, OSError) as error:
        raise AppError(f"cannot read the first model: {error}") from error
    # Flower numbers arrays without names, and such an app reads them by their places. A file has its names sorted.
    names = sorted(tensors, key=int) if all(map(str.isdecimal, tensors)) else [*tensors]
    half = {name: tensors[name].dtype for name in names if tensors[name].dtype is torch.bfloat16}
    arrays = {name: (tensors[name].float() if name in half else tensors[name]).numpy() for name in names}
    return ArrayModel(arrays, half)


def _array_model(model: nn.Module) -> ArrayModel:
    assert isinstance(model, ArrayModel)
    return model


def _config_of(plan: LocalPlan) -> Config:
    """The config of a message: the run's options, and what Flower's own strategies send."""
    found: dict[str, ConfigValue] = {"server-round": plan.round, "lr": plan.learning_rate}
    if plan.proximal_mu or plan.algorithm == "fedprox":  # whose adaptive mu may be 0
        found["proximal-mu"] = plan.proximal_mu
    return {**found, **plan.options}


def _require_possible(plan: LocalPlan) -> None:
    """Raise `WorkRefused` if the run asks for what nobody can do to the gradients inside a ClientApp."""
    if plan.within:
        raise WorkRefused(
            "the run's structured codec needs its share of every gradient, which a Flower app does not show: ask the "
            "operator for another codec"
        )
    if plan.clip_norm is not None:
        raise WorkRefused(
            "the run clips every gradient (clip_norm in [training]), which a Flower app does not show: ask the "
            "operator for a run without it; differential privacy clips whole updates"
        )
    if plan.algorithm == "fednova":
        raise WorkRefused(
            "the run divides each update by the steps that the client has done (FedNova), which a Flower app does not "
            "say: ask the operator for another algorithm"
        )
    if plan.weighs_by_loss:
        raise WorkRefused(
            "the run weighs each client by the loss of the round's model on its training data (q-FedAvg), which a "
            "Flower app does not say: ask the operator for another algorithm"
        )
    if plan.remembers_drift or plan.has_control:
        name = "FedDyn" if plan.remembers_drift else "SCAFFOLD"
        raise WorkRefused(
            f"the run adds to each gradient what the client has kept of its rounds before ({name}), which nobody can "
            "do inside a Flower app: ask the operator for another algorithm"
        )
    if plan.proximal_mu:
        plan.applied_by_site("proximal_mu")  # as with Flower's FedProx, the app adds the term
