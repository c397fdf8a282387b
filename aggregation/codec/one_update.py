"""One update, decoded without those of a cohort: the same exact sum and the same mean, of one client."""

from collections.abc import Iterator
from dataclasses import dataclass

from umbel.aggregation.codec.entropy.payload import Buffer
from umbel.aggregation.codec.update_codec import UpdateCodec
from umbel.aggregation.errors import LyingLength
from umbel.aggregation.model.next_model import HasMean
from umbel.aggregation.plans.codec import Part

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class OneUpdate:
    """What one update says."""

    change: HasMean  # the weight change, as the mean of one client's
    rms: float | None  # its root mean square, in units of the weights; None if the codec does not measure it


def read_one(codec: UpdateCodec, update: Buffer, rank: int) -> OneUpdate:
    """Decode an update of the client with this rank.

    The model's layout bounds the memory, whatever the update states. Raises an `UpdateRefused` for any update that
    `codec` could not have written.
    """
    lengths = codec.update_bytes
    if len(update) not in lengths:
        least, most = lengths[0], lengths[-1]
        takes = f"{most}" if least == most else f"{least} to {most}"
        raise LyingLength(f"the update has {len(update)} bytes; an update of this model takes {takes}")
    total = codec.new_sum()
    total.add(codec.integers(bytes(update[: codec.header_bytes]), _pieces(update, codec.header_bytes), rank), 1)
    return OneUpdate(codec.mean(total, [Part(1, rank)]), codec.update_rms(total))


def _pieces(update: Buffer, first: int) -> Iterator[memoryview]:
    """The bytes from `first` on, without a copy of all of them."""
    view = memoryview(update)
    return (view[start : start + _PIECE_BYTES] for start in range(first, len(view), _PIECE_BYTES))
