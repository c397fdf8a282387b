"""The run file's section [privacy], checked, and the noise of each round that follows from it.

```toml
[privacy]               # noise in every round's sum hides each client; needs secure aggregation
epsilon = 4.0           # for all rounds of the run together; or noise_multiplier
delta = 1e-6
noise_multiplier = 1.0  # the noise's standard deviation in the sum, divided by the greatest norm of a client's part
clip_norm = 1.0         # the greatest L2 norm of an update; by default, that of [codec]
colluders = 1           # clients of the smallest cohort that may add no noise, or tell others theirs
```
"""

from __future__ import annotations

from dataclasses import dataclass

from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.noise import NoisePlan, require_honest
from umbel.aggregation.privacy.accounting import allowance
from umbel.aggregation.privacy.sensitivity import rounded_bound
from umbel.aggregation.types import NORM_MAX, NORM_MIN, TARGET_MAX, require_within

EPSILON_MIN, EPSILON_MAX = 0.01, 100.0
DELTA_MIN, DELTA_MAX = 1e-12, 0.01
NOISE_MULTIPLIER_MIN, NOISE_MULTIPLIER_MAX = 0.01, 10_000.0


@dataclass(frozen=True, slots=True)
class PrivacySection:
    """Either a budget for the whole run (`epsilon` at `delta`), or a `noise_multiplier` for each round.

    With a noise multiplier, the epsilon that the run has cost is reported at `delta`. The privacy unit is one client.
    """

    epsilon: float | None = None
    delta: float = 1e-6
    noise_multiplier: float | None = None
    clip_norm: float | None = None
    colluders: int = 1
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key is a typing error, so refuse it

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("set either epsilon, a budget for the whole run, or noise_multiplier, not both or neither")
        for name, least, most in (
            ("epsilon", EPSILON_MIN, EPSILON_MAX),
            ("delta", DELTA_MIN, DELTA_MAX),
            ("noise_multiplier", NOISE_MULTIPLIER_MIN, NOISE_MULTIPLIER_MAX),
            ("clip_norm", NORM_MIN, NORM_MAX),
            ("colluders", 0, TARGET_MAX),
        ):
            if (value := getattr(self, name)) is not None:
                require_within(value, name, least, most)

    def clip(self, of_codec: float | None) -> float:
        """The clip norm of [privacy], or `of_codec`, that of [codec]. Raises `ValueError` for none, or for two."""
        found = {one for one in (self.clip_norm, of_codec) if one is not None}
        if not found:
            raise ValueError("set clip_norm in [privacy]: without one, a client's part in the sum has no bound")
        if len(found) > 1:
            raise ValueError("[privacy] and [codec] have different clip_norm; set it in one of them")
        return found.pop()

    def plan(self, *, rounds: int, least: int, n_values: int, inverse_step: float, clip_norm: float) -> NoisePlan:
        """The noise of a round.

        `rounds`: the most sums that the run reveals. `least`: the fewest clients in a revealed sum, which is the larger
        of the run's minimum and the secret sharing's threshold. `n_values`: the levels of an update
        (`Rotated.n_levels`). `inverse_step`: levels per unit of a weight. `clip_norm`: from `clip`, in weights.

        Raises `ValueError` for numbers that no noise satisfies, and `AccountantMissing` for a budget.
        """
        require_honest(least, self.colluders)
        bound = rounded_bound(clip_norm * inverse_step, n_values)
        if self.epsilon is not None:
            variance = allowance(self.epsilon, self.delta, rounds).variance(bound, n_values)
        else:
            assert self.noise_multiplier is not None, "the constructor requires one of the two"
            variance = self.noise_multiplier**2 * bound
        return NoisePlan.of(variance, bound, n_values, least=least, colluders=self.colluders)


def require_private_model(layout: Layout) -> None:
    """Raise `ValueError` for a model with exact tensors, whose values would travel without noise."""
    if exact := [spec.name for spec in layout.owners() if not spec.is_coded]:
        raise ValueError(
            f"the model has tensors that travel exactly ({', '.join(exact[:3])}), which would have no noise: for "
            "[privacy] build it without counters and running statistics, with GroupNorm or LayerNorm, not BatchNorm"
        )
