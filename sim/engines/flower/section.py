"""The `[flower]` section of an experiment's file: the simulation runs a Flower app with its own ServerApp.

```toml
[flower]
app = "my_project"             # the folder with the app's pyproject.toml, relative to this file
clients = 100                  # nodes; `num-partitions` of their node_config
samples = 500                  # of a node, until nodes have said how many they have; for the time of their work
run_config = { learning-rate = 0.1 }   # replaces values of the app's own configuration
```
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from umbel.aggregation.types import SAMPLE_COUNT_MAX, require_within
from umbel.client.errors import AppError
from umbel.client.flower.project import flattened

CLIENTS_MAX = 1_000_000
_CONFIG_MAX = 1000


@dataclass(frozen=True, slots=True)
class FlowerSection:
    """Which app; the module explains the keys. `run_config` is flat, as Flower has it: `model.width`."""

    app: str
    clients: int = 10
    samples: int = 500
    run_config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key is a typing error, so refuse it

    def __post_init__(self) -> None:
        require_within(self.clients, "clients", 1, CLIENTS_MAX)
        require_within(self.samples, "samples", 1, SAMPLE_COUNT_MAX)
        try:
            flat = flattened(self.run_config, "flower.run_config")
        except AppError as error:
            raise ValueError(str(error)) from error
        require_within(len(flat), "the number of values in run_config", 0, _CONFIG_MAX)
        object.__setattr__(self, "run_config", flat)
