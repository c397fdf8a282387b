"""`umbel bench secagg`: what secure aggregation costs in time and bytes, against what none can avoid, and the peer."""

from pathlib import Path

import torch

from umbel.sim.bench.report import Report
from umbel.sim.bench.secagg.bytes import bytes_rows
from umbel.sim.bench.secagg.flower import flower_rows
from umbel.sim.bench.secagg.masks import mask_rows
from umbel.sim.bench.secagg.round import round_rows

_NOTES = (
    "Times: CPU time of this process, one thread, the least of repeated runs; ours and theirs take turns.",
    "Bytes: bodies of messages. The formula of Bonawitz et al. 2017 counts both ways, without signatures.",
)
_NO_PEER = "Flower is not installed here (the extra `flower`), so no row of it."


def measure(*, quick: bool, plot: Path | None) -> Report:
    """Run it all. `quick`: fewer repetitions, and no cohort of 300; `plot`: a picture (PNG) of it is written there."""
    torch.set_num_threads(1)
    masks, rounds, sent = mask_rows(quick=quick), round_rows(quick=quick), bytes_rows(quick=quick)
    peers = flower_rows(repetitions=1 if quick else 3)
    notes = (*_NOTES, *rounds.notes, *(() if peers else (_NO_PEER,)))
    report = Report("secagg", (*masks, *rounds.rows, *sent, *peers), notes)
    if plot is not None:
        from umbel.sim.bench.secagg.plot import draw

        draw(plot, report)
    return report
