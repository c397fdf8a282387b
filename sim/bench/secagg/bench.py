"""`umbel bench secagg`: what secure aggregation costs in time and bytes, against its lower limits and Flower.

The bytes that a client sends are compared with float32 and with the formula of Bonawitz et al. 2017. In bits for n
clients and m values it is 2 n a_K + (5n - 4) a_S + m ceil(log2 R), with a_K bits of a public key (256), a_S bits of a
share (264, which is 33 bytes), and R the modulus of the sum (2^bits). It counts both ways: two keys sent and 2 (n - 1)
received, 2 (n - 1) shares sent and as many received, n revealed, one vector. It leaves out signatures, commitments, the
consistency check, and lists of participants; ours include them.

Bodies are counted, not what HTTP adds. Sent: AdvertiseKeys, ShareKeys, the update (with its header and words) and its
signature, ConsistencyCheck, Unmasking. Received: Roster, Inbox, Inputs, Agreements; not the model.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.axes import Axes

from umbel.aggregation.secagg.masked_input import MaskedReader
from umbel.aggregation.secagg.messages import encode_agreements, encode_indices
from umbel.sim.bench.report import BenchRow, Hold, Report
from umbel.sim.bench.secagg.cohort import advertised, bits_of_sums, composition_of, mask_rows, secure_plan
from umbel.sim.bench.secagg.flower import flower_rows
from umbel.sim.bench.secagg.round import round_rows
from umbel.sim.results.plot_style import FAINT, LIMIT, OURS, PEER, dress_bench, new_figure, write_figure

_NOTES = (
    "Times: CPU time of this process, one thread, the least of repeated runs; ours and theirs take turns.",
    "Bytes: bodies of messages. The formula of Bonawitz et al. 2017 counts both directions, without signatures.",
)
_NO_PEER = "Flower is not installed here (the extra `flower`), so its rows are left out."


def measure(*, quick: bool, plot: Path | None) -> Report:
    """Run the benchmark. `quick`: fewer repetitions, and no cohort of 300; `plot`: for the picture (PNG)."""
    torch.set_num_threads(1)
    masks, rounds, sent = mask_rows(quick=quick), round_rows(quick=quick), bytes_rows(quick=quick)
    peers = flower_rows(repetitions=1 if quick else 3)
    notes = (*_NOTES, *rounds.notes, *(() if peers else (_NO_PEER,)))
    report = Report("secagg", (*masks, *rounds.rows, *sent, *peers), notes)
    if plot is not None:
        draw_secagg(plot, report)
    return report


FORMULA_MAX, FLOAT32_MAX = 1.1, 0.76
_SIZES = ((30, 100_000), (100, 100_000), (100, 1_000_000), (300, 1_000_000))
_SIZES_QUICK = _SIZES[:3]
_FEWER_BITS = (16, 12, 9, 7)  # of a sum whose size the last round measured: usually 7 to 9
_N, _M = 100, 1_000_000
_KEY_BYTES, _SHARE_BYTES = 32, 33


@dataclass(frozen=True, slots=True)
class MessageBytes:
    """Bytes of one client's messages without the update, but with its signature."""

    up: int
    down: int


def bytes_rows(*, quick: bool = False) -> Sequence[BenchRow]:
    """Every size against the formula, sent and in both directions; then the update against float32."""
    rows, found = list[BenchRow](), dict[int, MessageBytes]()
    for n, m in _SIZES_QUICK if quick else _SIZES:
        if n not in found:
            found[n] = traffic(n)
        bits = bits_of_sums(n)
        up = update_bytes(n, m, bits) + found[n].up
        what = f"one of {n} clients, {m:,} values, {bits} bits"
        theirs = formula_bytes(n, m, bits) / 1e6
        for ways, ours, hold in (("sent", up, Hold(FORMULA_MAX)), ("sent and received", up + found[n].down, None)):
            rows.append(BenchRow(f"{what}: {ways}", ours / 1e6, "Bonawitz et al. 2017", theirs, "MB", hold))
    return [*rows, *_against_float32(found[_N].up)]


