"""The database's tables. Tensors are blobs (`blobs/`); the tables hold their keys.

```
clients   tokens   nonces                                       enrolment and signatures
waiters   turned_away                                           check-ins
layouts <- models <- model_versions -> runs                     models
runs <- rounds <- assignments <- uploads <- upload_chunks       training
runs <- audits                                                  signed audit bundles
runs <- member_lists                                            allowed clients
replicas   leases   partial_sums   relayed_reveals              work of the replicas
deployment                                                      blob store and keys of this database
```

A transaction that changes a run's status or one of its rounds locks the run's row first. Each such change increments
`revision`, on that row and on each assignment that it changes. So another replica reads only rows that it has not seen.
Times are Unix seconds.
"""

from sqlalchemy import BigInteger, ForeignKey, Index, LargeBinary, String, Table, Text, UniqueConstraint, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from umbel.aggregation.run.records import AwayKind

_SLUG, _SHA256, _ASSIGNMENT, _REPLICA = String(63), String(64), String(160), String(32)


class Base(DeclarativeBase):
    pass


class ClientRow(Base):
    """An enrolled client. A revoked client keeps its name, so that no other client can take it.

    Clients that are not revoked have different keys, because a cohort cannot contain a key twice (`secagg/context.py`).
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
    labels: Mapped[str] = mapped_column(Text)  # JSON, as the next
    bound_labels: Mapped[str] = mapped_column(Text)  # those that its token fixed
    is_name_bound: Mapped[bool]  # its token fixed the name
    enrolled_at: Mapped[float]
    last_heard_at: Mapped[float]
    revoked_at: Mapped[float | None] = mapped_column(index=True)


class TokenRow(Base):
    """A one-time enrolment token. Only its hash is kept."""

    __tablename__ = "tokens"
    sha256: Mapped[str] = mapped_column(_SHA256, primary_key=True)
    created_at: Mapped[float]
    expires_at: Mapped[float]
    used_by: Mapped[str | None] = mapped_column(_SLUG)
    client: Mapped[str | None] = mapped_column(_SLUG, index=True)  # the name that it fixes
    labels: Mapped[str] = mapped_column(Text)  # that it fixes, JSON


class NonceRow(Base):
    """A nonce that a client has used, kept until a request with it would be stale.

    A replay has the same signed time, so it has the same key. A key that begins with the time is added at one end of
    the index and deleted at the other.
    """

    __tablename__ = "nonces"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012 - SQLAlchemy's own form
    expires_at: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    client: Mapped[str] = mapped_column(_SLUG, primary_key=True)
    nonce: Mapped[str] = mapped_column(String(43), primary_key=True)


class WaiterRow(Base):
    """A client that has checked in for a run. It counts as waiting for work until `until`."""

    __tablename__ = "waiters"
    __table_args__ = (Index("ix_waiters_run_until", "run", "until"), Index("ix_waiters_run_seen_at", "run", "seen_at"))
    run: Mapped[str] = mapped_column(_SLUG, primary_key=True)
    client: Mapped[str] = mapped_column(_SLUG, primary_key=True)
    sample_count: Mapped[int] = mapped_column(BigInteger)
    tier: Mapped[str] = mapped_column(_SLUG)
    seen_at: Mapped[float]
    until: Mapped[float]


class TurnedAwayRow(Base):
    """Why a client does not come to a run: the last refusal of its check-in, or its own word."""

    __tablename__ = "turned_away"
    run: Mapped[str] = mapped_column(ForeignKey("runs.name"), primary_key=True)
    client: Mapped[str] = mapped_column(ForeignKey("clients.id"), primary_key=True)
    reason: Mapped[str] = mapped_column(Text)
    at: Mapped[float]
    kind: Mapped[str] = mapped_column(String(16), server_default=AwayKind.TURNED_AWAY.value)


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
    __tablename__ = "runs"
    name: Mapped[str] = mapped_column(_SLUG, primary_key=True)
    run_file: Mapped[str] = mapped_column(Text)  # canonical JSON
    model_sha256: Mapped[str] = mapped_column(ForeignKey("models.sha256"))
    status: Mapped[str] = mapped_column(String(16))  # `messages.RunStatus`
    reason: Mapped[str] = mapped_column(Text)
    created_at: Mapped[float]
    salt: Mapped[bytes] = mapped_column(LargeBinary(16))  # random and secret
    round_id: Mapped[int]  # its newest attempt
    revision: Mapped[int] = mapped_column(BigInteger)
    run_file_sha256: Mapped[str] = mapped_column(_SHA256)  # as in its first audit bundle: later versions may add keys
    audit_number: Mapped[int]  # of its newest audit bundle, as the next
    audit_sha256: Mapped[str] = mapped_column(_SHA256)


class MemberListRow(Base):
    """The member list that a run's rounds are bound to, in the form of its file."""

    __tablename__ = "member_lists"
    run: Mapped[str] = mapped_column(ForeignKey("runs.name"), primary_key=True)
    text: Mapped[str] = mapped_column(Text)


