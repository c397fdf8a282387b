"""The user's `make_client`: how any process makes the `Client` of each number, with its share of the data.

```python
def make_client(number: int, of: int) -> Client: ...                      # it brings its own data
def make_client(number: int, of: int, data: ClientShare) -> Client: ...   # it gets its share of [data]
```
"""

import inspect
import json
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch.utils.data import TensorDataset

from umbel.aggregation.seeds import derive_seed
from umbel.client.app import Client
from umbel.client.errors import AppError
from umbel.client.local.devices import seeded
from umbel.client.user_code import OptionWords, checked_client, find_named, where_raised
from umbel.sim.data.data_set import SampleSet
from umbel.sim.engines.work import EngineError
from umbel.sim.given import only_here, why_only_here

EXAMPLE = (
    "write it as `def make_client(number, of)`, or as `def make_client(number, of, data)` to get a share of [data]; it "
    "returns the Client with this number, from 0 to of - 1"
)
_APP = OptionWords("clients.app", "my_hospital:make_client", "a function make_client(number, of)")
_TEST = OptionWords("clients.test", "my_hospital:make_tester", "a Client")
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ClientShare:
    """The data of one simulated client, as the experiment's partition deals them: pairs of input and target."""

    train: TensorDataset
    holdout: TensorDataset | None  # None: this client holds nothing back


@dataclass(frozen=True, slots=True)
class ClientApp:
    """How any process makes the clients of an experiment. `of` makes it and checks the user's function."""

    name: str  # "module:make_client"
    n_clients: int
    seed: int  # of the run
    takes_data: bool  # whether make_client has the parameter `data`
    arguments: Mapping[str, Any] = field(
        default_factory=dict[str, Any]
    )  # more of make_client's, as JSON can carry them

    @classmethod
    def of(cls, name: str, n_clients: int, seed: int, arguments: Mapping[str, Any], *, has_data: bool) -> "ClientApp":
        """Find the function. `has_data`: whether the experiment has [data]. Raises `EngineError` with a sentence."""
        with _app_errors():
            found = find_named(name, _APP)
        takes_data = _takes_data(found, name, arguments)
        if takes_data and not has_data:
            raise EngineError(
                f"{name} has a parameter `data`, but the experiment has no data to deal out; add the sections [data] "
                "and [partition], or leave the parameter out"
            )
        if has_data and not takes_data:
            raise EngineError(
                f"the experiment has [data], but {name} has no parameter `data`, so its clients would never see them; "
                "add the parameter, or replace [data] and [partition] by clients.count"
            )
        return cls(name, n_clients, seed, takes_data, arguments)

    def make(self, number: int, share: ClientShare | None) -> Client:
        """The client of this number. The process's generators are seeded meanwhile, so that it is the same each time.

        Raises `EngineError` if the user's code fails, or returns no usable client.
        """
        return self._made(number, share, derive_seed(self.seed, f"client {number}"))

    def make_first(self, share: ClientShare | None) -> Client:
        """Client 0, whose model's weights begin the run. The generators have the run's seed, as in `umbel model init
        --seed`.
        """
        return self._made(0, share, self.seed)

    def _made(self, number: int, share: ClientShare | None, seed: int) -> Client:
        with _app_errors():
            make = cast(Callable[..., object], find_named(self.name, _APP))
            data = {"data": share} if self.takes_data else {}
            with seeded(seed, _CPU), _own_code(f"{self.name} could not make client {number}"):
                made = make(number, self.n_clients, **data, **self.arguments)
            return checked_client(made, self.name)

    @property
    def is_only_here(self) -> bool:
        """Whether other processes cannot import the user's function."""
        return only_here(self.name) is not None

    def to_json(self) -> str:
        """Raises `EngineError` for a function that another process cannot import."""
        if self.is_only_here:
            raise EngineError(f'{why_only_here(self.name)}; or set name = "sequential" in [engine]')
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "ClientApp":
        return cls(**json.loads(text))


def measuring_client(
    name: str, test: SampleSet | None, seed: int, arguments: Mapping[str, Any] | None = None
) -> Client:
    """The client that measures new models: what `name` names, or what it returns. It gets the test set of [data] if it
    has a parameter `data`, and those of the `arguments` of make_client for which it has a parameter. Raises
    `EngineError`.
    """
    with _app_errors():
        found = find_named(name, _TEST)
        if isinstance(found, Client):
            return found
        if not callable(found):
            raise EngineError(f"{name} is a {type(found).__name__}; name a Client, or a function that returns one")
        known = {**(arguments or {}), **({} if test is None else {"data": test.pairs})}
        wanted = {key: value for key, value in known.items() if key in inspect.signature(found).parameters}
        with seeded(seed, _CPU), _own_code(f"{name} could not make the client that measures models"):
            made = found(**wanted)
        return checked_client(made, name)


def _takes_data(found: object, name: str, arguments: Mapping[str, Any]) -> bool:
    """Raises `EngineError` unless it can be called as make_client."""
    if isinstance(found, Client):
        raise EngineError(f"{name} is one Client, but each simulated client needs its own; {EXAMPLE}")
    if not callable(found):
        raise EngineError(f"{name} is a {type(found).__name__}; {EXAMPLE}")
    signature = inspect.signature(found)
    takes_data = "data" in signature.parameters
    try:
        signature.bind(0, 1, **({"data": None} if takes_data else {}), **arguments)
    except TypeError as error:
        given, remedy = "a client's number and the number of clients", EXAMPLE
        if arguments:
            given += f" and the arguments {', '.join(arguments)}"
            remedy = f"change these arguments in [clients], or {EXAMPLE}"
        raise EngineError(f"{name}{signature} cannot be called with {given} ({error}); {remedy}") from error
    return takes_data


@contextmanager
def _app_errors() -> Generator[None]:
    try:
        yield
    except AppError as error:
        raise EngineError(str(error)) from error


@contextmanager
def _own_code(what: str) -> Generator[None]:
    """Raise `EngineError` with `what` for any error of the user's code."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise EngineError(f"{what}: {where_raised(error)}") from error
