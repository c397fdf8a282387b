"""What a run file says: the run as its owner wrote it, in TOML, checked and with defaults filled in.

```toml
name = "ward-triage"
seed = 7

[rounds]
count = 20              # committed rounds until the run is finished
target = 8              # reports a round needs to close early
minimum = 4             # reports a round needs at the window's end
over_selection = 1.25   # ask ceil(target * over_selection) clients
window_s = 600          # the one timeout
weighting = "samples"   # or "proportional"

[training]
local_epochs = 1        # or local_steps
batch_size = 32
learning_rate = 0.05
proximal_mu = 0.0       # FedProx
evaluate = false        # clients measure each model on their own held-out data

[aggregation]
server_learning_rate = 1.0
max_abs = 64.0          # bound of one coordinate of a weight change
sample_count_max = 1048576
```

Plain dataclasses, so that the server, the operator's command line and the simulator read the same file with pydantic's
`TypeAdapter(RunFile)` and get the same errors.
"""

import math
from dataclasses import dataclass, field

from umbel.aggregation.types import RoundPlan, RunId, TrainingPlan, Weighting, require_slug

ROUNDS_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class RoundsSection:
    """How rounds are run; see `RoundPlan`."""

    count: int
    target: int
    minimum: int = 1
    over_selection: float = 1.3
    window_s: float = 600.0
    weighting: Weighting = Weighting.SAMPLES
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key is a typing error, so refuse it

    def __post_init__(self) -> None:
        if not 1 <= self.count <= ROUNDS_MAX:
            raise ValueError(f"count must lie between 1 and {ROUNDS_MAX}, not {self.count}")


@dataclass(frozen=True, slots=True)
class AggregationSection:
    """How updates become the next model. `server_learning_rate`: 1 is FedAvg."""

    server_learning_rate: float = 1.0
    max_abs: float = 64.0
    sample_count_max: int = 1 << 20
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above

    def __post_init__(self) -> None:
        if not (math.isfinite(self.server_learning_rate) and self.server_learning_rate > 0):
            raise ValueError(f"server_learning_rate must be positive, not {self.server_learning_rate}")


@dataclass(frozen=True, slots=True)
class RunFile:
    """A whole run file. Its constructor refuses what no round could be planned from."""

    name: str
    rounds: RoundsSection
    seed: int = 0
    training: TrainingPlan = field(default_factory=TrainingPlan)
    aggregation: AggregationSection = field(default_factory=AggregationSection)
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above

    def __post_init__(self) -> None:
        require_slug(self.name, "name")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed must lie between 0 and 2^63 - 1, not {self.seed}")
        self.round_plan(1, 1)

    def round_plan(self, number: int, attempt: int) -> RoundPlan:
        """The plan of one attempt at one round, both counted from 1."""
        return RoundPlan(
            run=RunId(self.name),
            number=number,
            attempt=attempt,
            target=self.rounds.target,
            minimum=self.rounds.minimum,
            over_selection=self.rounds.over_selection,
            window_s=self.rounds.window_s,
            weighting=self.rounds.weighting,
            sample_count_max=self.aggregation.sample_count_max,
            max_abs=self.aggregation.max_abs,
            seed=self.seed,
        )
