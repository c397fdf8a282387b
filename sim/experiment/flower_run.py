"""What an experiment with a Flower app may say of its run: the app's own ServerApp says the rest."""

from collections.abc import Mapping
from typing import Any

_OF_WORLD = ("flower", "fleet", "engine")
_OF_RUN: Mapping[str, tuple[str, ...]] = {
    "rounds": ("window_s", "over_selection"),
    "training": ("batch_size", "local_epochs", "local_steps"),
}
_ENGINES = ("auto", "sequential", "processes")
_OF_ENGINE = ("name", "workers")


def run_of_app(run: Mapping[str, Any], world: Mapping[str, Any]) -> dict[str, Any]:
    """The table of the run file. `run`, `world`: the experiment's sections of a run file, and its other ones.

    Raises `ValueError` for a section or a key that would have no effect.
    """
    for section in world:
        if section not in _OF_WORLD:
            raise ValueError(f"[{section}] goes with umbel's own rounds, and [flower] runs the app's own; {_LEAVE_OUT}")
    for section, table in run.items():
        if section in ("name", "seed"):
            continue
        if section not in _OF_RUN:
            raise ValueError(
                f"[{section}] has no effect beside [flower]: the app's own strategy draws nodes and makes the model; "
                f"{_LEAVE_OUT}"
            )
        _require_keys(section, table, _OF_RUN[section])
    engine = world.get("engine", {})
    _require_keys("engine", engine, _OF_ENGINE)
    if isinstance(engine, Mapping) and (name := engine.get("name", "auto")) not in _ENGINES:
        raise ValueError(f"the engine {name!r} cannot run [flower]; choose one of {', '.join(_ENGINES)}")
    _require_honest(world.get("fleet", {}))
    rounds: Mapping[str, Any] = run.get("rounds", {})
    # The ServerApp says how many rounds there are, and how many nodes it asks.
    return {**run, "rounds": {"over_selection": 1.0, **rounds, "count": 1, "target": 1}}


_LEAVE_OUT = "leave it out"


def _require_keys(section: str, table: object, known: tuple[str, ...]) -> None:
    if isinstance(table, Mapping):
        for key in table:  # pyright: ignore[reportUnknownVariableType]
            if key not in known:
                raise ValueError(
                    f"{section}.{key} has no effect beside [flower], which knows only {', '.join(known)} in "
                    f"[{section}]; {_LEAVE_OUT}"
                )


def _require_honest(fleet: object) -> None:
    """Refuse devices that change what they send, which umbel cannot see in a Flower message, or send a part of it."""
    if not isinstance(fleet, Mapping):
        return
    if fleet.get("partial_work"):
        raise ValueError(
            "fleet.partial_work: a call of a Flower app cannot be cut short, so no work is partial; leave it out"
        )
    if "malicious" in fleet:
        raise ValueError(
            "fleet.malicious changes updates of umbel's own, and [flower] has Flower's messages; leave it out, and let "
            "the app's own code be malicious"
        )
