"""The work of a job's layers and stages, counted together by all ranks."""

import json

from pydantic import TypeAdapter

from umbel.aggregation.run.file import RunFile
from umbel.client.app import Client
from umbel.client.datacenter.doctor.stages import PipelineStages, StageCost, divided, micro_batches
from umbel.client.datacenter.doctor.steps import NotTimed, StepTimer
from umbel.client.datacenter.ranks.group import Group
from umbel.client.local.bare_names import bare_name

_STAGE, _DIVISION = TypeAdapter(StageCost), TypeAdapter(PipelineStages | str)


def division_of_model(group: Group, timer: StepTimer) -> PipelineStages | str:
    """How the model, of which each rank has a copy, could be divided into a stage for each rank; or why it could not.

    The same on every rank.
    """
    if group.size == 1:
        return "there is only one rank"
    try:
        found = divided(timer.counted_step().layers(), group.size, timer.batch_size)
    except NotTimed as error:
        return f"the work of the layers cannot be counted: {error}"
    return _DIVISION.validate_json(group.from_first(_DIVISION.dump_json(found)))


def have_stages(group: Group, app: Client) -> bool:
    """Whether some rank lacks a tensor that another one has, as the stages of a pipeline do."""
    names = [bare_name(name) for name in app.model.state_dict()]
    by_rank = [set(json.loads(one)) for one in group.gather(json.dumps(names).encode())]
    return any(one != by_rank[0] for one in by_rank)


def measured_stages(group: Group, file: RunFile, app: Client) -> PipelineStages:
    """The work of the stages that the ranks have. The same on every rank.

    Raises `NotTimed` for a client that fails, or does not follow its plan.
    """
    timer = StepTimer(group, file, app)
    timer.probe()  # the first step also prepares the pipeline
    step = timer.counted_step()
    layers = step.layers()
    parameter_bytes = sum(one.nbytes for one in app.model.parameters())
    largest = max(layers, key=lambda one: one.flops)
    mine = StageCost(layers[0].name, layers[-1].name, step.flops, parameter_bytes, largest.name, largest.flops)
    stages = [_STAGE.validate_json(one) for one in group.gather(_STAGE.dump_json(mine))]
    return PipelineStages(tuple(stages), micro_batches(group.size, timer.batch_size))
