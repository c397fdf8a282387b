"""A cohort's integers modulo 2^m: what secure aggregation adds up, masked or not.

Each client's levels (`rotated.py`) are not cut to m bits: they are taken modulo 2^m, and it is the *sum* that must fit.
Cutting each client's would leave an error that no number of bits and no number of clients takes away, for norms differ
by factors. A mask is a uniform vector modulo 2^m that is added before sending and taken off the sum; it cancels
exactly, and without it what was sent says nothing.

All arithmetic is that of int32, which wraps at 2^32: it is right modulo every 2^m up to there. So a residue is any
int32 whose lowest m bits are right; those are what is packed (`packing.py`), and at the end the sum is lifted to
-2^(m-1) .. 2^(m-1) - 1.

Each client rounds with a dither of its own, which nobody else knows. If it were public, whoever sees a sum with few
levels in it could tell whose they are (docs/decisions, 16). The squared error of the mean is D^2 / 6n for each
coordinate, if nothing wraps. On twenty real updates (an MLP of 301,066 weights, two digits to a client) that is 2.6e-2
of the mean's square at D = rms / 2 in 7 bits, and 6.7e-3 at rms / 4 in 8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from umbel.aggregation.codec.kernels.kernels import add_packed, pack_residues
from umbel.aggregation.codec.kernels.packing import packed_bytes
from umbel.aggregation.codec.rotated import Dither, Rotated
from umbel.aggregation.torch_later import torch
from umbel.aggregation.types import RESIDUE_BITS_MAX

if TYPE_CHECKING:
    from torch import Tensor

_ALARM_AT = 0.75


@dataclass(frozen=True, slots=True)
class Modular:
    """What a cohort sends of its `rotated` vectors, in `bits` a coordinate, 1 to 32."""

    rotated: Rotated
    bits: int

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= RESIDUE_BITS_MAX:
            raise ValueError(f"integers are sent in 1 to {RESIDUE_BITS_MAX} bits, not {self.bits}; take a larger step")

    @property
    def n_bytes(self) -> int:
        """Of a packed vector."""
        return packed_bytes(self.rotated.n_levels, self.bits)

    # --- a client's side ----------------------------------------------------------------------------------------------

    def residues(self, values: Tensor, dither: Dither) -> Iterator[Tensor]:
        """The client's vector in consecutive parts, int32: for masks to be added to, before they are packed.

        `values`: float32, `rotated.n_values`, any device. `dither`: the client's own, uniform. Raises `ValueError` for
        other values, and if they are not finite.
        """
        return self.rotated.levels_with(values, dither)

    def packed(self, residues: Iterable[Tensor]) -> Iterator[Tensor]:
        """The lowest bits of these parts (int8, int16 or int32, whichever hold them): uint8, `n_bytes` in all. Each
        part but the last: a multiple of 512 long.
        """
        return (pack_residues(part, self.bits) for part in residues)

    # --- the coordinator's side ---------------------------------------------------------------------------------------

    def new_sum(self, device: torch.device | str = "cpu") -> Tensor:
        """Zeros: int32, `rotated.n_levels`."""
        return torch.zeros(self.rotated.n_levels, dtype=torch.int32, device=device)

    def add(self, sums: Tensor, packed: Tensor) -> None:
        """Add a packed vector, masked or not, to `sums`. Raises `ValueError` for one of another length."""
        self._require_length(sums)
        if packed.numel() != self.n_bytes:
            raise ValueError(f"a vector takes {self.n_bytes} bytes, not {packed.numel()}")
        for first, length in self.rotated.parts(sums):
            place = slice(packed_bytes(first, self.bits), packed_bytes(first + length, self.bits))
            add_packed(sums[first : first + length], packed[place], self.bits)

    def mean(self, sums: Tensor, n_clients: int) -> Tensor:
        """The mean of the clients whose vectors `sums` has, without masks: float32, `n_values`.

        Raises `ValueError` for sums of another length, or of no clients.
        """
        self._require_length(sums)
        if n_clients < 1:
            raise ValueError("a sum has one client at least")
        lifted = (lift(sums[first : first + n], self.bits) for first, n in self.rotated.parts(sums))
        return self.rotated.plain_mean(lifted, n_clients)

    def share_near_the_edge(self, sums: Tensor) -> float:
        """The share of coordinates beyond three quarters of what the bits hold.

        More than `ALARM_SHARE`: some may have wrapped, and the next round needs a bit more.
        """
        self._require_length(sums)
        edge, n_beyond = _ALARM_AT * 2 ** (self.bits - 1), 0
        for first, n in self.rotated.parts(sums):
            n_beyond += int((lift(sums[first : first + n], self.bits).to(torch.int64).abs() > edge).sum())
        return n_beyond / self.rotated.n_levels

    def _require_length(self, sums: Tensor) -> None:
        if sums.shape != (self.rotated.n_levels,) or sums.dtype != torch.int32:
            raise ValueError(f"a sum is {self.rotated.n_levels} int32, not {list(sums.shape)} of {sums.dtype}")


def lift(residues: Tensor, bits: int) -> Tensor:
    """The integers from -2^(bits-1) to 2^(bits-1) - 1 with these lowest `bits`: int32, any shape."""
    unused = RESIDUE_BITS_MAX - bits
    return (residues << unused) >> unused
