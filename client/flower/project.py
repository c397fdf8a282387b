"""Which Flower app a name stands for, and the configuration that Flower would give it."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from umbel.client.errors import AppError

ConfigValue: TypeAlias = bool | int | float | str
Config: TypeAlias = Mapping[str, ConfigValue]
Component: TypeAlias = Literal["clientapp", "serverapp"]
_FILE = "pyproject.toml"
_OLDEST = (1, 38)  # as pyproject.toml has it
_PAIRS = re.compile(r"""\s*([^\s=]+=('[^']*'|"[^"]*"|[^\s'"]+)(\s+|$))+""")
_NAMES = {"clientapp": "ClientApp", "serverapp": "ServerApp"}


@dataclass(frozen=True, slots=True)
class FlowerProject:
    """A folder with a Flower app. `components`: "module:attribute" of each. `run_config`: flat, with overrides.

    `name`: in `[project]`, or else the folder's.
    """

    folder: Path
    components: Mapping[Component, str]
    run_config: Config
    name: str

    def component(self, wanted: Component) -> str:
        """Raises `AppError` with a sentence if the project does not name it."""
        if (found := self.components.get(wanted)) is None:
            if not (self.folder / _FILE).exists():
                raise AppError(
                    f"there is no {_FILE} in {self.folder}, so the {_NAMES[wanted]} is not known: name the folder of "
                    "the Flower app, or start umbel there"
                )
            raise AppError(
                f"{self.folder / _FILE} does not name the {_NAMES[wanted]}: add a line such as "
                f'{wanted} = "my_app.{wanted[:-3]}_app:app" to its section [tool.flwr.app.components]'
            )
        return found


def require_flower() -> None:
    """Raise `AppError` unless a version of flwr that umbel knows is installed."""
    try:
        found = version("flwr")
    except PackageNotFoundError as error:
        raise AppError('a Flower app needs Flower: pip install "umbel[flower]"') from error
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if numbers < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise AppError(f'flwr {found} is too old for umbel, which needs {oldest} or newer: pip install "umbel[flower]"')


def read_project(name: str, run_config: str = "") -> FlowerProject:
    """The app that `name` stands for, with these overrides of its configuration, as `flwr run --run-config` takes them.

    `name`: a folder with a `pyproject.toml`, or `module:attribute` of a ClientApp in the current folder, whose
    `pyproject.toml` may have the configuration. Raises `AppError` with a sentence.
    """
    require_flower()
    folder = Path(name)
    if folder.is_dir():
        whole = _table(folder / _FILE)
        table = _flower_table(folder / _FILE, whole)
        if not table:
            raise AppError(f"{folder / _FILE} has no section [tool.flwr.app], so {folder} is no Flower app")
        components = _components(folder / _FILE, table)
    elif ":" in name:
        folder = Path.cwd()
        whole = _table(folder / _FILE) if (folder / _FILE).exists() else {}
        table = _flower_table(folder / _FILE, whole)
        components = {**_components(folder / _FILE, table), "clientapp": name}
    else:
        raise AppError(
            f"there is no folder {name}: name the folder of a Flower app, which holds its {_FILE}, or the ClientApp as "
            "module:attribute, such as my_app.client_app:app"
        )
    known = flattened(_section(folder / _FILE, table, "config"), folder / _FILE)
    folder, own_name = folder.absolute(), _section(folder / _FILE, whole, "project").get("name")
    return FlowerProject(folder, components, {**known, **overrides(run_config, known)}, str(own_name or folder.name))


def overrides(text: str, known: Config) -> Config:
    """The values of `key=value` pairs, or of a TOML file. Raises `AppError` for a key that is not among the `known`."""
    if not text:
        return {}
    is_file = text.endswith(".toml")
    found = flattened(_table(Path(text)), Path(text)) if is_file else config_of(text, "--run-config")
    for key in found:
        if key not in known:
            keys = f"its keys are {', '.join(known)}" if known else "it has no [tool.flwr.app.config]"
            raise AppError(f"--run-config sets {key!r}, which the app's configuration does not have; {keys}")
    return found


def config_of(text: str, option: str) -> Config:
    """The values of `key=value` pairs between spaces, as Flower reads them. Raises `AppError`."""
    from flwr.common.config import parse_config_args

    words = f"{option} must be pairs like 'epochs=2 name=\"east\"', with texts in quotation marks, not {text!r}"
    if not _PAIRS.fullmatch(text):  # Flower would leave out what is no pair
        raise AppError(words)
    try:
        return dict(parse_config_args([text]))
    except Exception as error:
        raise AppError(words) from error


def flattened(table: Mapping[str, Any], where: Path | str, prefix: str = "") -> dict[str, ConfigValue]:
    """A table of tables with keys such as `model.width`. Raises `AppError` for a value that Flower does not know."""
    found = dict[str, ConfigValue]()
    for key, value in table.items():
        match value:
            case Mapping():
                found |= flattened(value, where, f"{prefix}{key}.")
            case bool() | int() | float() | str():
                found[f"{prefix}{key}"] = value
            case _:
                raise AppError(f"{where}: {prefix}{key} must be a number, a text, true, false, or a table of these")
    return found


def _flower_table(path: Path, whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section [tool.flwr.app], or an empty one."""
    for key in ("tool", "flwr", "app"):
        whole = _section(path, whole, key)
    return whole


def _section(path: Path, table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The table that `table` has under this key, or an empty one. Raises `AppError` for anything but a table."""
    found: object = table.get(key, {})
    if not isinstance(found, Mapping):
        raise AppError(f"{path}: {key} must be a section, not {found!r:.80}")
    return cast(Mapping[str, Any], found)


def _table(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise AppError(f"{path} is no TOML: {error}") from error
    except OSError as error:
        raise AppError(f"cannot read {path}: {error.strerror}") from error


def _components(path: Path, table: Mapping[str, Any]) -> dict[Component, str]:
    found = dict[Component, str]()
    for name in _NAMES:
        value = _section(path, table, "components").get(name)
        if value is not None:
            if not isinstance(value, str) or ":" not in value:
                raise AppError(f"{path}: {name} must look like module:attribute, not {value!r}")
            found[name] = value  # type: ignore[index]  # a key of `_NAMES`
    return found
