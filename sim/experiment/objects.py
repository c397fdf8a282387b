"""Objects that a program gives to `simulate`: the keys of the experiment that they set, and their names.

An object's name in the experiment's text holds a digest, so that a folder of another object's runs is refused. The
digest covers:

- a data set: all its values (SHA-256);
- a module, such as a model or a loss: its class, its printed structure, its values, and its plain attributes;
- a function or a class: its module and name, its own compiled code and that of a class's bases, its defaults, and the
  numbers, texts and arrays that it encloses. Of code of torch and umbel only the name counts. A model that a function
  makes also counts with its first weights, for each seed (`trials.py`);
- a list of clients: the class of each, and its attributes that are models, tensors, arrays, data sets of tensors,
  functions, numbers or texts.

It does not cover functions that the code calls, other objects that it encloses, or data that a client reads itself.
"""

import copy
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeAlias, cast

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from umbel.client.app import Client
from umbel.sim.data.sets.given_data import GivenData, data_set_of, is_for_clients
from umbel.sim.experiment.world import data_digest, tensors_digest
from umbel.sim.given import name_of

GivenModel: TypeAlias = nn.Module | Callable[..., nn.Module] | str
GivenLoss: TypeAlias = Callable[[Any, Any], Tensor] | str
GivenClients: TypeAlias = Sequence[Client] | Callable[..., Client] | str

_DIGITS = 16  # of a digest in a name: the digits of two objects agree by chance once in 10^19
_LIBRARIES = ("torch", "umbel", "builtins")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(slots=True)
class Objects:
    """What `simulate` was given. `keys`: of the experiment, dotted; `found`: the objects by their name in `given`."""

    keys: dict[str, object] = field(default_factory=dict[str, object])
    found: dict[str, object] = field(default_factory=dict[str, object])

    def add(self, key: str, given: object, called: str, digest: str) -> None:
        """Name an object, and set this key of the experiment to the name."""
        attribute = f"{called}-{digest[:_DIGITS]}"
        self.keys[key], self.found[attribute] = name_of(attribute), given


def objects_of(
    model: GivenModel | None, loss: GivenLoss | None, data: GivenData | None, clients: GivenClients | None
) -> Objects:
    """The experiment's keys for these objects; texts stand for themselves. Raises `ValueError` with a sentence."""
    found = Objects()
    if clients is not None and (model is not None or loss is not None):
        raise ValueError("clients bring their own model and loss; leave `model` and `loss` out")
    if model is not None:
        _add(found, "model.name", model, "an nn.Module, or a function that makes one")
    if loss is not None:
        _add(found, "model.loss", loss, "a function of (output, target), or a name")
    if data is not None:
        made = data_set_of(data, loss)
        found.add("data.name", made, "data", data_digest(made))
        if is_for_clients(data):
            found.keys["partition.scheme"] = "natural"
    if isinstance(clients, Sequence) and not isinstance(clients, str):
        _add_clients(found, clients)
    elif clients is not None:
        _add(found, "clients.app", clients, "a list of clients, or a function make_client(number, of)")
    return found


def _add(found: Objects, key: str, given: object, wanted: str) -> None:
    if isinstance(given, str):
        found.keys[key] = given
    elif isinstance(given, Client) or not callable(given):
        raise ValueError(f"{key.partition('.')[0]} is a {type(given).__name__}; give {wanted}")
    else:
        found.add(key, given, _called(given), code_digest(given))


def _add_clients(found: Objects, clients: Sequence[Client]) -> None:
    if not clients:
        raise ValueError("the list of clients is empty; give a Client for each number")
    if strange := [one for one in cast(Sequence[object], clients) if not isinstance(one, Client)]:
        raise ValueError(f"the list of clients has a {type(strange[0]).__name__}; give it Client objects only")
    digest = hashlib.sha256()
    for one in clients:
        digest.update(_client_digest(one).encode())
    found.add("clients.app", ListedClients(tuple(clients)), "clients", digest.hexdigest())
    found.keys["clients.count"] = len(clients)


@dataclass(frozen=True, slots=True)
class ListedClients:
    """A `make_client` of a list: it returns copies, so that every run begins with the clients as they were given.

    A copy shares the data sets that are attributes of its client.
    """

    clients: tuple[Client, ...]

    def __call__(self, number: int, of: int) -> Client:
        one = self.clients[number]
        shared = {id(value): value for value in vars(one).values() if isinstance(value, Dataset)}
        return copy.deepcopy(one, cast(dict[int, Any], shared))


