"""A cohort's integers modulo 2^m, as secure aggregation adds them up, masked or not.

Each client's levels (`rotated.py`) are taken modulo 2^m, not cut to m bits. Only the *sum* must fit m bits. Norms
differ by factors, so cutting each client's levels would leave an error that no number of bits or clients removes. A
mask is a uniform vector modulo 2^m. It is added before sending and subtracted from the sum, where it cancels exactly; a
masked vector alone reveals nothing.

All arithmetic is int32, which wraps at 2^32, so it is right modulo every 2^m with m up to 32. A residue is any int32
whose lowest m bits are right. Those bits are packed (`packing.py`), and at the end the sum is lifted to
-2^(m-1) .. 2^(m-1) - 1.

Each client rounds with its own secret dither. With a public one, anyone who sees a sum with few levels could tell whose
they are (docs/decisions, 16). The squared error of the mean is D^2 / 6n for each coordinate, if nothing wraps. On
twenty real updates (an MLP of 301,066 weights, two digits to a client) that is 2.6e-2 of the mean's square at
D = rms / 2 in 7 bits, and 6.7e-3 at rms / 4 in 8.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from umbel.aggregation.codec.rotated import Dither, Rotated
from umbel.aggregation.kernels.kernels import add_packed, pack_residues
from umbel.aggregation.kernels.packing import packed_bytes
from umbel.aggregation.types import RESIDUE_BITS_MAX

_ALARM_AT = 0.75


@dataclass(frozen=True, slots=True)
class Modular:
    """The residues of a cohort's rotated vectors."""

    rotated: Rotated
    bits: int  # a coordinate, 1 to 32

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= RESIDUE_BITS_MAX:
            raise ValueError(
                f"bits must lie between 1 and {RESIDUE_BITS_MAX}, not {self.bits}; a larger step needs fewer bits"
            )

    @property
    def n_bytes(self) -> int:
        """The length of a packed vector."""
        return packed_bytes(self.rotated.n_levels, self.bits)

    # --- a client's side ----------------------------------------------------------------------------------------------

    def residues(self, values: Tensor, dither: Dither) -> Iterator[Tensor]:
        """The client's vector in consecutive parts: int32, to be masked and then packed.

        `values`: float32, `rotated.n_values`, any device. `dither`: the client's own, uniform. Raises `ValueError` for
        other values, and for values that are not finite.
        """
        return self.rotated.levels_with(values, dither)

    def packed(self, residues: Iterable[Tensor]) -> Iterator[Tensor]:
        """The lowest bits of these parts (int8, int16 or int32): uint8, `n_bytes` in all.

        The length of each part but the last must be a multiple of 512.
        """
        return (pack_residues(part, self.bits) for part in residues)

    # --- the coordinator's side ---------------------------------------------------------------------------------------

    def new_sum(self) -> Tensor:
        """Zeros: int32, `rotated.n_levels`."""
        return torch.zeros(self.rotated.n_levels, dtype=torch.int32)

    def add(self, sums: Tensor, packed: Tensor) -> None:
        """Add a packed vector, masked or not, to `sums`. Raises `ValueError` for one of another length."""
        self._require_length(sums)
        if packed.numel() != self.n_bytes:
            raise ValueError(f"a packed vector must have {self.n_bytes} bytes, not {packed.numel()}")
        for first, length in self.rotated.parts(sums):
            place = slice(packed_bytes(first, self.bits), packed_bytes(first + length, self.bits))
            add_packed(sums[first : first + length], packed[place], self.bits)

    def mean(self, sums: Tensor, n_clients: int) -> Tensor:
        """The mean of the clients in an unmasked sum: float32, `n_values`.

        Raises `ValueError` for sums of another length, or of no clients.
        """
        self._require_length(sums)
        if n_clients < 1:
            raise ValueError(f"a sum must have at least one client, not {n_clients}")
        lifted = (lift(sums[first : first + n], self.bits) for first, n in self.rotated.parts(sums))
        return self.rotated.plain_mean(lifted, n_clients)

    def share_near_the_edge(self, sums: Tensor) -> float:
        """The share of coordinates beyond three quarters of the range of the bits.

        Above `ALARM_SHARE` some may have wrapped, and the next round needs one bit more.
        """
        self._require_length(sums)
        edge, n_beyond = _ALARM_AT * 2 ** (self.bits - 1), 0
        for first, n in self.rotated.parts(sums):
            n_beyond += int((lift(sums[first : first + n], self.bits).to(torch.int64).abs() > edge).sum())
        return n_beyond / self.rotated.n_levels

    def _require_length(self, sums: Tensor) -> None:
        if sums.shape != (self.rotated.n_levels,) or sums.dtype != torch.int32:
            raise ValueError(
                f"the sum must have shape [{self.rotated.n_levels}] and type {torch.int32}, but has shape "
                f"{list(sums.shape)} and type {sums.dtype}"
            )


def lift(residues: Tensor, bits: int) -> Tensor:
    """The integers from -2^(bits-1) to 2^(bits-1) - 1 with these lowest `bits`: int32, any shape."""
    unused = RESIDUE_BITS_MAX - bits
    return (residues << unused) >> unused
