"""The flags of Flower apps, and the client that `--app` or `--flower-app` names."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:  # it imports torch
    from torch import nn

    from umbel.client.app import Client
    from umbel.client.flower.project import Config

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
        return ArrayModel(first.arrays), for_the_run_file(first.config)

    def _flower_flags(self) -> Mapping[str, object]:
        given = {
            "--run-config": self.run_config,
            "--node-config": self.node_config,
            "--sample-count": self.sample_count,
            "--model": self.model,
        }
        return {flag: value for flag, value in given.items() if value is not None}


def for_the_run_file(config: "Config") -> str:
    """What the app's strategy tells clients that train, as keys of a run file."""
    own = {key: value for key, value in config.items() if key not in ("server-round", "lr", "proximal-mu")}
    lines = [f"learning_rate = {config['lr']}"] if "lr" in config else []
    lines += [f"proximal_mu = {config['proximal-mu']}"] if "proximal-mu" in config else []
    if lines:
        lines = ["[training]", *lines]
    if own:
        lines += ["[training.options]", *(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in own.items())]
    return "\n".join(["for the run file:", *lines]) if lines else ""
