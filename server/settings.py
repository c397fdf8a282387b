"""Settings of a coordinator: from flags, then the environment (`UMBEL_*`), then a TOML file; the first applies."""

import re
from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_DATABASES = ("postgresql+asyncpg://", "sqlite+aiosqlite://")
_BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9][A-Za-z0-9._-]*)*/?")


class Settings(BaseSettings):
    """A coordinator's settings. `json_`, `chunk_` and `model_bytes_max` limit one request's body."""

    model_config = SettingsConfigDict(env_prefix="UMBEL_", extra="forbid", frozen=True)

    data: Path = Field(default=Path("umbel-data"), description="directory for the database, models and the admin key")
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8750, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    database_url: str | None = Field(
        default=None,
        description="postgresql+asyncpg://..., which replicas can share; by default SQLite in `data`",
        repr=False,  # it may hold a password
    )
    admin_key_file: Path | None = Field(default=None, description="file of the admin key; by default in `data`")
    audit_key_file: Path | None = Field(
        default=None, description="file of the key that signs audit bundles; by default in `data`"
    )
    json_bytes_max: int = Field(default=64 * KIB, ge=KIB, description="most bytes of a control message")
    chunk_bytes_max: int = Field(default=16 * MIB, ge=KIB, description="most bytes of one chunk of an upload")
    incoming_bytes_max: int = Field(
        default=4 * GIB, ge=KIB, description="most bytes on disk of all chunks that are being received"
    )
    model_bytes_max: int = Field(default=4 * GIB, ge=KIB, description="most bytes of a model file")

    blobs: str | None = Field(
        default=None, description="s3://bucket/prefix, or a directory, for models and updates; by default in `data`"
    )
    s3_endpoint: str | None = Field(default=None, description="URL of an S3 store other than Amazon's")
    s3_public_endpoint: str | None = Field(default=None, description="URL at which clients reach that store")
    s3_region: str | None = Field(default=None, description="the bucket's region; by default AWS_REGION, or us-east-1")
    s3_access_key_id: str | None = Field(
        default=None, description="by default AWS_ACCESS_KEY_ID, or the machine's role"
    )
    s3_secret_access_key: SecretStr | None = Field(default=None, description="by default AWS_SECRET_ACCESS_KEY")
    s3_allow_http: bool = Field(default=False, description="allow endpoints that are not encrypted")
    download_links: bool = Field(default=True, description="let clients download models from the bucket directly")
    model_cache_bytes_max: int = Field(
        default=16 * GIB, ge=0, description="most bytes of the bucket's models that are copied to local disk"
    )

    check_ins_per_s_max: float = Field(
        default=300.0,
        gt=0,
        description="most check-ins a second of each run; devices of a large fleet are told when to come back",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _require_number(cls, value: object, info: ValidationInfo) -> object:
        # pydantic would read `port = true` as port 1.
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation in (int, float):
            raise ValueError(f"must be a number, not {str(value).lower()}")
        return value

    @field_validator("blobs")
    @classmethod
    def _require_bucket(cls, blobs: str | None) -> str | None:
        if blobs and "://" in blobs and not _BUCKET.fullmatch(blobs):
            raise ValueError(f"must be a directory or look like s3://bucket/prefix, not {blobs[:100]!r}")
        return blobs

    @model_validator(mode="after")
    def _require_room_for_a_chunk(self) -> Self:
        if self.incoming_bytes_max < self.chunk_bytes_max:
            raise ValueError(f"incoming_bytes_max must be at least chunk_bytes_max = {self.chunk_bytes_max}")
        return self

    @field_validator("database_url")
    @classmethod
    def _require_driver(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(_DATABASES):
            raise ValueError(f"must begin with {' or '.join(_DATABASES)}: other databases and drivers are not tested")
        return url

    @property
    def blob_directory(self) -> Path | None:
        """The directory of blobs; None if they are in a bucket."""
        if self.blobs and "://" in self.blobs:
            return None
        return Path(self.blobs) if self.blobs else self.data / "blobs"

    @property
    def database(self) -> str:
        return self.database_url or f"sqlite+aiosqlite:///{(self.data / 'umbel.db').absolute()}"

    @property
    def admin_key_path(self) -> Path:
        return self.admin_key_file or self.data / "admin.key"

    @property
    def audit_key_path(self) -> Path:
        return self.audit_key_file or self.data / "audit.key"

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
