"""Calls one node after another in this process."""

from collections.abc import Generator, Sequence

from umbel.sim.engines.device import one_thread
from umbel.sim.engines.flower.nodes import Nodes, copied
from umbel.sim.engines.flower.work import NodeAnswer, NodeApp, NodeCall


class SequentialNodes:
    """The engine "sequential"."""

    name = "sequential"

    def __init__(self, app: NodeApp, why: str = "") -> None:
        self.why = why
        self._nodes = Nodes(app)

    def run(self, calls: Sequence[NodeCall]) -> Generator[tuple[int, NodeAnswer]]:
        for position, call in enumerate(calls):
            with one_thread():  # so that all engines give the same bits
                answer, _ = self._nodes.answer(call, copied(call.content.record))
            yield position, answer

    def close(self) -> None:
        """Nothing is held but memory."""
