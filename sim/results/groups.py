"""How well a model does for each holder of data by nature: each hospital, on the patients whom nobody trains on."""

from collections.abc import Mapping

from umbel.sim.data.data_set import DataSet
from umbel.sim.federation.local_work import Meter
from umbel.sim.federation.versions import ModelState

GROUPS_MAX = 32  # of more, nobody reads a table


def scores_by_group(meter: Meter, model: ModelState, data: DataSet | None) -> dict[str, Mapping[str, float]]:
    """By name, the means over what each holder holds back, whether it takes part in the run or not.

    Nothing for data that are nobody's by nature, of which nothing is held back, or that more than `GROUPS_MAX` hold.
    """
    if data is None or data.natural is None or len(data.natural.names) > GROUPS_MAX:
        return {}
    meter.load(model.layout.full_state(model.published))
    held = zip(data.natural.names, data.natural.holdouts, strict=True)
    return {name: meter.of(data.samples.take(rows)) for name, rows in held if len(rows)}