class ModelVersionRow(Base):
    """A model version. Its columns are documented at `records.VersionRecord`."""

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
    change_sha256: Mapped[str | None] = mapped_column(_SHA256)  # of the file that turns the parent into this version
    change_bytes: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[float]
    round: Mapped[int | None]
    rolled_back_to: Mapped[int | None]
    reason: Mapped[str] = mapped_column(Text)
    sample_count: Mapped[int] = mapped_column(BigInteger)
    metrics: Mapped[str] = mapped_column(Text)  # JSON, as the next
    evaluation: Mapped[str] = mapped_column(Text)
    judged: Mapped[float | None]
    deleted_at: Mapped[float | None]  # not used any more
    removed_at: Mapped[float | None]  # its files were removed, except those that a kept version shares


class ModelClaimRow(Base):
    """A model file that `owner` is about to store and refer to. It is not removed before the claim is released."""

    __tablename__ = "model_claims"
    owner: Mapped[str] = mapped_column(String(128), primary_key=True)
    sha256: Mapped[str] = mapped_column(_SHA256, primary_key=True)


class ModelRemovalRow(Base):
    """A model file that is being removed. It cannot be claimed before it is removed."""

    __tablename__ = "model_removals"
    sha256: Mapped[str] = mapped_column(_SHA256, primary_key=True)


