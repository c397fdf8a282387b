"""The run that an experiment's file describes: the file without what only the simulator reads."""

from collections.abc import Mapping
from typing import Any

TOP_KEYS = ("seeds", "target_accuracy", "stop_at_target", "best_over", "sweep")
WORLD_KEYS = ("data", "model", "partition", "fleet", "engine", "measure", "clients", "sites", "flower")


def run_part(table: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The table of a run file, and the sections and keys that were left out of it. If `seeds` has one seed, it becomes
    the run's `seed`.

    Raises `ValueError` for an experiment of several runs.
    """
    if table.get("sweep"):
        raise ValueError("[sweep] describes several runs; leave it out, and write the values that you have chosen")
    run = {key: value for key, value in table.items() if key not in (*TOP_KEYS, *WORLD_KEYS)}
    if "seeds" in table:
        seeds = table["seeds"]
        if "seed" in table or not isinstance(seeds, list) or len(seeds) != 1:  # pyright: ignore[reportUnknownArgumentType]
            raise ValueError("a run has one seed: write `seed` with one number, and leave `seeds` out")
        run["seed"] = seeds[0]
    left_out = [f"[{key}]" if key in WORLD_KEYS else key for key in table if key not in run and key != "seeds"]
    return run, left_out
