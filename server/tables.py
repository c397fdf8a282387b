"""The database's tables. Tensors are files (`blobs.py`); their names stand here.

```
clients   tokens   nonces                       who may speak
layouts <- models <- model_versions -> runs     what was made
runs <- rounds <- assignments <- uploads        how it was made
```

A round's state is the JSON of its state machine; `revision` grows by one with every save, so that two writers of
the same round cannot both succeed. Times are Unix seconds.
"""

from sqlalchemy import BigInteger, ForeignKey, Index, LargeBinary, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

_SLUG, _SHA256, _ASSIGNMENT = String(63), String(64), String(160)


class Base(DeclarativeBase):
    pass


class Client(Base):
    """An enrolled client; a revoked one keeps its name, so that nobody else can take it."""

    __tablename__ = "clients"
    id: Mapped[str] = mapped_column(_SLUG, primary_key=True)
    public_key: Mapped[bytes] = mapped_column(LargeBinary(32))
    labels: Mapped[str] = mapped_column(Text)
    enrolled_at: Mapped[float]
    last_heard_at: Mapped[float]
    revoked_at: Mapped[float | None]


class Token(Base):
    """A one-time enrolment token; only its hash is kept."""

    __tablename__ = "tokens"
    sha256: Mapped[str] = mapped_column(_SHA256, primary_key=True)
    created_at: Mapped[float]
    expires_at: Mapped[float]
    used_by: Mapped[str | None] = mapped_column(_SLUG)


class Nonce(Base):
    """A nonce seen from a client, until a request that carries it would be stale anyway."""

    __tablename__ = "nonces"
    client: Mapped[str] = mapped_column(_SLUG, primary_key=True)
    nonce: Mapped[str] = mapped_column(String(43), primary_key=True)
    expires_at: Mapped[float] = mapped_column(index=True)


class LayoutText(Base):
    __tablename__ = "layouts"
    digest: Mapped[str] = mapped_column(_SHA256, primary_key=True)
    text: Mapped[str] = mapped_column(Text)


class Model(Base):
    """A model file that clients may download."""

    __tablename__ = "models"
    sha256: Mapped[str] = mapped_column(_SHA256, primary_key=True)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    layout_digest: Mapped[str] = mapped_column(ForeignKey("layouts.digest"))
    created_at: Mapped[float]


class Run(Base):
    """`run_file`: canonical JSON; `status`: of `messages.RunStatus`."""

    __tablename__ = "runs"
    name: Mapped[str] = mapped_column(_SLUG, primary_key=True)
    run_file: Mapped[str] = mapped_column(Text)
    model_sha256: Mapped[str] = mapped_column(ForeignKey("models.sha256"))
    status: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text)
    created_at: Mapped[float]


class ModelVersion(Base):
    __tablename__ = "model_versions"
    run: Mapped[str] = mapped_column(ForeignKey("runs.name"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    sha256: Mapped[str] = mapped_column(ForeignKey("models.sha256"))
    master_sha256: Mapped[str] = mapped_column(_SHA256)
    parent_sha256: Mapped[str | None] = mapped_column(_SHA256)


class Round(Base):
    """One attempt at a round. `record`: the JSON of its `RoundRecord` once it has ended."""

    __tablename__ = "rounds"
    __table_args__ = (UniqueConstraint("run", "number", "attempt"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    run: Mapped[str] = mapped_column(ForeignKey("runs.name"))
    number: Mapped[int]
    attempt: Mapped[int]
    state: Mapped[str] = mapped_column(Text)
    revision: Mapped[int]
    record: Mapped[str | None] = mapped_column(Text)


class Assignment(Base):
    """One client in one attempt. `outcome`, `reason`: what its report was told; `report`: its `WorkDone` as JSON."""

    __tablename__ = "assignments"
    __table_args__ = (Index("ix_assignments_round_id", "round_id"),)
    id: Mapped[str] = mapped_column(_ASSIGNMENT, primary_key=True)
    round_id: Mapped[int] = mapped_column(ForeignKey("rounds.id"))
    client: Mapped[str] = mapped_column(ForeignKey("clients.id"))
    sample_count: Mapped[int] = mapped_column(BigInteger)
    is_declined: Mapped[bool]
    outcome: Mapped[str | None] = mapped_column(String(16))
    reason: Mapped[str | None] = mapped_column(Text)
    report: Mapped[str | None] = mapped_column(Text)
    reported_at: Mapped[float | None]
    bytes_up: Mapped[int] = mapped_column(BigInteger)
    bytes_down: Mapped[int] = mapped_column(BigInteger)


class Upload(Base):
    """An update on its way. `sha256`: what the whole must hash to; `offset`: how many bytes are in and checked."""

    __tablename__ = "uploads"
    assignment: Mapped[str] = mapped_column(ForeignKey("assignments.id"), primary_key=True)
    length: Mapped[int] = mapped_column(BigInteger)
    offset: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(_SHA256)
    is_complete: Mapped[bool]
