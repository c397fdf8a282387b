"""What masks cost a client: adding them to a vector, against making their keystreams alone, which nobody can avoid."""

import os
import time
from collections.abc import Callable, Sequence

import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR

from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.crypto.derive import Vector
from umbel.aggregation.secagg.masked_input import lane_dtype
from umbel.sim.bench.report import BenchRow, Hold
from umbel.sim.bench.secagg.cohort import advertised

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
    """A client with k neighbours that has heard of their shares."""
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
    # Of the narrowest lanes a stretch is made so quickly that what begins it shows; they are a quarter of the work.
    hold = Hold(MASKS_MAX) if width > 1 else None
    return BenchRow(what, ours, f"AES-256-CTR of the same {n_bytes / 1e6:,.0f} MB", min(streams), "ms", hold)


def keystream(n_bytes: int, buffer: int) -> Callable[[], None]:
    """Makes so much keystream, and leaves it in a buffer of that size."""
    zeros, out = memoryview(bytes(buffer)), memoryview(bytearray(buffer + 15))

    def make() -> None:
        stream = Cipher(AES256(bytes(32)), CTR(bytes(16))).encryptor()
        for _ in range(n_bytes // buffer):
            stream.update_into(zeros, out)
        stream.update_into(zeros[: n_bytes % buffer], out)

    return make


def least_ms(kernels: Sequence[Callable[[], object]], repetitions: int) -> list[float]:
    """By kernel: the least CPU time of this process, in ms. They take turns, so that a neighbour slows all or none."""
    least = [float("inf")] * len(kernels)
    for _ in range(repetitions):
        for i, kernel in enumerate(kernels):
            started = time.process_time()
            kernel()
            least[i] = min(least[i], (time.process_time() - started) * 1e3)
    return least
