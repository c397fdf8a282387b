"""The database's tables. Tensors are blobs (`blobs.py`); their keys stand here.

```
clients   tokens   nonces                                       who may speak
waiters   turned_away                                           who waits for work, and who may not
layouts <- models <- model_versions -> runs                     what was made
runs <- rounds <- assignments <- uploads <- upload_chunks       how it was made
runs <- audits                                                  what is signed of it
runs <- member_lists                                            who may take part, where a list says so
replicas   leases   partial_sums   relayed_reveals              which coordinator does what
deployment                                                      which blobs and keys go with these tables
```

A run's row is the lock of everything that happens to the run: whoever changes its status or a round of it locks that
row first. `revision` grows by one with every such change, on the row and on each assignment that it touched, so that
another replica reads only what it has not seen. Times are Unix seconds.
"""

from sqlalchemy import BigInteger, ForeignKey, Index, LargeBinary, String, Table, Text, UniqueConstraint, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

_SLUG, _SHA256, _ASSIGNMENT, _REPLICA = String(63), String(64), String(160), String(32)


class Base(DeclarativeBase):
    pass


class ClientRow(Base):
    """An enrolled client; a revoked one keeps its name, so that nobody else can take it.

    Of those that may speak no two have one key: a cohort with a key twice is impossible (`secagg/context.py`).
    `labels`: JSON, all that are known of it; `bound_labels`, `is_name_bound`: what of that its token has said.
    """

    __tablename__ = "clients"
    __table_args__ = (
        Index(
            "ix_clients_public_key",
            "public_key",
            unique=True,
            sqlite_where=text("revoked_at IS NULL"),
            postgresql_where=text("revoked_at IS NULL"),
        ),
    )
    id: Mapped[str] = mapped_column(_SLUG, primary_key=True)
    public_key: Mapped[bytes] = mapped_column(LargeBinary(32))
    labels: Mapped[str] = mapped_column(Text)
    bound_labels: Mapped[str] = mapped_column(Text)
    is_name_bound: Mapped[bool]
    enrolled_at: Mapped[float]
    last_heard_at: Mapped[float]
    revoked_at: Mapped[float | None] = mapped_column(index=True)


class TokenRow(Base):
    """A one-time enrolment token; only its hash is kept. `client`: the name that it binds; `labels`: likewise, JSON."""

    __tablename__ = "tokens"
    sha256: Mapped[str] = mapped_column(_SHA256, primary_key=True)
    created_at: Mapped[float]
    expires_at: Mapped[float]
    used_by: Mapped[str | None] = mapped_column(_SLUG)
    client: Mapped[str | None] = mapped_column(_SLUG, index=True)
    labels: Mapped[str] = mapped_column(Text)


class NonceRow(Base):
    """A nonce seen from a client, until a request that carries it would be stale anyway.

    A replay carries the same signed time, so it has the same key; and a key that begins with the time grows at one end
    of its index, and is swept at the other.
    """

    __tablename__ = "nonces"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012 - SQLAlchemy's own form
    expires_at: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    client: Mapped[str] = mapped_column(_SLUG, primary_key=True)
    nonce: Mapped[str] = mapped_column(String(43), primary_key=True)


class WaiterRow(Base):
    """A client that has checked in for a run. Until `until` it counts as waiting for work."""

    __tablename__ = "waiters"
    __table_args__ = (Index("ix_waiters_run_until", "run", "until"), Index("ix_waiters_run_seen_at", "run", "seen_at"))
    run: Mapped[str] = mapped_column(_SLUG, primary_key=True)
    client: Mapped[str] = mapped_column(_SLUG, primary_key=True)
    sample_count: Mapped[int] = mapped_column(BigInteger)
    tier: Mapped[str] = mapped_column(_SLUG)
    seen_at: Mapped[float]
    until: Mapped[float]


class TurnedAwayRow(Base):
    """A client that was refused when it checked in for a run: the last time, and why."""

    __tablename__ = "turned_away"
    run: Mapped[str] = mapped_column(ForeignKey("runs.name"), primary_key=True)
    client: Mapped[str] = mapped_column(ForeignKey("clients.id"), primary_key=True)
    reason: Mapped[str] = mapped_column(Text)
    at: Mapped[float]


class LayoutRow(Base):
    __tablename__ = "layouts"
    digest: Mapped[str] = mapped_column(_SHA256, primary_key=True)
    text: Mapped[str] = mapped_column(Text)


class ModelRow(Base):
    """A model file that clients may download."""

    __tablename__ = "models"
    sha256: Mapped[str] = mapped_column(_SHA256, primary_key=True)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    layout_digest: Mapped[str] = mapped_column(ForeignKey("layouts.digest"))
    created_at: Mapped[float]


