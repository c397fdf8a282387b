"""The project that an experiment's `[flower]` names, and what identifies its code."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from umbel.client.errors import AppError
from umbel.client.flower.project import FlowerProject, read_project
from umbel.sim.engines.flower.section import FlowerSection
from umbel.sim.experiment.file import TrialSpec
from umbel.sim.experiment.rehearsal import naming_point


def require_apps(trials: Sequence[TrialSpec], base: Path) -> None:
    """Raise the `ValueError` that `project_of` would raise for the run of any point, with the point's name."""
    points = {trial.label: trial.flower for trial in trials}  # seeds have the same app
    for label, section in points.items():
        if section is not None:
            with naming_point(label):
                project_of(section, base)


def project_of(section: FlowerSection, base: Path) -> FlowerProject:
    """The project, with the section's values in its configuration. `base`: for a relative path.

    Raises `ValueError` with a sentence, for a project without ClientApp or ServerApp, too.
    """
    project = found_project(base / section.app)
    for key in section.run_config:
        if key not in project.run_config:
            keys = ", ".join(project.run_config) or "none"
            raise ValueError(f"flower.run_config sets {key!r}, but the keys of the app's configuration are: {keys}")
    return replace(project, run_config={**project.run_config, **section.run_config})


def found_project(folder: Path) -> FlowerProject:
    """The project of an app that can be simulated. Raises `ValueError` with a sentence."""
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {folder}: name the folder of a Flower app, which holds its pyproject.toml"
        )
    try:
        project = read_project(str(folder))
        for component in ("clientapp", "serverapp"):
            project.component(component)
    except AppError as error:
        raise ValueError(str(error)) from error
    return project


def digest_of(folder: Path) -> str:
    """The SHA-256 of the app's code and configuration."""
    digest = hashlib.sha256()
    found = (path for path in folder.rglob("*.py") if path.is_file())
    own = (path for path in found if not any(part[0] == "." for part in path.relative_to(folder).parts))
    for path in sorted([*own, folder / "pyproject.toml"]):
        digest.update(f"{path.relative_to(folder)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
