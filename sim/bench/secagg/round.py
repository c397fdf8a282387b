"""The CPU time of a secure round for a client, step by step, and for the coordinator: one thread."""

import ctypes
import gc
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import psutil
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from torch import Tensor

from umbel.aggregation.codec.modular import lift
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.crypto.curve import KeyPair
from umbel.aggregation.secagg.masked_input import MaskedReader, masked_input, unmasked
from umbel.aggregation.secagg.messages import encode_agreements, encode_indices
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.secagg.numbers.contribution import Contribution, LocalWork, contribution
from umbel.aggregation.secagg.session import Session
from umbel.sim.bench.measuring import MB, RssPeak, least_ms
from umbel.sim.bench.report import BenchRow, Hold
from umbel.sim.bench.secagg.cohort import (
    Advertised,
    advertised,
    bits_of_sums,
    composition_of,
    keystream,
    made_contribution,
    plain_sums,
    secure_plan,
)

N, N_GONE, N_VALUES, K_SHARED = 100, 10, 1_000_000, 100
SHARE_MS_MAX, COORDINATOR_S_MAX = 20.0, 1.0
_MEASURED = 4
_WORK = LocalWork(100, 1, 1)
Made = TypeVar("Made")


class Cost:
    """CPU seconds of this process, by step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def of(self, step: str, do: Callable[[], Made]) -> Made:
        """Take a step, and count its time."""
        started = time.process_time()
        made = do()
        self.seconds[step] = self.seconds.get(step, 0.0) + time.process_time() - started
        return made

    @property
    def total_ms(self) -> float:
        return 1e3 * sum(self.seconds.values())

    @property
    def words(self) -> str:
        return ", ".join(f"{step} {1e3 * seconds:.3g} ms" for step, seconds in self.seconds.items())


@dataclass(frozen=True, slots=True)
class RoundRows:
    """Rows, and the times of single steps."""

    rows: Sequence[BenchRow]
    notes: Sequence[str]


def round_rows(*, quick: bool = False, n_values: int = N_VALUES) -> RoundRows:
    """The share step, a client's whole round, and the coordinator's end of one."""
    cohort = advertised(N, os.urandom)
    client_row, client_note = _client(cohort, n_values)
    coordinator_rows, coordinator_note = _coordinator(advertised(N, os.urandom), n_values, 1 if quick else 4)
    return RoundRows((*share_rows(), client_row, *coordinator_rows), (client_note, coordinator_note))


# --- a client ---------------------------------------------------------------------------------------------------------


def share_rows(k: int = K_SHARED) -> Sequence[BenchRow]:
    """ShareKeys with k neighbours, the least of all clients; and the check of the roster before it."""
    cohort = advertised(k + 1, os.urandom)
    share_ms = min(least_ms([partial(client.share, cohort.roster) for client in cohort.clients], 1))
    read = partial(Session.of_message, cohort.party.context, cohort.roster)
    exchange_ms, read_ms, verify_ms = least_ms((lambda: _exchange_keys(cohort), read, lambda: _verify(cohort)), 9)
    what = f"share step, {k} neighbours: Shamir of two secrets, keys, commitments, sealing, a signature"
    return (
        BenchRow(what, share_ms, f"{k} X25519 exchanges", exchange_ms, "ms", Hold(SHARE_MS_MAX, "ours")),
        BenchRow(
            f"check of the roster of {k + 1} clients, before the share step",
            read_ms,
            f"{k + 1} Ed25519 verifications",
            verify_ms,
            "ms",
        ),
    )


def _exchange_keys(cohort: Advertised) -> None:
    pair = KeyPair(bytes(range(32)))
    for advert in list(cohort.party.session.adverts.values())[1:]:
        pair.shared(advert.channel_key)


def _verify(cohort: Advertised) -> None:
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    message = bytes(128)
    public, signature = key.public_key().public_bytes_raw(), key.sign(message)
    for _ in cohort.clients:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)


def _client(cohort: Advertised, n_values: int) -> tuple[BenchRow, str]:
    """Every step of a client in a round without drop-outs; the fastest of the first few clients."""
    composition = composition_of(secure_plan(N, bits=bits_of_sums(N)), n_values)
    clients, inputs, change = cohort.clients[:_MEASURED], encode_indices(range(N)), torch.randn(n_values) * 0.01
    costs = [Cost() for _ in clients]
    for cost, client in zip(costs, clients, strict=True):
        cost.of("keys", partial(_make_keys, client))
        cost.of("roster", partial(Session.of_message, cohort.party.context, cohort.roster))
        cost.of("shares", partial(client.share, cohort.roster))
    cohort.share()
    agreed = dict[int, bytes]()
    for index, (cost, client) in enumerate(zip(costs, clients, strict=True)):
        cost.of("inbox", partial(client.hear, cohort.party.inbox(index)))
        made = cost.of("clipping and weighing", partial(_weigh, composition, change))
        update = cost.of("rounding, masks, packing", partial(_mask, made, client))
        cost.of("its hash and signature", partial(_sign, client, update))
        agreed[index] = cost.of("agreement", partial(client.agree, inputs))
    agreements = encode_agreements(agreed | _agreements(cohort, range(_MEASURED, N), inputs))
    for cost, client in zip(costs, clients, strict=True):
        cost.of("signatures and shares", partial(client.reveal, agreements))
    least = min(costs, key=lambda cost: cost.total_ms)
    (stream_ms,) = least_ms((keystream(N * 4 * n_values, 1 << 18),), 3)
    what = f"a client's whole round, {N - 1} neighbours, {n_values:,} values"
    row = BenchRow(what, least.total_ms, "AES-256-CTR of its masks", stream_ms, "ms")
    return row, f"A client's round: {least.words}."


def _make_keys(client: SecureClient) -> None:
    """Make keys and the AdvertiseKeys message again."""
    _ = KeyPair(os.urandom(32)), KeyPair(os.urandom(32))
    client.advertise()


def _weigh(composition: Composition, change: Tensor) -> Contribution:
    return contribution(composition, lambda: iter([change]), _WORK, bytes(32))


def _mask(made: Contribution, client: SecureClient) -> bytes:
    return b"".join(masked_input(made, client))


def _sign(client: SecureClient, update: bytes) -> None:
    client.sign_input(hashlib.sha256(update).digest())


def _agreements(cohort: Advertised, indices: Sequence[int], inputs: bytes) -> dict[int, bytes]:
    """The ConsistencyCheck messages of these clients, after they received shares and signed an update."""
    agreed = dict[int, bytes]()
    for index in indices:
        client = cohort.clients[index]
        client.hear(cohort.party.inbox(index))
        client.sign_input(hashlib.sha256(b"an update").digest())
        agreed[index] = client.agree(inputs)
    return agreed


# --- the coordinator --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Answers:
    """All that a coordinator needs at the end: updates and Unmasking messages, by index."""

    composition: Composition
    cohort: Advertised
    updates: Sequence[bytes]
    answers: Sequence[bytes]


def _coordinator(cohort: Advertised, n_values: int, repetitions: int) -> tuple[Sequence[BenchRow], str]:
    """Fold the masked updates of the survivors, reconstruct all secrets, and unmask."""
    evidence = _evidence(cohort, n_values)
    _trim()
    rss = RssPeak(psutil.Process().pid)
    before_mb = rss.now_mb()
    with rss.sampling():
        least, levels, words = _open(evidence)
    grown_mb, model_mb = rss.peak_mb - before_mb, 4 * n_values / MB
    plain_levels, plain_words = plain_sums(evidence.composition, range(N - N_GONE))
    assert torch.equal(lift(levels, evidence.composition.secure.bits), plain_levels), "the sum is the plain one"
    assert torch.equal(words, plain_words)
    for _ in range(1, repetitions):
        least = min(least, _open(evidence)[0], key=lambda cost: cost.total_ms)
    n_streams = (N - N_GONE) * (1 + N_GONE)
    (stream_ms,) = least_ms((keystream(n_streams * 4 * n_values, 1 << 18),), 2)
    what = f"coordinator, {N - N_GONE} of {N} clients, {n_values:,} values: sum, secrets, masks"
    hold = Hold(COORDINATOR_S_MAX, "ours")
    rows = (
        BenchRow(what, least.total_ms / 1e3, "AES-256-CTR of the masks", stream_ms / 1e3, "s", hold),
        BenchRow("memory of the coordinator's round", grown_mb, f"the model, {model_mb:.0f} MB", model_mb, "MB"),
    )
    return rows, f"The coordinator's round: {least.words}."


def _evidence(cohort: Advertised, n_values: int) -> _Answers:
    cohort.share()
    composition = composition_of(secure_plan(N, bits=bits_of_sums(N)), n_values)
    alive, clients = range(N - N_GONE), cohort.clients[: N - N_GONE]
    agreements = encode_agreements(_agreements(cohort, alive, encode_indices(alive)))
    contributions = (made_contribution(composition, index) for index in alive)
    updates = [b"".join(masked_input(made, client)) for made, client in zip(contributions, clients, strict=True)]
    return _Answers(composition, cohort, updates, [client.reveal(agreements) for client in clients])


def _open(evidence: _Answers) -> tuple[Cost, Tensor, Tensor]:
    """The coordinator's part, once, and the resulting sums."""
    composition, reader, cost = evidence.composition, MaskedReader(evidence.composition), Cost()
    total = reader.new_sum()
    for update in evidence.updates:
        cost.of("fold", partial(reader.fold, total, update))
    party = evidence.cohort.another_coordinator(range(len(evidence.updates)))
    for index, answer in enumerate(evidence.answers):
        cost.of("shares", partial(party.take_shares, index, answer))
    opened = cost.of("secrets", party.open)
    levels, words = cost.of("masks", lambda: unmasked(total, composition, opened))
    return cost, levels, words


def _trim() -> None:
    """Return free memory to the system, so that growth shows."""
    gc.collect()
    with suppress(AttributeError, OSError):  # missing in some libc
        ctypes.CDLL(None).malloc_trim(0)
