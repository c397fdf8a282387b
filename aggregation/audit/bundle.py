"""Audit bundles: the coordinator's signed record of a run, one when the run is created and one for each ended attempt.

A bundle is a JSON object in canonical form (`canonical.py`). Its hash is the SHA-256 of those bytes. It contains the
hash of the bundle before, so a run's bundles form a chain. The coordinator signs the hash with its audit key (Ed25519):

    umbel audit bundle 1\n<the hash, 64 hex digits>

With a bundle's updates and the model that its round began with, anyone can make the round's model again (`replay.py`).
`chain.py` is the auditor. docs/reference/audit-bundle.md is the contract for other languages.
"""

import base64
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from umbel.aggregation.canonical import Json, canonical, later
from umbel.aggregation.plans.codec import Grid
from umbel.aggregation.plans.masks import SumShown
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.plans.training import TrainingPlan
from umbel.aggregation.round.coverage import Gap
from umbel.aggregation.run.records import Fate

FORMAT = 1
_PURPOSE = b"umbel audit bundle 1\n"


class AuditFailed(Exception):
    """An audit has failed; `str(error)` says why, in one sentence."""


@dataclass(frozen=True, slots=True)
class ModelId:
    version: int
    sha256: str  # of the published file
    master_sha256: str  # of the coordinator's full-precision copy


@dataclass(frozen=True, slots=True)
class Maker:
    """The software that made a bundle: versions of umbel, torch and Python, and the machine's architecture."""

    umbel: str
    torch: str
    python: str
    machine: str


@dataclass(frozen=True, slots=True)
class SignedReport:
    """A client's report as it was sent, with the parts of its signature (RFC 9421)."""

    body: str  # of the PUT
    created: int = 0
    nonce: str = ""
    signature: str = ""  # empty if the coordinator did not keep it; then `body` is what it had read


@dataclass(frozen=True, slots=True)
class Participant:
    """One client of the cohort."""

    client: str
    key: str  # its public key, base64
    draws: int
    announced: int  # its samples, when the cohort was drawn
    tier: str
    fate: Fate
    reason: str
    weight: int | None  # None unless it reported in time
    report: SignedReport | None  # likewise
    report_s: float | None  # seconds from the opening to its report
    silent_s: float
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, slots=True)
class ExactSum:
    """The exact sum that the model was made from; of a secure round, the unmasked sum."""

    sha256: str  # of the integers as int64, little-endian, in the layout's order
    total_weight: int
    n_clients: int
    update_rms: float | None = None  # the updates' root mean square, if the codec measures it; gives the next step
    shown: SumShown | None = None  # of a secure round; gives the next round's numbers

    def __post_init__(self) -> None:
        if self.update_rms is not None and not 0 <= self.update_rms < math.inf:  # also refuses a NaN
            raise ValueError(f"update_rms must be finite and not negative, not {self.update_rms}")


@dataclass(frozen=True, slots=True)
class KeptUpdates:
    """What the run's retention policy did when this attempt ended."""

    kept: bool  # whether this attempt's updates were kept
    deleted: tuple[int, ...]  # numbers of the bundles whose updates were deleted at that moment
    reason: str


@dataclass(frozen=True, slots=True)
class RunCreated:
    """The first bundle's facts."""

    at: float
    run_file: Mapping[str, Any]  # the whole file
    run_file_sha256: str
    model: ModelId
    layout: str  # the model's, as canonical JSON: the text whose SHA-256 is the layout's digest


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """The facts of an ended attempt at a round. `plan.task` says whether such a round makes a model."""

    round: int
    attempt: int
    committed: bool
    reason: str
    run_status: str
    run_reason: str
    run_file_sha256: str
    layout_digest: str
    model_in: ModelId
    model_out: ModelId | None  # None unless the round made a model, or a rollback ended it
    rolled_back_to: int | None  # the version that a rollback copied to `model_out`
    plan: RoundPlan
    grid: Grid
    training: TrainingPlan
    server_learning_rate: float
    clients: tuple[Participant, ...]
    sum: ExactSum | None  # None unless a model was made
    passed_over: int
    samples_passed_over: int
    uncovered: tuple[Gap, ...]
    metrics: Mapping[str, float]
    evaluation: Mapping[str, float]
    opened_at: float  # Unix seconds, as the two below
    closed_at: float
    ended_at: float
    updates: KeptUpdates
    counts: Mapping[str, tuple[int, ...]] = later(
        factory=dict[str, tuple[int, ...]]
    )  # as in `RoundRecord`; empty also before they were
    evaluation_counts: Mapping[str, tuple[int, ...]] = later(factory=dict[str, tuple[int, ...]])

    @property
    def accepted(self) -> tuple[Participant, ...]:
        """The clients whose updates are in the sum."""
        return tuple(one for one in self.clients if one.weight is not None) if self.sum is not None else ()


@dataclass(frozen=True, slots=True)
class Bundle:
    kind: Literal["run", "round"]
    run: str
    number: int  # 0 for the run's creation, then one more each
    previous: str  # the hash of the bundle before; empty in the first
    key: str  # the coordinator's public audit key, base64
    maker: Maker
    facts: RunCreated | RoundEnded
    format: int = FORMAT


def bundle_of(run: str, number: int, previous: str, key: str, maker: Maker, facts: RunCreated | RoundEnded) -> Bundle:
    return Bundle("run" if isinstance(facts, RunCreated) else "round", run, number, previous, key, maker, facts)


@dataclass(frozen=True, slots=True)
class Sealed:
    """A signed bundle: canonical text, its SHA-256 (hex) and the signature (base64)."""

    text: str
    sha256: str
    signature: str


@dataclass(frozen=True, slots=True)
class PublicAuditKey:
    """The answer of GET /v1/audit-key: the key that signs audit bundles, base64 of its 32 bytes."""

    public_key: str
    algorithm: Literal["ed25519"] = "ed25519"


def seal(bundle: Bundle, key: Ed25519PrivateKey) -> Sealed:
    """Hash and sign a bundle."""
    text = canonical(bundle)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return Sealed(text, sha256, base64.b64encode(key.sign(_signed(sha256))).decode())


def unseal(bundle: Json, sha256: str, signature: str, key: bytes) -> None:
    """Raise `AuditFailed` unless a bundle, read from JSON, hashes to `sha256` and `key` (32 bytes) has signed that."""
    if hashlib.sha256(canonical(bundle).encode()).hexdigest() != sha256:
        raise AuditFailed("its content does not match its hash: it was changed")
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(base64.b64decode(signature, validate=True), _signed(sha256))
    except (InvalidSignature, ValueError) as error:
        raise AuditFailed("its signature was not made with the audit key that it names") from error


def json_sha256(value: object) -> str:
    """The SHA-256 of a value's canonical JSON, hex: the hash of a run file."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def _signed(sha256: str) -> bytes:
    return _PURPOSE + sha256.encode()
