"""The models that travel in Flower's messages, as umbel's model files."""

from collections.abc import Sequence

import torch
from flwr.app import ArrayRecord

from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.artifact import decode_model, encode_model
from umbel.aggregation.run.model_state import FileDigest
from umbel.sim.experiment.last_model import LastModel


def model_file(record: ArrayRecord) -> bytes | None:
    """A safetensors file of its arrays; None if they cannot be a model of umbel's."""
    try:
        return encode_model({name: torch.from_numpy(array.numpy()) for name, array in record.items()})
    except (LayoutError, TypeError, ValueError):  # a `ValueError`: bytes that are no array
        return None


class ModelDigests:
    """The SHA-256 of model after model. A model that is sent again, to be evaluated or trained, is not read again."""

    def __init__(self) -> None:
        self._last = list[tuple[str, bytes]]()
        self._sha256: str | None = None

    def of(self, record: ArrayRecord | None) -> str | None:
        """The SHA-256 of the model's file; None without one."""
        arrays = [(name, array.data) for name, array in (record or {}).items()]
        if not _are_same(arrays, self._last):
            body = None if record is None else model_file(record)
            self._last, self._sha256 = arrays, None if body is None else FileDigest.of(body).sha256
        return self._sha256


def _are_same(some: Sequence[tuple[str, bytes]], others: Sequence[tuple[str, bytes]]) -> bool:
    """Whether they are the same objects, which nothing can change."""
    both = zip(some, others, strict=False)
    return len(some) == len(others) and all(one[0] == other[0] and one[1] is other[1] for one, other in both)


def last_model(record: ArrayRecord | None) -> tuple[LastModel, bytes | None]:
    """The last model of a run, and its file; an empty one if none is known."""
    body = None if record is None else model_file(record)
    if body is None:
        return LastModel("", {}), None
    return LastModel(FileDigest.of(body).sha256, decode_model(body)[1]), body
