"""The simulator and the demo: what researchers import."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from umbel.sim.experiment.trials import Watcher
    from umbel.sim.simulation import simulate

__all__ = ["Watcher", "simulate"]


def __getattr__(name: str) -> Any:
    """`from umbel.sim import simulate`, or `Watcher`, which loads torch only then."""
    if name == "simulate":
        from umbel.sim.simulation import simulate

        return simulate
    if name == "Watcher":
        from umbel.sim.experiment.trials import Watcher

        return Watcher
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
