"""Secure rounds for benchmarks and tests: plans, contributions, plain sums, cohorts, and what masks cost a client.

A cohort takes each phase at once, without the round's machine. All its clients share one reading of the roster: a
cohort of 300 would otherwise check some 90,000 signatures.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from torch import Tensor

from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.codec import Codec, CodecPlan, as_float32
from umbel.aggregation.plans.masks import SecurePlan
from umbel.aggregation.plans.round import RoundPlan, Weighting
from umbel.aggregation.secagg.client import Random, SecureClient
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.coordinator import SecureCoordinator
from umbel.aggregation.secagg.crypto.derive import Vector
from umbel.aggregation.secagg.masked_input import lane_dtype
from umbel.aggregation.secagg.messages import ShareKeys
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.secagg.numbers.contribution import (
    CONTRIBUTION_SECRET_BYTES,
    Contribution,
    LocalWork,
    contribution,
)
from umbel.aggregation.trust.public_keys import public_key_text
from umbel.aggregation.types import ClientId, RunId
from umbel.sim.bench.measuring import least_ms
from umbel.sim.bench.report import BenchRow, Hold
from umbel.sim.secure.exchange import seeded_bytes

SAMPLES_MAX = 1000
WINDOW_S = 600.0
_BITS_OF_A_LEVEL, _RMS = 16, 0.01


def secure_plan(n: int, *, bits: int, minimum: int = 3, window_s: float = WINDOW_S) -> RoundPlan:
    """A round that asks n clients and waits for all of them until its window ends."""
    secure = SecurePlan(bits, SAMPLES_MAX, n, minimum)
    return RoundPlan(
        RunId("secure"), 1, 1, n, minimum, 1.0, window_s, Weighting.SAMPLES, SAMPLES_MAX, 64.0, seed=1, secure=secure
    )


def bits_of_sums(n: int) -> int:
    """How many bits hold the sum of any n levels of 16 bits."""
    return _BITS_OF_A_LEVEL + (n - 1).bit_length()


def composition_of(plan: RoundPlan, n_values: int) -> Composition:
    """The composition for a model of one tensor."""
    assert plan.secure is not None
    codec = CodecPlan(Codec.INTEGER, as_float32(64 / _RMS), key=7)
    layout = Layout.of_state({"weights": torch.zeros(n_values)})
    return Composition(codec, plan.secure, plan.grid, SAMPLES_MAX, layout)


def made_contribution(composition: Composition, rank: int) -> Contribution:
    """A random weight change of a client; its sample count follows from its rank."""
    draw = torch.Generator().manual_seed(rank)
    change = torch.randn(composition.layout.n_values, generator=draw) * _RMS
    secret = seeded_bytes(f"{rank}/contribution")(CONTRIBUTION_SECRET_BYTES)
    return contribution(composition, lambda: iter([change]), LocalWork(1 + rank % SAMPLES_MAX, 1, 1), secret)


def plain_sums(composition: Composition, ranks: Iterable[int]) -> tuple[Tensor, Tensor]:
    """The sums of levels and words of these clients' contributions before masking."""
    levels = torch.zeros(composition.n_levels, dtype=torch.int64)
    words = torch.zeros(composition.n_words, dtype=torch.int64)
    for rank in ranks:
        one = made_contribution(composition, rank)
        levels += torch.cat(list(one.levels())).to(torch.int64)
        words += one.words
    assert int(levels.abs().max()) < 1 << (composition.secure.bits - 1), "they fit, so nothing wraps"
    return levels.to(torch.int32), words


def client_name(rank: int) -> ClientId:
    """Names in the order of their ranks, up to 100,000 of them."""
    return ClientId(f"client-{rank:05}")


_OPENING, _SHA256 = bytes(32), "ab" * 32


