"""The `[data]` section of an experiment's file: which data set, and how much of it.

```toml
[data]
name = "mnist"          # "digits", "breast-cancer", "mnist", "fashion-mnist", "heart-disease", "shakespeare",
                        # "synthetic", or one's own: "module:function"
train_limit = 10000     # at most so many samples to train on, drawn from the seed; by default, all
test_limit = 1000       # at most so many to measure on
test_share = 0.2        # of each class is held out, where a data set has no test part: digits, breast-cancer

[data]
name = "synthetic"      # Synthetic(alpha, beta); its clients are made, and need no [partition]
clients = 1000
alpha = 1.0             # changes no sample: `synthetic.py` says why
beta = 1.0
iid = false             # one model and one distribution for all
samples = 20            # that each trains on; by default, the paper's law of sizes, with its long tail
```
"""

from dataclasses import dataclass

from umbel.aggregation.types import require_within
from umbel.sim.data.sets.synthetic import SyntheticLaw

SYNTHETIC = "synthetic"
CARRIED = ("digits", "breast-cancer")
FROM_FILES = ("mnist", "fashion-mnist", "heart-disease", "shakespeare")
NAMES = (*CARRIED, *FROM_FILES, SYNTHETIC)
LIMIT_MAX = 1 << 32
SHARE_MIN, SHARE_MAX = 0.001, 0.9
_OF_SYNTHETIC = ("clients", "alpha", "beta", "iid", "samples")
_OF_DEALT = ("train_limit", "test_limit")


@dataclass(frozen=True, slots=True)
class DataSection:
    """Which data set; None for what follows from its name. See the module for what each key means."""

    name: str
    train_limit: int | None = None
    test_limit: int | None = None
    test_share: float | None = None
    clients: int | None = None
    alpha: float | None = None
    beta: float | None = None
    iid: bool | None = None
    samples: int | None = None
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key is a typing error, so refuse it

    def __post_init__(self) -> None:
        if self.name not in NAMES and not self.is_own:
            raise ValueError(f"name must be one of {', '.join(NAMES)}, or module:function, not {self.name!r:.80}")
        for limit in _OF_DEALT:
            if (value := getattr(self, limit)) is not None:
                require_within(value, limit, 1, LIMIT_MAX)
        if self.test_share is not None:
            require_within(self.test_share, "test_share", SHARE_MIN, SHARE_MAX)
            if self.name not in CARRIED:
                raise ValueError(f"{self.name} has a test part of its own; leave test_share out")
        misplaced = _OF_DEALT if self.is_synthetic else _OF_SYNTHETIC
        if said := [key for key in misplaced if getattr(self, key) is not None]:
            whose = "is not for" if self.is_synthetic else 'is for name = "synthetic", not for'
            raise ValueError(f"{said[0]} {whose} {self.name}; leave it out")
        if self.is_synthetic:
            self.law()

    @property
    def is_own(self) -> bool:
        """Whether it names the user's own code."""
        return ":" in self.name

    @property
    def is_synthetic(self) -> bool:
        return self.name == SYNTHETIC

    def law(self) -> SyntheticLaw:
        """The law of synthetic data. Raises `ValueError` for numbers beyond their bounds."""
        said = {"n_clients": self.clients, "alpha": self.alpha, "beta": self.beta, "is_iid": self.iid}
        return SyntheticLaw(
            **{key: value for key, value in said.items() if value is not None},  # type: ignore[arg-type]  # as named
            samples=self.samples,
        )