class RoundRow(Base):
    """One attempt at a round."""

    __tablename__ = "rounds"
    __table_args__ = (UniqueConstraint("run", "task", "number", "attempt"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    run: Mapped[str] = mapped_column(ForeignKey("runs.name"))
    task: Mapped[str] = mapped_column(String(16))
    number: Mapped[int]
    attempt: Mapped[int]
    head: Mapped[str] = mapped_column(Text)  # its state as JSON, without the part that its assignments hold
    record: Mapped[str | None] = mapped_column(Text)  # `RoundRecord` as JSON, once it has ended


class AssignmentRow(Base):
    """One client in one attempt."""

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
    weight: Mapped[int | None] = mapped_column(BigInteger)  # of its accepted report
    work: Mapped[str | None] = mapped_column(Text)  # of its accepted report, JSON
    signed_report: Mapped[str | None] = mapped_column(Text)  # `SignedReport` as JSON, until the attempt ends
    replica: Mapped[str | None] = mapped_column(_REPLICA)  # its partial sum has the update
    outcome: Mapped[str | None] = mapped_column(String(16))
    reason: Mapped[str | None] = mapped_column(Text)
    reported_at: Mapped[float | None]
    declined: Mapped[str | None] = mapped_column(Text)  # the reason, as the next
    missing: Mapped[str | None] = mapped_column(Text)  # why its work does not count
    spoken: Mapped[str | None] = mapped_column(Text)  # its messages of a secure round, JSON
    bytes_up: Mapped[int] = mapped_column(BigInteger)
    bytes_down: Mapped[int] = mapped_column(BigInteger)


class SealedSharesRow(Base):
    """A client's ShareKeys message, kept until its round ends. Only other clients can read these shares."""

    __tablename__ = "sealed_shares"
    assignment: Mapped[str] = mapped_column(ForeignKey("assignments.id"), primary_key=True)
    body: Mapped[bytes] = mapped_column(LargeBinary)


class UploadRow(Base):
    """An update, complete or not."""

    __tablename__ = "uploads"
    assignment: Mapped[str] = mapped_column(ForeignKey("assignments.id"), primary_key=True)
    length: Mapped[int] = mapped_column(BigInteger)
    offset: Mapped[int] = mapped_column(BigInteger)  # bytes received and checked
    sha256: Mapped[str] = mapped_column(_SHA256)  # of the complete update
    is_complete: Mapped[bool]


class UploadChunkRow(Base):
    """A part of an update, in the blob store under `key`."""

    __tablename__ = "upload_chunks"
    assignment: Mapped[str] = mapped_column(ForeignKey("assignments.id"), primary_key=True)
    offset: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    length: Mapped[int] = mapped_column(BigInteger)
    key: Mapped[str] = mapped_column(String(255))


class AuditRow(Base):
    """A sealed audit bundle (`aggregation/audit/bundle.py`)."""

    __tablename__ = "audits"
    run: Mapped[str] = mapped_column(ForeignKey("runs.name"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    round_id: Mapped[int | None] = mapped_column(ForeignKey("rounds.id"), unique=True)  # None: of the run itself
    bundle: Mapped[str] = mapped_column(Text)
    sha256: Mapped[str] = mapped_column(_SHA256)
    signature: Mapped[str] = mapped_column(String(88))
    updates_deleted_at: Mapped[float | None]  # None while its updates are kept, or if it has none


class DeploymentRow(Base):
    """One row: what all coordinators of this database must share."""

    __tablename__ = "deployment"
    id: Mapped[int] = mapped_column(primary_key=True)
    store: Mapped[str] = mapped_column(_REPLICA)  # the mark of its blob store
    audit_key: Mapped[str] = mapped_column(String(44))  # public, base64
    admin_key: Mapped[str] = mapped_column(String(8))  # hex digits of a salted hash, too few to confirm a guess


class ReplicaRow(Base):
    """A coordinator process. It increments `beat` while it is alive."""

    __tablename__ = "replicas"
    id: Mapped[str] = mapped_column(_REPLICA, primary_key=True)
    beat: Mapped[int] = mapped_column(BigInteger)
    started_at: Mapped[float]


class SignOfLifeRow(Base):
    """One row: when a coordinator last worked on this database."""

    __tablename__ = "signs_of_life"
    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float]


class LeaseRow(Base):
    """A job of one replica, while that replica is alive.

    A replica that unmasks a sum publishes `relay_key`. Other replicas seal to this public key what they receive for it.
    The audit key signs it, because all replicas have that key, but not everyone who can write to the database.
    """

    __tablename__ = "leases"
    job: Mapped[str] = mapped_column(String(128), primary_key=True)
    replica: Mapped[str] = mapped_column(_REPLICA)
    relay_key: Mapped[bytes | None] = mapped_column(LargeBinary(32))
    relay_signature: Mapped[bytes | None] = mapped_column(LargeBinary(64))


class PartialSumRow(Base):
    """One replica's sum of a round, in the blob store under `key`."""

    __tablename__ = "partial_sums"
    round_id: Mapped[int] = mapped_column(ForeignKey("rounds.id"), primary_key=True)
    replica: Mapped[str] = mapped_column(_REPLICA, primary_key=True)
    key: Mapped[str] = mapped_column(String(255))
    sha256: Mapped[str] = mapped_column(_SHA256)
    clients: Mapped[str] = mapped_column(Text)  # JSON list
    total_weight: Mapped[int] = mapped_column(BigInteger)


class RelayedRevealRow(Base):
    """A client's reveal that one replica has received and sealed for the replica that unmasks the sum."""

    __tablename__ = "relayed_reveals"
    round_id: Mapped[int] = mapped_column(ForeignKey("rounds.id"), primary_key=True)
    client: Mapped[str] = mapped_column(_SLUG, primary_key=True)
    relay_key: Mapped[bytes] = mapped_column(LargeBinary(32))  # the private half is only in that replica's memory
    sealed: Mapped[bytes] = mapped_column(LargeBinary)


def table_of(entity: type[Base]) -> Table:
    """The table of a class, for statements that build no objects."""
    table = entity.__table__
    assert isinstance(table, Table)
    return table
