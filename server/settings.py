"""What a coordinator can be told: by flag, by environment (`UMBEL_*`), in a TOML file; the first to speak counts."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class Settings(BaseSettings):
    """A coordinator's settings. `*_bytes_max` bound one request's body."""

    model_config = SettingsConfigDict(env_prefix="UMBEL_", extra="forbid", frozen=True)

    data: Path = Field(default=Path("umbel-data"), description="directory of database, models and admin key")
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8750, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    database_url: str | None = Field(default=None, description="SQLAlchemy URL; by default SQLite, in data")
    json_bytes_max: int = Field(default=64 * KIB, ge=KIB, description="cap of a control message")
    chunk_bytes_max: int = Field(default=16 * MIB, ge=KIB, description="cap of one chunk of an upload")
    model_bytes_max: int = Field(default=4 * GIB, ge=KIB, description="cap of a model file")

    @property
    def database(self) -> str:
        return self.database_url or f"sqlite+aiosqlite:///{(self.data / 'umbel.db').absolute()}"

    @property
    def admin_key_path(self) -> Path:
        return self.data / "admin.key"

    @property
    def endpoint_path(self) -> Path:
        """Where a running coordinator writes its URL, for scripts."""
        return self.data / "endpoint"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def load_settings(config: Path | None, flags: dict[str, object]) -> Settings:
    """Settings from flags (None means: not given), the environment, and the TOML file `config`.

    Raises `FileNotFoundError` for a file that is not there, pydantic's `ValidationError` for values that are wrong.
    """
    if config is not None and not config.is_file():
        raise FileNotFoundError(f"there is no configuration file {config}")

    class FromFile(Settings):
        model_config = SettingsConfigDict(toml_file=config)

    given = {name: value for name, value in flags.items() if value is not None}
    return FromFile.model_validate(given) if not given else FromFile(**given)  # type: ignore[arg-type]  # checked by it
