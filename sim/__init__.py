"""The simulator and the demo."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from umbel.sim.simulation import simulate

__all__ = ["simulate"]


def __getattr__(name: str) -> Any:
    """`from umbel.sim import simulate`, which loads torch only then."""
    if name == "simulate":
        from umbel.sim.simulation import simulate

        return simulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
