"""The peer of `umbel bench secagg`: Flower's SecAgg+ functions, called as its client app does, on the same numbers.

The comparison needs an installed `flwr` (written for 1.42). Flower differs in kind: its masks are NumPy's Mersenne
Twister, seeded with 32 bits folded from the shared key; its keys are P-384, the private one shared as PEM; it has no
signatures and no commitments to shares. The time is this process's CPU time, with all of its threads.
"""

import contextlib
import importlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from umbel.aggregation.secagg.crypto.shamir import Interpolation, split
from umbel.aggregation.secagg.masked_input import masked_input
from umbel.aggregation.secagg.numbers.contribution import LocalWork, contribution
from umbel.sim.bench.measuring import least_ms
from umbel.sim.bench.report import BenchRow
from umbel.sim.bench.secagg.cohort import advertised, bits_of_sums, composition_of, ready_client, secure_plan

K, N_VALUES = 100, 1_000_000
_THRESHOLD = 2 * (K + 1) // 3 + 1
_TARGET_RANGE, _CLIP = 1 << 16, 8.0
_WORK = LocalWork(1, 1, 1)


def flower_rows(*, repetitions: int, n_values: int = N_VALUES) -> Sequence[BenchRow]:
    """The mask step, the share step, and the reconstruction of a secret; no rows without Flower."""
    with contextlib.suppress(ImportError):
        peer = Peer(K, n_values)
        return (*_client_rows(peer, repetitions, n_values), *_secret_rows(peer, repetitions))
    return ()


class Peer:
    """A Flower client with k neighbours, as in `secaggplus_mod`. Raises `ImportError`."""

    def __init__(self, k: int, n_values: int) -> None:
        self._mod: Any = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
        self._utils: Any = importlib.import_module("flwr.common.secure_aggregation.secaggplus_utils")
        self._crypto: Any = importlib.import_module("flwr.common.secure_aggregation.crypto.symmetric_encryption")
        self.shamir: Any = importlib.import_module("flwr.common.secure_aggregation.crypto.shamir")
        self._common: Any = importlib.import_module("flwr.common")
        key: Any = importlib.import_module("flwr.common.secure_aggregation.secaggplus_constants").Key
        self._key = key
        asked = {
            key.SAMPLE_NUMBER: k + 1,
            key.SHARE_NUMBER: k + 1,
            key.THRESHOLD: _THRESHOLD,
            key.CLIPPING_RANGE: _CLIP,
            key.TARGET_RANGE: _TARGET_RANGE,
            key.MOD_RANGE: 1 << 32,
            key.MAX_WEIGHT: 1000.0,
        }
        self.states = [self._mod.SecAggPlusState() for _ in range(k + 1)]
        for node, state in enumerate(self.states):
            state.nid = node
            self._mod._setup(state, asked)
        self.roster = {str(node): (state.pk1, state.pk2) for node, state in enumerate(self.states)}
        change = torch.randn(n_values, generator=torch.Generator().manual_seed(0)).mul_(0.01).numpy()
        self._parameters = self._common.ndarrays_to_parameters([change])

    def share(self) -> None:
        """ShareKeys."""
        self._mod._share_keys(self.states[0], self.roster)

    def received(self) -> dict[str, Any]:
        """The shares that the coordinator sends it; here all are its own."""
        state, sources = self.states[0], list(range(1, len(self.states)))
        seed, key = state.rd_seed_share_dict[0], state.sk1_share_dict[0]
        plain = {node: self._utils.share_keys_plaintext_concat(node, 0, seed, key) for node in sources}
        sealed = [self._crypto.encrypt(state.ss2_dict[node], plain[node]) for node in sources]
        return {self._key.CIPHERTEXT_LIST: sealed, self._key.SOURCE_LIST: sources}

    def mask(self, received: dict[str, Any]) -> None:
        """MaskedInput: open the shares, round, mask, encode."""
        self._mod._collect_masked_vectors(self.states[0], received, 1, self._parameters)


def _client_rows(peer: Peer, repetitions: int, n_values: int) -> Sequence[BenchRow]:
    cohort = advertised(K + 1, os.urandom)
    fresh = iter(cohort.clients)
    share, peer_share = least_ms((lambda: next(fresh).share(cohort.roster), peer.share), min(repetitions, K))
    client, received = ready_client(K), peer.received()
    composition = composition_of(secure_plan(K + 1, bits=bits_of_sums(K + 1)), n_values)
    change = torch.randn(n_values, generator=torch.Generator().manual_seed(0)) * 0.01

    def mask() -> bytes:
        return b"".join(masked_input(contribution(composition, lambda: iter([change]), _WORK, bytes(32)), client))

    masked, peer_masked = least_ms((mask, lambda: peer.mask(received)), repetitions)
    return (
        BenchRow(f"share step, {K} neighbours", share, "Flower's SecAgg+", peer_share, "ms"),
        BenchRow(f"mask step, {K} neighbours, {n_values:,} values", masked, "Flower's SecAgg+", peer_masked, "ms"),
    )


def _secret_rows(peer: Peer, repetitions: int) -> Sequence[BenchRow]:
    """A survivor's seed, and the key of a lost client: t shares each. Ours takes the same time for both."""
    points = list(range(1, _THRESHOLD + 1))
    shares = split(os.urandom(32), _THRESHOLD, points, os.urandom)
    rows = list[BenchRow]()
    for what, secret in (("a survivor's seed", os.urandom(32)), ("the key of a lost client", peer.states[0].sk1)):
        theirs: list[bytes] = peer.shamir.create_shares(secret, _THRESHOLD, _THRESHOLD)
        kernels: tuple[Callable[[], object], ...] = (
            lambda: Interpolation(tuple(points), _THRESHOLD).secret(shares),
            partial(peer.shamir.combine_shares, theirs),
        )
        ours_ms, theirs_ms = least_ms(kernels, repetitions)
        rows.append(BenchRow(f"{what}, of {_THRESHOLD} shares", ours_ms, "Flower's SecAgg+", theirs_ms, "ms"))
    return rows
