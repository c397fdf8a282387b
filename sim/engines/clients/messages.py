"""Work and reports of simulated clients as JSON and arrays, for another process."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from umbel.aggregation.plans.assignment import Assignment
from umbel.aggregation.reports import EvaluationDone, WorkDone
from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.population import CohortData
from umbel.sim.engines.clients.states import ClientStates
from umbel.sim.engines.clients.work import ClientGroup, ClientReport, ClientsWork

_OFFER = TypeAdapter(Assignment)
_WORKS: Mapping[str, TypeAdapter[Any]] = {"train": TypeAdapter(WorkDone), "measure": TypeAdapter(EvaluationDone)}

Arrays = list[NDArray[Any]]


def packed_group(group: ClientGroup) -> tuple[dict[str, Any], Arrays]:
    """A group without its samples, which are shared."""
    fields, arrays = {"has_train": group.train is not None, "has_held": group.held is not None}, [group.numbers]
    for data in (group.train, group.held):
        arrays += [] if data is None else [data.rows, data.starts]
    return fields, arrays


def unpacked_group(
    fields: Mapping[str, Any], arrays: Sequence[NDArray[Any]], samples: SampleSet | None
) -> tuple[ClientGroup, Sequence[NDArray[Any]]]:
    """The inverse of `packed_group`, and the arrays that are left."""
    numbers, *rest = arrays
    found = list[CohortData | None]()
    for key in ("has_train", "has_held"):
        if fields[key]:
            assert samples is not None, "samples are sent before the clients that hold them"
            found.append(CohortData(samples, rest[0], rest[1]))
            rest = rest[2:]
        else:
            found.append(None)
    return ClientGroup(numbers, *found), rest


def packed_work(work: ClientsWork) -> tuple[dict[str, Any], Arrays]:
    """Work without the samples of its clients."""
    fields, arrays = packed_group(work.group)
    offer = _OFFER.dump_json(work.offer).decode()
    return {**fields, "offer": offer, "states": str(work.states.folder)}, [*arrays, work.seeds, work.steps_max]


def unpacked_work(fields: Mapping[str, Any], arrays: Sequence[NDArray[Any]], samples: SampleSet | None) -> ClientsWork:
    """The inverse of `packed_work`."""
    group, (seeds, steps_max) = unpacked_group(fields, arrays, samples)
    states, offer = ClientStates(Path(fields["states"])), _OFFER.validate_json(fields["offer"])
    return ClientsWork(group, offer, seeds.astype(np.uint64), steps_max, states)


def packed_reports(job: str, reports: Sequence[ClientReport]) -> str:
    """Reports as JSON. `job`: "train" or "measure"."""
    return json.dumps([[one.work and _WORKS[job].dump_python(one.work, mode="json"), one.refusal] for one in reports])


def unpacked_reports(job: str, text: str) -> list[ClientReport]:
    """The inverse of `packed_reports`."""
    return [ClientReport(work and _WORKS[job].validate_python(work), refusal) for work, refusal in json.loads(text)]
