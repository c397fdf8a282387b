"""A run made by hand, without a coordinator: its bundles, updates and models, the same each time."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import save

from tests.federations.whole_states import next_master, published_state
from umbel.aggregation.audit.bundle import (
    ExactSum,
    KeptUpdates,
    Maker,
    ModelId,
    Participant,
    RoundEnded,
    RunCreated,
    Sealed,
    SignedReport,
    bundle_of,
    json_sha256,
    seal,
)
from umbel.aggregation.audit.chain import report_target
from umbel.aggregation.canonical import canonical, parsed
from umbel.aggregation.model.artifact import master_metadata_of, metadata_of
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.state import State, master_of
from umbel.aggregation.plans.assignment import assignment_id
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.records import Fate
from umbel.aggregation.run.sections import RetentionSection, RoundsSection
from umbel.aggregation.trust.public_keys import public_key_text
from umbel.aggregation.trust.signatures import parse, sign
from umbel.aggregation.types import ClientId, RunId
from umbel.aggregation.update.grid import GridAccumulator, sum_sha256
from umbel.aggregation.update.wire import float32_header

AUDIT_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
CLIENT_KEYS = {name: Ed25519PrivateKey.from_private_bytes(bytes([n] * 32)) for n, name in enumerate(("a", "b", "c"), 1)}
FILE = RunFile("vector", RoundsSection(count=2, target=2, minimum=2), 7, retention=RetentionSection(updates="all"))
MAKER = Maker("0.1.0", "2.13.0", "3.11.7", "Linux x86_64")
OPENED_AT = 1.75e9


@dataclass(frozen=True)
class Played:
    """`updates`: by client; `start`: the file of the full-precision model that round 1 began with."""

    bundles: tuple[Sealed, ...]
    updates: dict[str, bytes]
    start: bytes
    layout: Layout

    @property
    def public_key(self) -> str:
        return public(AUDIT_KEY)


def public(key: Ed25519PrivateKey) -> str:
    return public_key_text(key.public_key().public_bytes_raw())


def play() -> Played:
    """A run of three bundles: its creation, an attempt that was abandoned, and one that was committed."""
    state = {"bias": torch.tensor([0.0, 1.0]), "weight": torch.tensor([[1.5], [-2.0]], dtype=torch.bfloat16)}
    layout = Layout.of_state(state)
    master = master_of(layout, state)
    first = ModelId(0, _sha256(_file(layout, state)), _sha256(save(master, master_metadata_of(layout))))
    whole = parsed(canonical(FILE))
    assert isinstance(whole, dict)
    created = RunCreated(OPENED_AT - 60, whole, json_sha256(FILE), first, layout.to_json())
    updates = {
        name: float32_header(layout).encode() + torch.tensor(values).numpy().tobytes()
        for name, values in (("a", [0.5, -0.25, 1.0, 0.125]), ("b", [-0.5, 0.75, -0.0625, 2.0]))
    }
    ended = (_abandoned(layout, first), _committed(layout, first, master, updates))
    return Played(chained((created, *ended)), updates, save(master, master_metadata_of(layout)), layout)


def chained(facts: Iterable[RunCreated | RoundEnded]) -> tuple[Sealed, ...]:
    """A bundle of each, signed by the coordinator."""
    bundles: list[Sealed] = []
    for number, fact in enumerate(facts):
        previous = bundles[-1].sha256 if bundles else ""
        bundle = bundle_of("vector", number, previous, public(AUDIT_KEY), MAKER, fact)
        bundles.append(seal(bundle, AUDIT_KEY))
    return tuple(bundles)


def _abandoned(layout: Layout, first: ModelId) -> RoundEnded:
    plan = FILE.round_plan(1, 1)
    lost = replace(_reported("c", 1, b""), weight=None, report=None, report_s=None, fate=Fate.LOST, reason="silent")
    return RoundEnded(
        round=1,
        attempt=1,
        committed=False,
        reason="the window of 600 s is over with 0 of at least 2 reports",
        run_status="running",
        run_reason="",
        run_file_sha256=json_sha256(FILE),
        layout_digest=layout.digest,
        model_in=first,
        model_out=None,
        rolled_back_to=None,
        plan=plan,
        grid=plan.grid,
        training=FILE.training_plan(1),
        server_learning_rate=1.0,
        clients=(lost,),
        sum=None,
        passed_over=0,
        samples_passed_over=0,
        uncovered=(),
        metrics={},
        evaluation={},
        opened_at=OPENED_AT,
        closed_at=OPENED_AT + 600.0,
        ended_at=OPENED_AT + 600.0,
        updates=KeptUpdates(False, (), "deleted when the attempt had ended: it made no model of them"),
    )


def _committed(layout: Layout, first: ModelId, master: State, updates: dict[str, bytes]) -> RoundEnded:
    plan = FILE.round_plan(1, 2)
    clients = tuple(_reported(name, 2, update) for name, update in updates.items())
    total = GridAccumulator(layout.n_values, plan.grid)
    for one, update in zip(clients, updates.values(), strict=True):
        assert one.weight is not None
        total.fold_vector(torch.frombuffer(bytearray(update[64:]), dtype=torch.float32), one.weight)
    stepped = next_master(layout, master, total)
    made = ModelId(
        1, _sha256(_file(layout, published_state(layout, stepped))), _sha256(save(stepped, master_metadata_of(layout)))
    )
    return replace(
        _abandoned(layout, first),
        attempt=2,
        committed=True,
        reason="the target of 2 reports is in",
        model_out=made,
        plan=plan,
        clients=clients,
        sum=ExactSum(sum_sha256(total), total.total_weight, 2),
        metrics={"loss": 0.25},
        opened_at=OPENED_AT + 601.5,
        closed_at=OPENED_AT + 632.25,
        ended_at=OPENED_AT + 632.5,
        updates=KeptUpdates(True, (), 'kept for a replay: the run file says retention.updates = "all"'),
    )


def _reported(name: str, attempt: int, update: bytes) -> Participant:
    count = 10 + ord(name) - ord("a")
    body = json.dumps(
        {"sample_count": count, "steps_done": 4, "steps_planned": 4, "update_sha256": _sha256(update), "train_s": 1.5}
    )
    key, created = CLIENT_KEYS[name], int(OPENED_AT + 610)
    target = report_target(assignment_id(RunId("vector"), 1, attempt, ClientId(name)), has_upload=True)
    claims = parse(
        sign(key, name, target, hashlib.sha256(body.encode()).digest(), created, f"nonce-of-report-by-{name}-1")
    )
    return Participant(
        client=name,
        key=public(key),
        draws=1,
        announced=count,
        tier="",
        fate=Fate.ACCEPTED,
        reason="the report counts",
        weight=count,
        report=SignedReport(body, created, claims.nonce, claims.signature),
        report_s=12.5,
        silent_s=0.0,
        bytes_up=len(update),
        bytes_down=300,
    )


def _file(layout: Layout, state: State) -> bytes:
    return save({spec.name: state[spec.name].contiguous() for spec in layout.owners()}, metadata_of(layout))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