class RunRow(Base):
    """`run_file`: canonical JSON; `status`: of `messages.RunStatus`; `round_id`: its newest attempt at a round.

    `salt`: random, and told to nobody. `audit_number`, `audit_sha256`: the newest of its audit bundles;
    `run_file_sha256`: as the first of them has it, whatever keys later versions add to run files.
    """

    __tablename__ = "runs"
    name: Mapped[str] = mapped_column(_SLUG, primary_key=True)
    run_file: Mapped[str] = mapped_column(Text)
    model_sha256: Mapped[str] = mapped_column(ForeignKey("models.sha256"))
    status: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text)
    created_at: Mapped[float]
    salt: Mapped[bytes] = mapped_column(LargeBinary(16))
    round_id: Mapped[int]
    revision: Mapped[int] = mapped_column(BigInteger)
    run_file_sha256: Mapped[str] = mapped_column(_SHA256)
    audit_number: Mapped[int]
    audit_sha256: Mapped[str] = mapped_column(_SHA256)


class MemberListRow(Base):
    """The member list that a run's rounds are bound to, where the coordinator was given it: as its file has it."""

    __tablename__ = "member_lists"
    run: Mapped[str] = mapped_column(ForeignKey("runs.name"), primary_key=True)
    text: Mapped[str] = mapped_column(Text)


