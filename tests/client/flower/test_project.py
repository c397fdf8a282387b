"""A Flower app is found by its folder or by its ClientApp, with its configuration and its overrides."""

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is in the environment of the Flower tests only (make test)")

from tests.client.flower.projects import project
from umbel.client.errors import AppError
from umbel.client.flower.project import config_of, read_project


def test_a_folder_names_both_apps_and_their_configuration(tmp_path: Path) -> None:
    found = read_project(str(project(tmp_path)))
    assert (found.folder, found.name) == (tmp_path, "small")
    assert found.component("clientapp") == "small.client_app:app"
    assert found.component("serverapp") == "small.server_app:app"
    assert found.run_config == {"epochs": 1, "model.width": 4, "name": "small"}


def test_overrides_replace_values_as_flwr_run_does(tmp_path: Path) -> None:
    folder = project(tmp_path / "app")
    assert read_project(str(folder), 'epochs=3 name="other" model.width=8').run_config == {
        "epochs": 3,
        "model.width": 8,
        "name": "other",
    }
    file = tmp_path / "more.toml"
    file.write_text("epochs = 5\n[model]\nwidth = 2\n")
    assert read_project(str(folder), str(file)).run_config == {"epochs": 5, "model.width": 2, "name": "small"}


def test_a_client_app_is_named_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project(tmp_path))
    found = read_project("small.other_app:app")
    assert (found.component("clientapp"), found.component("serverapp")) == (
        "small.other_app:app",
        "small.server_app:app",
    )
    (tmp_path / "pyproject.toml").unlink()
    alone = read_project("small.client_app:app")
    assert alone.run_config == {}
    with pytest.raises(AppError, match=r"there is no pyproject.toml in .*: name the folder of the Flower app"):
        alone.component("serverapp")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read"),
        ("not [ toml", "is no TOML"),
        ("[project]\nname='x'", r"no section \[tool.flwr.app\]"),
        ("[tool.flwr.app.components]\nclientapp = 3", "must look like module:attribute"),
        ("[tool.flwr.app.config]\ndates = [1, 2]", "dates must be a number"),
        ("tool = 1", "tool must be a section, not 1"),
        ("[tool]\nflwr = [1]", "flwr must be a section"),
        ("[tool.flwr]\napp = 3", "app must be a section"),
        ("[tool.flwr.app]\ncomponents = [1]", "components must be a section"),
        ("[tool.flwr.app]\nconfig = 'x'", "config must be a section"),
        ("project = 'x'\n[tool.flwr.app]\na = 1", "project must be a section"),
    ],
)
def test_a_folder_that_is_no_app_is_named_with_what_is_wrong(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(AppError, match=words):
        read_project(str(tmp_path))


def test_what_cannot_be_set_is_named(tmp_path: Path) -> None:
    folder = str(project(tmp_path))
    with pytest.raises(AppError, match="there is no folder nowhere"):
        read_project("nowhere")
    with pytest.raises(AppError, match="'epoch', which the app's configuration does not have; its keys are epochs"):
        read_project(folder, "epoch=3")
    for typo in ("epochs=east", "epochs:2", "epochs = 2", "epochs=2 name", "epochs=", "epochs=2,name=1 x"):
        with pytest.raises(AppError, match="--run-config must be pairs"):
            read_project(folder, typo)
    assert config_of("partition-id=0 num-partitions=4", "--node-config") == {"partition-id": 0, "num-partitions": 4}
