"""Records on their way between processes: a head, which is short, and each array's bytes, which are copied least often.

As one protobuf message, a record of a large model would be copied six times on its way.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from flwr.app import ArrayRecord, RecordDict

from umbel.client.flower.records import packed, unpacked
from umbel.sim.engines.workers.worker_process import SharedTensor, mapped


def pieces_of(record: RecordDict) -> list[bytes]:
    """The head, which has everything but the bytes of arrays, and these."""
    head, arrays = dict(record.items()), list[bytes]()
    for name, one in head.items():
        if isinstance(one, ArrayRecord):
            arrays += [array.data for array in one.values()]
            head[name] = ArrayRecord({key: replace(array, data=b"") for key, array in one.items()})
    return [packed(RecordDict(head)), *arrays]


def record_of(pieces: Sequence[bytes]) -> RecordDict:
    """The inverse of `pieces_of`."""
    record, arrays = dict(unpacked(pieces[0]).items()), iter(pieces[1:])
    for name, one in record.items():
        if isinstance(one, ArrayRecord):
            record[name] = ArrayRecord({key: replace(array, data=next(arrays)) for key, array in one.items()})
    return RecordDict(record)


class SharedPieces:
    """Bytes in memory that other processes can read. `fd`: of the memory; `lengths`: of the pieces in it."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.lengths = [len(piece) for piece in pieces]
        self._memory = SharedTensor([sum(self.lengths)], torch.uint8)
        view, start = self._memory.tensor.numpy().data, 0
        for piece in pieces:
            view[start : start + len(piece)] = piece
            start += len(piece)

    @property
    def fd(self) -> int:
        return self._memory.fd

    def close(self) -> None:
        """Close the descriptor. The memory lasts until this object and its readers are gone."""
        self._memory.close()


def read_pieces(fd: int, lengths: Iterable[int]) -> list[bytes]:
    """Copies of the pieces of a `SharedPieces`. The descriptor can be closed afterwards."""
    lengths, start, found = list(lengths), 0, list[bytes]()
    view = mapped(fd, [sum(lengths)], torch.uint8).numpy().data
    for length in lengths:
        found.append(bytes(view[start : start + length]))
        start += length
    return found
