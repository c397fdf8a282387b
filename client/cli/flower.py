"""The flags of Flower apps, and the client that `--app` or `--flower-app` names."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:  # it imports torch
    from torch import nn

    from umbel.client.app import Client
    from umbel.client.flower.project import Config, ConfigValue

EitherApp = Annotated[
    str | None,
    typer.Option("--app", help="Your code as module:attribute, such as my_hospital:client. This or --flower-app."),
]
FlowerApp = Annotated[
    str | None,
    typer.Option(
        "--flower-app",
        metavar="FOLDER|MODULE:APP",
        help="A Flower app: its folder, or its ClientApp in this folder. It needs the extra flower of umbel.",
    ),
]
RunConfig = Annotated[
    str | None,
    typer.Option(
        "--run-config", metavar="PAIRS", help="Overrides of the Flower app's configuration, as flwr run takes them."
    ),
]
NodeConfig = Annotated[
    str | None,
    typer.Option(
        "--node-config",
        metavar="PAIRS",
        help='The Flower app\'s configuration of this site, such as "partition-id=0 num-partitions=4".',
    ),
]
SampleCount = Annotated[
    int | None,
    typer.Option(
        "--sample-count",
        min=1,
        help="How many samples the Flower app trains on. By default it is asked, which may take a training.",
    ),
]
FirstModel = Annotated[
    Path | None,
    typer.Option(
        "--model", metavar="FILE", help="The run's first model. By default the Flower app's own ServerApp makes it."
    ),
]


@dataclass(frozen=True, slots=True)
class NamedApp:
    """What the flags of a site name. Raises `AppError` unless there is one app, with flags that belong to it."""

    app: str | None
    flower_app: str | None
    run_config: str | None = None
    node_config: str | None = None
    sample_count: int | None = None
    model: Path | None = None

    def __post_init__(self) -> None:
        from umbel.client.errors import AppError

        if (self.app is None) == (self.flower_app is None):
            raise AppError("name your code with --app, or a Flower app with --flower-app: one of the two")
        if self.flower_app is None and (flag := next(iter(self._flower_flags()), None)) is not None:
            raise AppError(f"{flag} belongs to --flower-app, and there is none")

    def make(self) -> "Client":
        """Raises `AppError`."""
        if self.app is not None:
            from umbel.client.user_code import load_app

            return load_app(self.app)
        from umbel.client.flower.client import flower_client

        assert self.flower_app is not None
        return flower_client(
            self.flower_app, self.run_config or "", self.node_config or "", self.sample_count, self.model
        )

    def first_model(self, seed: int) -> "tuple[nn.Module | Client, str]":
        """The first model of a run, and lines for its run file, if the app has any. Raises `AppError`."""
        if self.app is not None:
            from umbel.client.user_code import load_initial_model

            return load_initial_model(self.app, seed), ""
        from umbel.client.flower.client import first_message_of
        from umbel.client.local.arrays import ArrayModel

        assert self.flower_app is not None
        first = first_message_of(self.flower_app, self.run_config or "", seed)
        return ArrayModel(first.arrays), "\n".join([*for_the_run_file(first.config), *_without(first.strategy)])

    def _flower_flags(self) -> Mapping[str, object]:
        given = {
            "--run-config": self.run_config,
            "--node-config": self.node_config,
            "--sample-count": self.sample_count,
            "--model": self.model,
        }
        return {flag: value for flag, value in given.items() if value is not None}


def for_the_run_file(config: "Config") -> list[str]:
    """What the app's strategy tells clients that train, as keys of a run file, in lines."""
    named = {"lr": "learning_rate", "proximal-mu": "proximal_mu"}
    training = {named[key]: value for key, value in config.items() if key in named and _is_rate(value)}
    own = {key: one for key, one in config.items() if key != "server-round" and named.get(key) not in training}
    lines = ["[training]", *(f"{key} = {_as_toml(value)}" for key, value in training.items())] if training else []
    if own:
        lines += ["[training.options]  # as in round 1: the app gets the same in every round"]
        lines += [f"{_as_toml(key)} = {_as_toml(value)}" for key, value in own.items()]
    return ["for the run file:", *lines] if lines else []


def _is_rate(value: "ConfigValue") -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _as_toml(value: "ConfigValue") -> str:
    """As TOML has it: texts as JSON has them, but for two characters; numbers as Python has them."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _without(strategy: str) -> list[str]:
    """What is said of a strategy that is more than a weighted mean; nothing for Flower's FedAvg and FedProx."""
    if not strategy or (strategy.startswith("flwr.") and strategy.endswith((".FedAvg", ".FedProx"))):
        return []
    return [
        f"the app's strategy, {strategy}, does not run on umbel: the coordinator takes the weighted mean of what "
        "clients send, as Flower's FedAvg does"
    ]
