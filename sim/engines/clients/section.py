"""The `[clients]` section of an experiment's file: the simulated clients are the user's own `Client` objects.

```toml
[clients]
app = "my_hospital:make_client"   # make_client(number, of), or make_client(number, of, data) with [data]
count = 100                       # only without [data]: the clients bring their own
test = "my_hospital:make_tester"  # a Client whose `evaluate` measures new models; default: the clients do
test_clients = 200                # that many clients measure new models; default: all
alive = 50                        # at most this many Client objects in memory; default: by their size
arguments = { depth = 3 }         # more arguments of make_client, and of `test` if it has such parameters
```
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from umbel.aggregation.types import require_within

COUNT_MAX = 10_000_000
Argument = bool | int | float | str
_CHARACTERS_MAX = 10_000  # of an argument
_ARGUMENTS_MAX = 100


@dataclass(frozen=True, slots=True)
class ClientsSection:
    """Which clients; the module explains the keys."""

    app: str
    count: int | None = None
    test: str | None = None
    test_clients: int | None = None
    alive: int | None = None
    arguments: Mapping[str, Argument] = field(default_factory=dict[str, Argument])
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key is a typing error, so refuse it

    def __post_init__(self) -> None:
        for key in ("app", "test"):
            name = getattr(self, key)
            if name is not None and not all(name.partition(":")):
                raise ValueError(
                    f"{key} must look like module:function, such as my_hospital:make_client, not {name!r:.80}"
                )
        for key in ("count", "test_clients", "alive"):
            if (value := getattr(self, key)) is not None:
                require_within(value, key, 1, COUNT_MAX)
        if self.test is not None and self.test_clients is not None:
            raise ValueError("`test` measures new models, so `test_clients` has no effect; leave one of the two out")
        require_within(len(self.arguments), "the number of arguments", 0, _ARGUMENTS_MAX)
        for name, value in self.arguments.items():
            if name in ("number", "of", "data"):
                raise ValueError(f"arguments cannot have {name!r}, which the simulator passes itself")
            if isinstance(value, str):
                require_within(len(value), f"the length of the argument {name!r:.80}", 0, _CHARACTERS_MAX)
