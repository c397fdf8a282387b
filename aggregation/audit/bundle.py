"""Audit bundles: what a coordinator signs of a run, one bundle when it is created and one for each attempt that ends.

A bundle is a JSON object in canonical form (`canonical.py`). Its hash is the SHA-256 of those bytes; it names the hash
of the bundle before it, so that a run's bundles are a chain from its creation on; and the coordinator signs the hash
with its audit key (Ed25519), as

    umbel audit bundle 1\n<the hash, 64 hex digits>

With the updates that a bundle names and the model that it began with, anyone can make the model that it ended with
(`replay.py`). `audit_chain.py` is the auditor; docs/reference/audit-bundle.md the contract for other languages.
"""

import base64
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from umbel.aggregation.canonical import Json, canonical
from umbel.aggregation.plans.grid import Grid
from umbel.aggregation.plans.masks import SumShown
from umbel.aggregation.plans.round import RoundPlan, TrainingPlan
from umbel.aggregation.round.coverage import Gap
from umbel.aggregation.run.records import Fate

FORMAT = 1
_PURPOSE = b"umbel audit bundle 1\n"


class AuditFailed(Exception):
    """What was found does not fit; `str(error)` says what, in one sentence."""


@dataclass(frozen=True, slots=True)
class ModelId:
    """A model version. `sha256`: of the published file; `master_sha256`: of the coordinator's full-precision copy."""

    version: int
    sha256: str
    master_sha256: str


@dataclass(frozen=True, slots=True)
class Maker:
    """What made a bundle: versions of umbel, torch and Python, and the machine's architecture."""

    umbel: str
    torch: str
    python: str
    machine: str


@dataclass(frozen=True, slots=True)
class SignedReport:
    """A client's report as it was sent: the body of its PUT, and what its signature (RFC 9421) is made of.

    An empty `signature`: the coordinator did not keep it, and `body` is what it had read there.
    """

    body: str
    created: int = 0
    nonce: str = ""
    signature: str = ""


@dataclass(frozen=True, slots=True)
class Participant:
    """One client of the cohort. `key`: its public key, base64; `announced`: samples, when the cohort was drawn.

    `weight`, `report`: None unless it reported in time. `report_s`: seconds from the opening to its report.
    """

    client: str
    key: str
    draws: int
    announced: int
    tier: str
    fate: Fate
    reason: str
    weight: int | None
    report: SignedReport | None
    report_s: float | None
    silent_s: float
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, slots=True)
class ExactSum:
    """The integers that the model was made of. `sha256`: of them as int64, little-endian, in the layout's order.

    `update_rms`: the root mean square of the updates, where their codec measures it; the next step is made of it.
    `shown`: of a secure round, whose sum is the unmasked one: the next round's numbers are made of it.
    """

    sha256: str
    total_weight: int
    n_clients: int
    update_rms: float | None = None
    shown: SumShown | None = None

    def __post_init__(self) -> None:
        if self.update_rms is not None and not 0 <= self.update_rms < math.inf:  # also refuses a NaN
            raise ValueError(f"update_rms must be finite and not negative, not {self.update_rms}")


@dataclass(frozen=True, slots=True)
class KeptUpdates:
    """What the run's policy says of this attempt's updates.

    `kept`: whether they were kept when it ended. `deleted`: numbers of the bundles whose updates went at that moment.
    `reason`: in words.
    """

    kept: bool
    deleted: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RunCreated:
    """The first bundle's facts. `run_file`: whole; `layout`: the model's, as the text whose SHA-256 is its digest."""

    at: float
    run_file: Mapping[str, Any]
    run_file_sha256: str
    model: ModelId
    layout: str


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """An ended attempt's facts: of a round of training, or of evaluation (`plan.task`), which makes no model.

    `sum`: None unless a model was made of it; `model_out`: likewise, or the copy of version `rolled_back_to` from which
    the run went on, where a rollback ended the attempt. Times in Unix seconds.
    """

    round: int
    attempt: int
    committed: bool
    reason: str
    run_status: str
    run_reason: str
    run_file_sha256: str
    layout_digest: str
    model_in: ModelId
    model_out: ModelId | None
    rolled_back_to: int | None
    plan: RoundPlan
    grid: Grid
    training: TrainingPlan
    server_learning_rate: float
    clients: tuple[Participant, ...]
    sum: ExactSum | None
    passed_over: int
    samples_passed_over: int
    uncovered: tuple[Gap, ...]
    metrics: Mapping[str, float]
    evaluation: Mapping[str, float]
    opened_at: float
    closed_at: float
    ended_at: float
    updates: KeptUpdates

    @property
    def accepted(self) -> tuple[Participant, ...]:
        """Those whose updates are in the sum."""
        return tuple(one for one in self.clients if one.weight is not None) if self.sum is not None else ()


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle. `number`: 0 for the run's creation, then one more each. `previous`: the hash before, first empty.
    `key`: the coordinator's public audit key, base64.
    """

    kind: Literal["run", "round"]
    run: str
    number: int
    previous: str
    key: str
    maker: Maker
    facts: RunCreated | RoundEnded
    format: int = FORMAT


def bundle_of(run: str, number: int, previous: str, key: str, maker: Maker, facts: RunCreated | RoundEnded) -> Bundle:
    """A bundle of these facts."""
    return Bundle("run" if isinstance(facts, RunCreated) else "round", run, number, previous, key, maker, facts)


@dataclass(frozen=True, slots=True)
class Sealed:
    """A bundle's canonical text, its SHA-256 (hex) and the signature (base64)."""

    text: str
    sha256: str
    signature: str


@dataclass(frozen=True, slots=True)
class PublicAuditKey:
    """GET /v1/audit-key: the key whose signatures stand on audit bundles, base64 of its 32 bytes."""

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
        raise AuditFailed("its content does not have the hash that stands beside it: it was changed")
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(base64.b64decode(signature, validate=True), _signed(sha256))
    except (InvalidSignature, ValueError) as error:
        raise AuditFailed("its signature is not of the audit key that it names") from error


def json_sha256(value: object) -> str:
    """The SHA-256 of a value's canonical JSON, hex: the hash of a run file."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def _signed(sha256: str) -> bytes:
    return _PURPOSE + sha256.encode()
