"""One rank of a real process group, as a program: `rank.py RUN_FILES.json OUT`, with the environment of torchrun.

It does each of the runs, in turn, and writes what rank 0 has recorded to OUT/RANK.json.
"""

import json
import sys
import tomllib
from importlib import import_module
from pathlib import Path

from pydantic import TypeAdapter

from umbel.aggregation.run.file import RunFile
from umbel.client.datacenter.ranks.group import joined
from umbel.client.datacenter.train.beginning import agreed, first_checkpoint
from umbel.client.datacenter.train.federation import GroupFederation

_RUN_FILE = TypeAdapter(RunFile)


def main(tasks: list[dict[str, str]], out: Path) -> None:
    found = dict[str, object]()
    with joined(timeout_s=120) as group:
        for task in tasks:
            module, _, name = task["app"].partition(":")
            app = getattr(import_module(module), name)(group.rank, group.size)
            file = _RUN_FILE.validate_python(tomllib.loads(task["run_file"]))
            on = agreed(group, file, app)
            start = first_checkpoint(group, file, on)
            run = GroupFederation(group, on.rank_client, on.sizes, start.standing, start.model)
            records = [
                {
                    "sha256": one.model_sha256,
                    "metrics": dict(one.metrics),
                    "evaluation": dict(one.evaluation),
                    "reported": one.reported,
                    "task": one.task.value,
                }
                for one in (attempt.record for attempt in run.attempts())
            ]
            found[task["name"]] = {
                "records": records,
                "status": run.standing.status.value,
                "reason": run.standing.reason,
            }
    (out / f"{group.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
