"""MNIST (70,000 handwritten digits) and Fashion-MNIST (70,000 pieces of clothing), each from four files in IDX format.

LeCun, Bottou, Bengio and Haffner 1998, "Gradient-based learning applied to document recognition". Xiao, Rasul and
Vollgraf 2017, "Fashion-MNIST: a novel image dataset for benchmarking machine learning algorithms" (arXiv:1708.07747).

An IDX file is one array: a header and its values, gzipped or not.

```
offset size field
     0    2 zero
     2    1 type       08 uint8, 09 int8, 0B int16, 0C int32, 0D float32, 0E float64
     3    1 dimensions n
     4   4n sizes      big-endian uint32, the slowest dimension first
            values     big-endian, row by row
```
"""

import gzip
import math
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from umbel.sim.data.data_set import SampleSet, TrainAndTest

Array: TypeAlias = npt.NDArray[Any]

BYTES_MAX = 1 << 32
_GZIP_MAGIC = b"\x1f\x8b"
_DIMENSIONS_MAX = 32
_HEAD, _SIZE = struct.Struct(">HBB"), struct.Struct(">I")
_TYPES: Mapping[int, str] = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class NotIdx(ValueError):
    """A file is not an IDX file; the message says which file, and what is wrong."""


def read_idx(path: Path) -> Array:
    """The array of an IDX file in this machine's byte order; it may be overwritten.

    No more is held than the header says, and no array above 4 GiB is read. Raises `NotIdx`, and `OSError` if
    the file cannot be read.
    """
    with path.open("rb") as raw:
        is_gzip = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        raw.seek(0)
        try:
            return _read(gzip.GzipFile(fileobj=raw) if is_gzip else raw)
        except (NotIdx, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise NotIdx(f"{path} is not an IDX file: {error}") from error


def _read(file: Readable) -> Array:
    zero, kind, n_dimensions = _HEAD.unpack(_exactly(file, _HEAD.size))
    if zero or kind not in _TYPES or n_dimensions > _DIMENSIONS_MAX:
        raise NotIdx(f"its header must be two zeros, a known type and a number of dimensions up to {_DIMENSIONS_MAX}")
    shape = [_SIZE.unpack(_exactly(file, _SIZE.size))[0] for _ in range(n_dimensions)]
    dtype = np.dtype(_TYPES[kind])
    if (n_bytes := math.prod(shape) * dtype.itemsize) > BYTES_MAX:
        raise NotIdx(f"its header declares {n_bytes} bytes, but at most {BYTES_MAX} are allowed")
    values = np.frombuffer(_exactly(file, n_bytes), dtype).reshape(shape)
    if file.read(1):
        raise NotIdx(f"it has more than the {n_bytes} bytes that its header declares")
    return values.astype(dtype.newbyteorder("="))


def _exactly(file: Readable, n_bytes: int) -> bytes:
    data = file.read(n_bytes)
    if len(data) != n_bytes:
        raise NotIdx(f"it ends after {len(data)} of {n_bytes} bytes")
    return data


N_CLASSES, SIDE = 10, 28
N_PIXELS = SIDE * SIDE


def load_images(folder: Path) -> TrainAndTest:
    """The data set whose four gzipped files are in `folder`, each image flat.

    Raises `OSError` if one cannot be read, `NotIdx` if it is not what its name says.
    """
    return TrainAndTest(_samples(folder, "train"), _samples(folder, "t10k"))


def _samples(folder: Path, part: str) -> SampleSet:
    images_path, labels_path = folder / f"{part}-images-idx3-ubyte.gz", folder / f"{part}-labels-idx1-ubyte.gz"
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.dtype != np.uint8 or images.shape[1:] != (SIDE, SIDE):
        raise NotIdx(f"{images_path} does not hold images of 28 by 28 bytes")
    if labels.dtype != np.uint8 or labels.shape != images.shape[:1] or labels.max(initial=0) >= N_CLASSES:
        raise NotIdx(f"{labels_path} does not hold a digit for each image of {images_path.name}")
    pixels = torch.from_numpy(images).view(-1, N_PIXELS).to(torch.float32).div_(255)
    return SampleSet(pixels, torch.from_numpy(labels).to(torch.int64))
