"""`umbel serve`: runs the coordinator. Heavy imports wait until the command runs."""

from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pydantic import ValidationError


class LogLevel(StrEnum):
    """The least level that the coordinator logs."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def serve(
    data: Annotated[
        Path | None,
        typer.Option(show_default="umbel-data", help="Directory for the database, models and the admin key."),
    ] = None,
    host: Annotated[str | None, typer.Option(show_default="127.0.0.1", help="Address to listen on.")] = None,
    port: Annotated[
        int | None, typer.Option(show_default="8750", help="Port to listen on; 0 picks a free one.")
    ] = None,
    blobs: Annotated[
        str | None,
        typer.Option(
            show_default="in the data directory", help="s3://bucket/prefix, or a directory, for models and updates."
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    adopt: Annotated[
        bool,
        typer.Option(
            "--adopt",
            help="Use this after you changed the blob store or the audit key on purpose: the database then records "
            "the new ones.",
        ),
    ] = False,
    log_level: Annotated[
        LogLevel, typer.Option(case_sensitive=False, help="The lowest level that is logged.")
    ] = LogLevel.INFO,
) -> None:
    """Run the coordinator. Settings come from flags, then UMBEL_* in the environment, then the TOML file.

    Settings that have no flag: database_url (PostgreSQL instead of SQLite), admin_key_file, audit_key_file,
    json_bytes_max, chunk_bytes_max, incoming_bytes_max, model_bytes_max, check_ins_per_s_max, download_links,
    model_cache_bytes_max, s3_endpoint, s3_public_endpoint, s3_region, s3_access_key_id, s3_secret_access_key,
    s3_allow_http. docs/reference/settings.md explains them and has their defaults.
    """
    import tomllib

    from pydantic import ValidationError

    from umbel.server.serve.process import CannotStart, run
    from umbel.server.settings import load_settings
    from umbel.server.store.database import UnfitDatabase
    from umbel.server.store.deployment import UnfitDeployment
    from umbel.server.store.keys import UnfitAdminKey, UnfitAuditKey
    from umbel.server.store.replicas import ClockApart

    try:
        settings = load_settings(config, {"data": data, "host": host, "port": port, "blobs": blobs})
        run(settings, log_level, adopt=adopt)
    except ValidationError as error:
        raise typer.BadParameter(_what_is_wrong(error)) from error
    except tomllib.TOMLDecodeError as error:
        raise typer.BadParameter(f"{config} is not valid TOML: {error}") from error
    except (
        CannotStart,
        ClockApart,
        UnfitAdminKey,
        UnfitAuditKey,
        UnfitDatabase,
        UnfitDeployment,
        OSError,
    ) as error:
        typer.echo(f"umbel serve: {_sentence(error)}", err=True)
        raise typer.Exit(1) from error


def _what_is_wrong(error: "ValidationError") -> str:
    from umbel.server.problems import first_error
    from umbel.server.settings import Settings

    found = error.errors()[0]
    if found["type"] != "extra_forbidden":
        return first_error(error)
    key = str(found["loc"][0])
    close = get_close_matches(key, Settings.model_fields, n=1)
    return f"unknown setting {key!r} ({f'did you mean {close[0]!r}?' if close else 'see docs/reference/settings.md'})"


def _sentence(error: Exception) -> str:
    """An error in one sentence; the system's own would show a number."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
