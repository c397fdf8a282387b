"""The models that travel in Flower's messages, as umbel's model files."""

import torch
from flwr.app import ArrayRecord

from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.artifact import decode_model, encode_model
from umbel.sim.experiment.last_model import LastModel
from umbel.sim.federation.standing import FileDigest


def model_file(record: ArrayRecord) -> bytes | None:
    """A safetensors file of its arrays; None if they cannot be a model of umbel's."""
    try:
        return encode_model({name: torch.from_numpy(array.numpy()) for name, array in record.items()})
    except (LayoutError, TypeError):
        return None


def model_sha256(record: ArrayRecord | None) -> str | None:
    """The SHA-256 of the model's file; None without one."""
    body = None if record is None else model_file(record)
    return None if body is None else FileDigest.of(body).sha256


def last_model(record: ArrayRecord | None) -> tuple[LastModel, bytes | None]:
    """The last model of a run, and its file; an empty one if none is known."""
    body = None if record is None else model_file(record)
    if body is None:
        return LastModel("", {}), None
    return LastModel(FileDigest.of(body).sha256, decode_model(body)[1]), body