def _against_float32(beside: int) -> list[BenchRow]:
    rows = list[BenchRow]()
    for bits in (bits_of_sums(_N), *_FEWER_BITS):
        is_any = bits == bits_of_sums(_N)
        what = f"one of {_N} clients, {_M:,} values, {bits} bits: sent"
        against = "float32, for sums of any 16-bit levels" if is_any else "float32, for sums of a known size"
        ours = update_bytes(_N, _M, bits) + beside
        rows.append(BenchRow(what, ours / 1e6, against, 4 * _M / 1e6, "MB", Hold(FLOAT32_MAX) if is_any else None))
    return rows


def formula_bytes(n: int, m: int, bits: int) -> float:
    """Bytes that one of n clients sends and receives for m values, by Bonawitz et al. 2017."""
    return 2 * n * _KEY_BYTES + (5 * n - 4) * _SHARE_BYTES + m * bits / 8


def update_bytes(n: int, m: int, bits: int) -> int:
    """The length of a masked update."""
    return MaskedReader(composition_of(secure_plan(n, bits=bits), m)).update_bytes.start


def traffic(n: int) -> MessageBytes:
    """The message bytes of the first of n clients in a round without drop-outs."""
    cohort = advertised(n, os.urandom)
    cohort.share()
    first = cohort.clients[0]
    sent, received = [first.advertise(), cohort.dealt[0].encode()], [cohort.roster, cohort.party.inbox(0)]
    inputs = encode_indices(range(n))
    agreed = dict[int, bytes]()
    for index, client in enumerate(cohort.clients):
        client.hear(cohort.party.inbox(index))
        signature = client.sign_input(hashlib.sha256(b"an update").digest())
        agreed[index] = client.agree(inputs)
        if client is first:
            sent += [signature, agreed[index]]
    agreements = encode_agreements(agreed)
    sent.append(first.reveal(agreements))
    received += [inputs, agreements]
    return MessageBytes(sum(map(len, sent)), sum(map(len, received)))


def draw_secagg(path: Path, report: Report) -> None:
    figure = new_figure(13, 5.2, "Secure aggregation: what it costs")
    times, sent = figure.subplots(1, 2, width_ratios=(1.5, 1))
    _times(times, [row for row in report.rows if row.unit in ("ms", "s")])
    _sent(sent, [row for row in report.rows if row.against.startswith("float32")])
    write_figure(figure, path)


def _times(axes: Axes, rows: Sequence[BenchRow]) -> None:
    for place, row in enumerate(rows):
        scale = 1e3 if row.unit == "s" else 1.0
        axes.barh(place - 0.2, row.ours * scale, 0.38, color=OURS)
        axes.barh(place + 0.2, row.theirs * scale, 0.38, color=PEER if "Flower" in row.against else LIMIT)
    axes.set_yticks(range(len(rows)), [_short(row.what) for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    for name, color in (("umbel", OURS), ("its cryptography alone", LIMIT), ("Flower's SecAgg+", PEER)):
        axes.barh([0], [0], color=color, label=name)
    dress_bench(axes, "CPU time, one thread", "ms")


def _sent(axes: Axes, rows: Sequence[BenchRow]) -> None:
    axes.axhline(4 * _M / 1e6, color=FAINT, lw=1.2, ls="--", label="float32")
    widths = range(4, 24)
    sizes = [update_bytes(_N, _M, bits) / 1e6 for bits in widths]
    axes.plot(list(widths), sizes, color=LIMIT, lw=2, label="the masked values")
    bits = [int(row.what.split(" bits")[0].split()[-1]) for row in rows]
    axes.plot(bits, [row.ours for row in rows], "o", color=OURS, ms=6, label="all that a client sends")
    axes.set_ylim(bottom=0)
    dress_bench(axes, f"Sent by one of {_N} clients, {_M:,} values", "bits of a masked value", "MB")


def _short(what: str) -> str:
    head = what.split(":")[0]
    return head if len(head) <= 56 else f"{head[:55]}…"
