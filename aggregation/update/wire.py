"""The bytes of a client update: a 64-byte header, then the payload. `docs/reference/wire.md` has test vectors.

```
offset size field
     0    4 magic           "UMBL"
     4    1 version         1
     5    1 codec           0 = float32, 1 = integer, 2 to 11 as `Codec` has them
     6    2 reserved        zero
     8    8 n_values        values in the vector; must equal the layout's
    16   32 layout_digest   SHA-256 of the layout the client trained
    48    8 payload_bytes   length of what follows
    56    8 reserved        zero
```

The codec defines the payload (`update_codec.py`). The plan gives its length, or its greatest length, before a byte is
read. A reader never allocates memory by what a header says; it only compares.
"""

import struct
from dataclasses import dataclass

from umbel.aggregation.errors import LyingLength, MalformedUpdate, WrongCodec, WrongLayout
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.codec import Codec

MAGIC = b"UMBL"
VERSION = 1
HEADER_BYTES = 64
CHUNK_BYTES_MIN = 64 << 10
_CHUNKS_MAX = 4096  # an update of 4 GiB fits chunks of 1 MiB, the limit of many proxies
_CHUNKS_OF_FEW_BYTES = 64
CHANGE = 16  # in place of the codec, in a change from one model version to the next (`downlink/change.py`)
_HEADER = struct.Struct("<4sBBHQ32sQQ")


@dataclass(frozen=True, slots=True)
class UpdateHeader:
    """The header of an update. `layout_digest`: 32 bytes."""

    codec: Codec
    n_values: int
    layout_digest: bytes
    payload_bytes: int

    def encode(self) -> bytes:
        return _HEADER.pack(MAGIC, VERSION, self.codec, 0, self.n_values, self.layout_digest, self.payload_bytes, 0)


def least_chunk_bytes(update_bytes: int) -> int:
    """The least length of a chunk of such an update, except for the last chunk.

    Every chunk costs the coordinator a file and a row. So a chunk has at least 64 KiB (or a 64th of a small update),
    and at least a 4096th of the update.
    """
    return max(min(CHUNK_BYTES_MIN, -(-update_bytes // _CHUNKS_OF_FEW_BYTES)), -(-update_bytes // _CHUNKS_MAX))


def header_for(layout: Layout, codec: Codec, payload_bytes: int) -> UpdateHeader:
    """The header of an update of a model with this layout."""
    return UpdateHeader(codec, layout.n_values, bytes.fromhex(layout.digest), payload_bytes)


def change_header(layout: Layout, payload_bytes: int) -> bytes:
    """The only header that a change of a model with this layout and this payload length may have."""
    digest = bytes.fromhex(layout.digest)
    return _HEADER.pack(MAGIC, VERSION, CHANGE, 0, layout.n_values, digest, payload_bytes, 0)


def float32_header(layout: Layout) -> UpdateHeader:
    """The only header that an update with codec 0 may have."""
    return header_for(layout, Codec.FLOAT32, 4 * layout.n_values)


def read_header(data: bytes, layout: Layout, codec: Codec, payload_bytes: range) -> UpdateHeader:
    """Check the first `HEADER_BYTES` bytes of an update against what the plan asked for.

    `payload_bytes`: the lengths that its payload may have. Raises `MalformedUpdate`, `WrongCodec`, `WrongLayout` or
    `LyingLength`, in this order.
    """
    if len(data) < HEADER_BYTES:
        raise MalformedUpdate(f"an update starts with a header of {HEADER_BYTES} bytes; only {len(data)} arrived")
    magic, version, codec_id, zero16, n_values, digest, n_bytes, zero64 = _HEADER.unpack(data[:HEADER_BYTES])
    if magic != MAGIC or version != VERSION or zero16 or zero64:
        raise MalformedUpdate(f"these bytes are not an umbel update of version {VERSION}; see docs/reference/wire.md")
    if codec_id != codec:
        raise WrongCodec(
            f"the assignment asks for codec {codec.name.lower()} ({codec.value}), but the update has codec {codec_id}"
        )
    if digest != bytes.fromhex(layout.digest):
        raise WrongLayout(
            f"the update was made for layout {digest.hex()[:12]}…, the model has {layout.digest[:12]}…; "
            "download the model of this assignment and train that"
        )
    if n_values != layout.n_values or n_bytes not in payload_bytes:
        least, most = payload_bytes[0], payload_bytes[-1]
        raise LyingLength(
            f"the header declares {n_values} values in {n_bytes} bytes; the model has {layout.n_values} values, which "
            f"take {most if least == most else f'{least} to {most}'} bytes"
        )
    return UpdateHeader(codec, n_values, digest, n_bytes)
