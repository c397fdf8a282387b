"""The project that an experiment's `[flower]` names, and what identifies its code."""

import hashlib
from dataclasses import replace
from pathlib import Path

from umbel.client.errors import AppError
from umbel.client.flower.project import FlowerProject, read_project
from umbel.sim.engines.flower.section import FlowerSection


def project_of(section: FlowerSection, base: Path) -> FlowerProject:
    """The project, with the section's values in its configuration. `base`: for a relative path.

    Raises `ValueError` with a sentence, for a project without ClientApp or ServerApp, too.
    """
    try:
        project = read_project(str(base / section.app))
        for component in ("clientapp", "serverapp"):
            project.component(component)
    except AppError as error:
        raise ValueError(str(error)) from error
    for key in section.run_config:
        if key not in project.run_config:
            keys = ", ".join(project.run_config) or "none"
            raise ValueError(f"flower.run_config sets {key!r}, but the keys of the app's configuration are: {keys}")
    return replace(project, run_config={**project.run_config, **section.run_config})


def digest_of(folder: Path) -> str:
    """The SHA-256 of the app's code and configuration."""
    digest = hashlib.sha256()
    own = (path for path in folder.rglob("*.py") if not any(part[0] == "." for part in path.relative_to(folder).parts))
    for path in sorted([*own, folder / "pyproject.toml"]):
        digest.update(f"{path.relative_to(folder)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