@dataclass(slots=True)
class Advertised:
    """A cohort that has advertised its keys. `party`: the coordinator, with a closed roster."""

    clients: Sequence[SecureClient]
    party: SecureCoordinator
    dealt: Mapping[int, ShareKeys] = field(default_factory=dict[int, ShareKeys])  # ShareKeys messages, once shared

    @property
    def roster(self) -> bytes:
        return self.party.roster()

    def share(self) -> None:
        """Have every client share its keys."""
        self.dealt = {i: self.party.read_shares(i, client.share(self.roster)) for i, client in enumerate(self.clients)}
        self._load(self.party)

    def another_coordinator(self, inputs: Iterable[int]) -> SecureCoordinator:
        """A coordinator of the same attempt before unmasking. `inputs`: the clients in the sum."""
        party = SecureCoordinator(self.party.context, _OPENING)
        party.close_roster(self.party.session.adverts.values())
        self._load(party)
        party.close_inputs(inputs)
        return party

    def _load(self, party: SecureCoordinator) -> None:
        party.close_shares(self.dealt)
        party.load_shares(self.dealt)


def advertised(n: int, random: Random) -> Advertised:
    """A cohort of n clients with new keys."""
    identities = [Ed25519PrivateKey.from_private_bytes(random(32)) for _ in range(n)]
    keys = (public_key_text(identity.public_key().public_bytes_raw()) for identity in identities)
    cohort = tuple((client_name(index), key) for index, key in enumerate(keys))
    opened = hashlib.sha256(_OPENING).hexdigest()
    context = Context(RunId("bench"), 1, 1, "0f" * 16, _SHA256, _SHA256, _SHA256, "", cohort, 3, opened, window_s=600.0)
    party = SecureCoordinator(context, _OPENING)
    clients = [
        SecureClient(context, index, identity, random, read_roster=lambda _context, _roster: party.session)
        for index, identity in enumerate(identities)
    ]
    party.close_roster(party.check_keys(index, client.advertise()) for index, client in enumerate(clients))
    return Advertised(clients, party)


N_VALUES = 1_000_000
MASKS_MAX = 1.5  # keystreams
_NEIGHBOURS = (30, 100)
_LANES = {4: 23, 2: 16, 1: 8}  # bytes of a lane: bits that take it
_BUFFERS = (1 << 18, 1 << 20)
_REPETITIONS, _REPETITIONS_QUICK = 15, 5


def mask_rows(*, quick: bool = False, n_values: int = N_VALUES) -> Sequence[BenchRow]:
    """For each number of neighbours and each width of lanes."""
    rows = list[BenchRow]()
    for k in _NEIGHBOURS:
        client = ready_client(k)
        for width, bits in _LANES.items():
            rows.append(_row(client, k, width, bits, n_values, _REPETITIONS_QUICK if quick else _REPETITIONS))
    return rows


def ready_client(k: int) -> SecureClient:
    """A client with k neighbours that has received their shares."""
    cohort = advertised(k + 1, os.urandom)
    cohort.share()
    client = cohort.clients[0]
    client.hear(cohort.party.inbox(0))
    return client


def _row(client: SecureClient, k: int, width: int, bits: int, n_values: int, repetitions: int) -> BenchRow:
    lanes = torch.zeros(n_values, dtype=lane_dtype(bits))
    n_bytes = (k + 1) * n_values * width
    kernels: list[Callable[[], object]] = [lambda: client.masks(Vector.LEVELS).apply(lanes)]
    kernels += [keystream(n_bytes, buffer) for buffer in _BUFFERS]
    ours, *streams = least_ms(kernels, repetitions)
    what = f"masks of {k} neighbours, {n_values:,} lanes of {width} byte{'s' if width > 1 else ''}"
    # The narrowest lanes are computed so quickly that the start of each stretch dominates.
    hold = Hold(MASKS_MAX) if width > 1 else None
    return BenchRow(what, ours, f"AES-256-CTR of the same {n_bytes / 1e6:,.0f} MB", min(streams), "ms", hold)


def keystream(n_bytes: int, buffer: int) -> Callable[[], None]:
    """Makes this much keystream, in a buffer of that size."""
    zeros, out = memoryview(bytes(buffer)), memoryview(bytearray(buffer + 15))

    def make() -> None:
        stream = Cipher(AES256(bytes(32)), CTR(bytes(16))).encryptor()
        for _ in range(n_bytes // buffer):
            stream.update_into(zeros, out)
        stream.update_into(zeros[: n_bytes % buffer], out)

    return make
