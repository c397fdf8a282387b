"""A site names its own code or a Flower app, with the flags that belong to it."""

import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from umbel.client.cli.flower import NamedApp, for_the_run_file
from umbel.client.errors import AppError
from umbel.client.flower.project import Config


@pytest.mark.parametrize("named", [{}, {"app": "ward:client", "flower_app": "folder"}])
def test_one_of_the_two_is_named(named: dict[str, str]) -> None:
    with pytest.raises(AppError, match="name your code with --app, or a Flower app with --flower-app: one of the two"):
        NamedApp(named.get("app"), named.get("flower_app"))


@pytest.mark.parametrize(
    ("flag", "given"),
    [
        ("--run-config", {"run_config": "epochs=2"}),
        ("--node-config", {"node_config": "partition-id=0"}),
        ("--sample-count", {"sample_count": 3}),
        ("--model", {"model": Path("first.safetensors")}),
    ],
)
def test_flags_of_flower_need_a_flower_app(flag: str, given: dict[str, object]) -> None:
    with pytest.raises(AppError, match=f"{flag} belongs to --flower-app, and there is none"):
        NamedApp("ward:client", None, **given)  # type: ignore[arg-type]


def test_what_a_strategy_tells_clients_is_said_in_the_words_of_a_run_file() -> None:
    told: Config = {"server-round": 1, "lr": 0.1, "proximal-mu": 0.5, "local steps": 3, "note": 'a "b"'}
    assert for_the_run_file(told) == [
        "for the run file:",
        "[training]",
        "learning_rate = 0.1",
        "proximal_mu = 0.5",
        "[training.options]  # as in round 1: the app gets the same in every round",
        '"local steps" = 3',
        '"note" = "a \\"b\\""',
    ]
    assert for_the_run_file({"server-round": 1}) == []


def test_what_a_strategy_tells_clients_is_toml_whatever_it_is() -> None:
    told: Config = {"lr": "x\n[rounds]", "a.b\x7f": "\U0001f600\x7f\x00", "e": 1e-30, "n": float("nan"), "yes": True}
    found = tomllib.loads("\n".join(for_the_run_file(told)[1:]))["training"]
    assert found["options"].pop("n") != 0
    assert found == {"options": {name: value for name, value in told.items() if name != "n"}}


@pytest.mark.parametrize(
    ("installed", "words"),
    [(None, r'a Flower app needs Flower: pip install "umbel\[flower\]"'), ("1.20.0", "flwr 1.20.0 is too old")],
)
def test_without_a_flower_that_umbel_knows_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str | None, words: str
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr("umbel.client.flower.project.version", version)
    with pytest.raises(AppError, match=words):
        NamedApp(None, str(tmp_path)).make()