def _client_digest(one: Client) -> str:
    """Of its class and its attributes."""
    digest = hashlib.sha256()
    for part in _parts([type(one), sorted(vars(one).items())], set()):
        digest.update(part)
        digest.update(b"\0")
    return digest.hexdigest()


def _called(given: object) -> str:
    named = given if isinstance(given, FunctionType | MethodType | type) else type(given)
    return named.__name__


def code_digest(given: object) -> str:
    """The SHA-256 of a function, a class or a module, as the module's docstring says."""
    digest = hashlib.sha256()
    for part in _parts(given, set()):
        digest.update(part)
        digest.update(b"\0")
    return digest.hexdigest()


def _parts(given: object, seen: set[int]) -> Iterator[bytes]:
    """The bytes that identify an object. `seen`: functions and classes so far, which may refer to each other."""
    match given:
        case nn.Module():
            yield repr(given).encode()
            yield tensors_digest(given.state_dict()).encode()
            yield from _parts([(type(one), _settings(one)) for one in given.modules()], seen)
        case functools.partial():
            yield from _parts((given.func, given.args, sorted(given.keywords.items())), seen)
        case MethodType():
            yield from _parts((given.__func__, given.__self__), seen)
        case FunctionType() | type():
            yield f"{given.__module__}:{given.__qualname__}".encode()
            if id(given) not in seen and str(given.__module__).partition(".")[0] not in _LIBRARIES:
                seen.add(id(given))
                yield from _parts(_inside(given), seen)
        case CodeType():
            yield given.co_code
            yield from _parts((given.co_names, given.co_varnames, given.co_consts), seen)
        case _:
            yield from _value_parts(given, seen)


def _value_parts(given: object, seen: set[int]) -> Iterator[bytes]:
    """The same of values: numbers, texts, arrays, data sets of tensors, and lists and tables of them."""
    match given:
        case tuple() | list():
            yield str(len(given)).encode()
            for one in cast(Sequence[object], given):
                yield from _parts(one, seen)
        case dict():
            yield from _parts(list(cast(dict[object, object], given).items()), seen)
        case frozenset() | set():
            yield repr(sorted(map(repr, cast(set[object], given)))).encode()
        case Tensor():
            yield tensors_digest([given]).encode()
        case TensorDataset():
            yield tensors_digest(given.tensors).encode()
        case np.ndarray() if not given.dtype.hasobject:
            yield f"{given.dtype} {given.shape}".encode()
            yield given.tobytes()
        case _ if isinstance(given, _PLAIN):
            yield repr(given).encode()
        case _:
            yield f"{type(given).__module__}:{type(given).__qualname__}".encode()


def _inside(given: FunctionType | type) -> list[object]:
    """What counts of a function beside its name; of a class its bases, its own functions and its plain attributes."""
    if isinstance(given, FunctionType):
        enclosed = [_content(cell) for cell in given.__closure__ or ()]
        return [given.__code__, enclosed, given.__defaults__, sorted((given.__kwdefaults__ or {}).items())]
    found = [(name, _function_of(value)) for name, value in sorted(vars(given).items())]
    own = [one for one in found if isinstance(one[1], FunctionType)]
    plain = [one for one in found if isinstance(one[1], _PLAIN) and not one[0].startswith("__")]
    return [list(given.__bases__), own, plain]


def _function_of(value: object) -> object:
    match value:
        case staticmethod() | classmethod():
            return value.__func__
        case property():
            return value.fget
        case _:
            return value


def _settings(one: nn.Module) -> list[tuple[str, object]]:
    """A module's plain attributes, such as a scale; whether it is in training mode does not count."""
    return [
        (name, value)
        for name, value in sorted(vars(one).items())
        if isinstance(value, _PLAIN) and name != "training" and not name.startswith("_")
    ]


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


def named_keys(described: Mapping[str, Any] | None, keys: Mapping[str, object]) -> dict[str, object]:
    """The keys that objects set, and a name and a scheme where the table of the experiment has none."""
    table = described or {}
    scheme = cast(Mapping[str, Any], table.get("partition", {})).get("scheme", "natural")
    if "partition.scheme" in keys and scheme != "natural":
        raise ValueError(
            f'partition.scheme is "{scheme}", but `data` is a list of the data of each client, which are dealt out '
            "already; leave [partition] out"
        )
    return {"name": table.get("name", "simulation"), **keys}