class ModelVersionRow(Base):
    """A model version, as `records.VersionRecord` tells of it; `metrics`, `evaluation`: JSON.

    A version that is marked `deleted_at` is not used any more; `removed_at`: its files, where no version that is kept
    has the same, are gone. `change_sha256`, `change_bytes`: of the file that makes it of its parent, if there is one.
    """

    __tablename__ = "model_versions"
    __table_args__ = (
        Index("ix_model_versions_change_sha256", "change_sha256"),
        Index("ix_model_versions_sha256", "sha256"),
    )
    run: Mapped[str] = mapped_column(ForeignKey("runs.name"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    sha256: Mapped[str] = mapped_column(ForeignKey("models.sha256"))
    master_sha256: Mapped[str] = mapped_column(_SHA256)
    parent_sha256: Mapped[str | None] = mapped_column(_SHA256)
    change_sha256: Mapped[str | None] = mapped_column(_SHA256)
    change_bytes: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[float]
    round: Mapped[int | None]
    rolled_back_to: Mapped[int | None]
    reason: Mapped[str] = mapped_column(Text)
    sample_count: Mapped[int] = mapped_column(BigInteger)
    metrics: Mapped[str] = mapped_column(Text)
    evaluation: Mapped[str] = mapped_column(Text)
    judged: Mapped[float | None]
    deleted_at: Mapped[float | None]
    removed_at: Mapped[float | None]


class ModelClaimRow(Base):
    """A model file that `owner` is about to store and to refer to: until it has, nobody removes it."""

    __tablename__ = "model_claims"
    owner: Mapped[str] = mapped_column(String(128), primary_key=True)
    sha256: Mapped[str] = mapped_column(_SHA256, primary_key=True)


class ModelRemovalRow(Base):
    """A model file that is being removed: until it is gone, nobody may claim it."""

    __tablename__ = "model_removals"
    sha256: Mapped[str] = mapped_column(_SHA256, primary_key=True)


class RoundRow(Base):
    """One attempt at a round. `head`: its state as JSON, without what the assignments' rows hold of it.

    `record`: the JSON of its `RoundRecord` once it has ended.
    """

    __tablename__ = "rounds"
    __table_args__ = (UniqueConstraint("run", "task", "number", "attempt"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    run: Mapped[str] = mapped_column(ForeignKey("runs.name"))
    task: Mapped[str] = mapped_column(String(16))
    number: Mapped[int]
    attempt: Mapped[int]
    head: Mapped[str] = mapped_column(Text)
    record: Mapped[str | None] = mapped_column(Text)


class AssignmentRow(Base):
    """One client in one attempt.

    `draws`, `sample_count`, `tier`: the cohort's member; `weight`, `work`: its accepted report (`WorkDone` as JSON);
    `signed_report`: that report as the client signed it (`audit.SignedReport` as JSON), until its bundle has it;
    `declined`, `missing`: why it does not count; `replica`: whose partial sum its update is in. `spoken`: what it has
    said in a secure round, JSON.
    """

    __tablename__ = "assignments"
    __table_args__ = (
        Index("ix_assignments_round_revision", "round_id", "revision"),
        Index("ix_assignments_client", "client"),
    )
    id: Mapped[str] = mapped_column(_ASSIGNMENT, primary_key=True)
    round_id: Mapped[int] = mapped_column(ForeignKey("rounds.id"))
    client: Mapped[str] = mapped_column(ForeignKey("clients.id"))
    draws: Mapped[int]
    sample_count: Mapped[int] = mapped_column(BigInteger)
    tier: Mapped[str] = mapped_column(_SLUG)
    revision: Mapped[int] = mapped_column(BigInteger)
    weight: Mapped[int | None] = mapped_column(BigInteger)
    work: Mapped[str | None] = mapped_column(Text)
    signed_report: Mapped[str | None] = mapped_column(Text)
    replica: Mapped[str | None] = mapped_column(_REPLICA)
    outcome: Mapped[str | None] = mapped_column(String(16))
    reason: Mapped[str | None] = mapped_column(Text)
    reported_at: Mapped[float | None]
    declined: Mapped[str | None] = mapped_column(Text)
    missing: Mapped[str | None] = mapped_column(Text)
    spoken: Mapped[str | None] = mapped_column(Text)
    bytes_up: Mapped[int] = mapped_column(BigInteger)
    bytes_down: Mapped[int] = mapped_column(BigInteger)


class SealedSharesRow(Base):
    """A client's ShareKeys message, until its round has ended: shares sealed for others, which nobody here can read."""

    __tablename__ = "sealed_shares"
    assignment: Mapped[str] = mapped_column(ForeignKey("assignments.id"), primary_key=True)
    body: Mapped[bytes] = mapped_column(LargeBinary)


class UploadRow(Base):
    """An update on its way. `sha256`: what the whole must hash to; `offset`: how many bytes are in and checked."""

    __tablename__ = "uploads"
    assignment: Mapped[str] = mapped_column(ForeignKey("assignments.id"), primary_key=True)
    length: Mapped[int] = mapped_column(BigInteger)
    offset: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(_SHA256)
    is_complete: Mapped[bool]


class UploadChunkRow(Base):
    """A part of an update, in the blob store under `key`."""

    __tablename__ = "upload_chunks"
    assignment: Mapped[str] = mapped_column(ForeignKey("assignments.id"), primary_key=True)
    offset: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    length: Mapped[int] = mapped_column(BigInteger)
    key: Mapped[str] = mapped_column(String(255))


class AuditRow(Base):
    """A sealed audit bundle (`aggregation/audit/bundle.py`). `round_id`: its attempt; None for the run's own.

    `updates_deleted_at`: when the updates that it names were given up; None while they are kept, or if it names none.
    """

    __tablename__ = "audits"
    run: Mapped[str] = mapped_column(ForeignKey("runs.name"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    round_id: Mapped[int | None] = mapped_column(ForeignKey("rounds.id"), unique=True)
    bundle: Mapped[str] = mapped_column(Text)
    sha256: Mapped[str] = mapped_column(_SHA256)
    signature: Mapped[str] = mapped_column(String(88))
    updates_deleted_at: Mapped[float | None]


class DeploymentRow(Base):
    """One row: what every coordinator over this database must share.

    `store`: the mark that its blob store bears; `audit_key`: the public key, in base64; `admin_key`: a few hex digits
    of a salted hash, too few to confirm a guess.
    """

    __tablename__ = "deployment"
    id: Mapped[int] = mapped_column(primary_key=True)
    store: Mapped[str] = mapped_column(_REPLICA)
    audit_key: Mapped[str] = mapped_column(String(44))
    admin_key: Mapped[str] = mapped_column(String(8))


class ReplicaRow(Base):
    """A coordinator process. `beat` grows while it lives; the others watch it stand still, each by its own clock."""

    __tablename__ = "replicas"
    id: Mapped[str] = mapped_column(_REPLICA, primary_key=True)
    beat: Mapped[int] = mapped_column(BigInteger)
    started_at: Mapped[float]


class SignOfLifeRow(Base):
    """One row: when a coordinator was at work on this database last, in Unix seconds."""

    __tablename__ = "signs_of_life"
    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float]


class LeaseRow(Base):
    """A job that one replica does, for as long as it lives.

    `relay_key`: where the job is to unmask a sum, the public key to seal for that replica what others hear for it.
    `relay_signature`: of that key, by the audit key, which all replicas have and whoever else writes here has not.
    """

    __tablename__ = "leases"
    job: Mapped[str] = mapped_column(String(128), primary_key=True)
    replica: Mapped[str] = mapped_column(_REPLICA)
    relay_key: Mapped[bytes | None] = mapped_column(LargeBinary(32))
    relay_signature: Mapped[bytes | None] = mapped_column(LargeBinary(64))


class PartialSumRow(Base):
    """What one replica has folded of a round, in the blob store under `key`. `clients`: JSON list of names."""

    __tablename__ = "partial_sums"
    round_id: Mapped[int] = mapped_column(ForeignKey("rounds.id"), primary_key=True)
    replica: Mapped[str] = mapped_column(_REPLICA, primary_key=True)
    key: Mapped[str] = mapped_column(String(255))
    sha256: Mapped[str] = mapped_column(_SHA256)
    clients: Mapped[str] = mapped_column(Text)
    total_weight: Mapped[int] = mapped_column(BigInteger)


class RelayedRevealRow(Base):
    """What a client has revealed, sealed by the replica that heard it for the one that unmasks; until that has it.

    `relay_key`: the key that it is sealed to, whose other half is in that replica's memory alone.
    """

    __tablename__ = "relayed_reveals"
    round_id: Mapped[int] = mapped_column(ForeignKey("rounds.id"), primary_key=True)
    client: Mapped[str] = mapped_column(_SLUG, primary_key=True)
    relay_key: Mapped[bytes] = mapped_column(LargeBinary(32))
    sealed: Mapped[bytes] = mapped_column(LargeBinary)


def table_of(entity: type[Base]) -> Table:
    """The table behind a class, for statements that build no objects."""
    table = entity.__table__
    assert isinstance(table, Table)
    return table
