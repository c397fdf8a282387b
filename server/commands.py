"""`umbel serve`: the coordinator as a process. Heavy imports wait until it is asked for."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class LogLevel(StrEnum):
    """How much the coordinator says of itself."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def serve(
    data: Annotated[Path | None, typer.Option(help="Directory for database, models and admin key.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 picks a free one.")] = None,
    blobs: Annotated[
        str | None,
        typer.Option(
            help="s3://bucket/prefix, or a directory, for models and updates; by default, in the data directory."
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    adopt: Annotated[
        bool,
        typer.Option("--adopt", help="Take these blobs and this audit key for those of the database from now on."),
    ] = False,
    log_level: Annotated[LogLevel, typer.Option(case_sensitive=False, help="How much to log.")] = LogLevel.INFO,
) -> None:
    """Run the coordinator. Settings come from flags, then UMBEL_* in the environment, then the TOML file."""
    import tomllib

    from pydantic import ValidationError

    from umbel.server.audit_key import UnfitAuditKey
    from umbel.server.auth import UnfitAdminKey
    from umbel.server.clock_check import ClockApart
    from umbel.server.deployment import UnfitDeployment
    from umbel.server.problems import first_error
    from umbel.server.process import DataInUse, run
    from umbel.server.settings import load_settings

    try:
        settings = load_settings(config, {"data": data, "host": host, "port": port, "blobs": blobs})
        run(settings, log_level, announce=typer.echo, adopt=adopt)
    except ValidationError as error:
        raise typer.BadParameter(first_error(error)) from error
    except tomllib.TOMLDecodeError as error:
        raise typer.BadParameter(f"{config} is no TOML: {error}") from error
    except (ClockApart, DataInUse, UnfitAdminKey, UnfitAuditKey, UnfitDeployment, OSError) as error:
        typer.echo(f"umbel serve: {error}", err=True)
        raise typer.Exit(1) from error
