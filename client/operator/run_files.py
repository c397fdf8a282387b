"""Run files, checked on the operator's machine: each error names the file, the section and the key."""

import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

from pydantic import TypeAdapter

from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.of_experiment import run_part
from umbel.client.toml_file import close_to, read_toml

_RUN_FILE = TypeAdapter(RunFile)
_SECTIONS = {  # the type of an optional section is such as PrivacySection | None
    name: kind
    for name, hint in get_type_hints(RunFile).items()
    for kind in (hint, *get_args(hint))
    if is_dataclass(kind) and name != "override"
}
_KEYS = {section: [field.name for field in fields(kind)] for section, kind in {"": RunFile, **_SECTIONS}.items()}
BYTES_MAX = 1 << 20


def read_run_file(path: Path) -> tuple[str, RunFile]:
    """The file's text, and the run that it describes: of an experiment's file, without what only the simulator reads.

    Raises `OSError`, or `ValueError` with a sentence that names the file.
    """
    return read_toml(path, _RUN_FILE, BYTES_MAX, "run file", run_file_hint, lambda table: run_part(table)[0])


def only_simulated(text: str) -> list[str]:
    """The sections and keys of this text that have no effect on a run, because only `umbel simulate` reads them."""
    return run_part(tomllib.loads(text))[1]


def run_file_hint(section: str, key: str) -> str:
    """The section that an unknown key belongs in, or the key that was probably meant; empty if neither is known."""
    homes = [home for home, keys in _KEYS.items() if key in keys and home != section]
    if homes:
        return f" (it belongs {f'in [{homes[0]}]' if homes[0] else 'at the top, before the first section'})"
    return close_to(key, _KEYS.get(section, []))
