"""The frozen audit vector: a run's bundles, and what is needed to make its round again."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from umbel.aggregation.audit.bundle import ModelId
from umbel.aggregation.audit.replay import Replay
from umbel.aggregation.canonical import canonical, number_text, parsed
from umbel.aggregation.model.artifact import master_metadata_of, metadata_of
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.state import InMemory, State, empty_state, master_dtype, torch_dtype
from umbel.aggregation.optimizers.section import AggregationSection
from umbel.aggregation.trust.public_keys import public_key_bytes
from umbel.client.operator.audit import AuditLine, verify

FROZEN: dict[str, Any] = json.loads((Path(__file__).parent / "audit.json").read_text())


def lines() -> list[AuditLine]:
    return [AuditLine(parsed(one["bundle"]), one["sha256"], one["signature"], None) for one in FROZEN["bundles"]]


def test_the_bundles_are_verified_and_their_texts_are_canonical() -> None:
    auditor, taken = verify(lines(), [public_key_bytes(FROZEN["public_key"])])
    assert [canonical(line.bundle) for line in taken] == [one["bundle"] for one in FROZEN["bundles"]]
    assert (auditor.n_reports_signed, auditor.n_reports_unsigned, list(auditor.rounds)) == (2, 0, [1])


def sha256_of(state: State, metadata: dict[str, str]) -> str:
    """Of the model file."""
    return hashlib.sha256(safetensors.torch.save(dict(state), metadata)).hexdigest()


def test_the_round_comes_to_the_same_sum_and_the_same_model_files_again() -> None:
    auditor, _ = verify(lines(), [public_key_bytes(FROZEN["public_key"])])
    assert auditor.created is not None
    _, ended = auditor.rounds[1]
    layout = Layout.from_json(auditor.created.layout)
    again = Replay(ended, layout, AggregationSection())
    for one in reversed(ended.accepted):
        update = bytes.fromhex(FROZEN["updates"][one.client])
        again.fold(one, update[:64], [update[64:]])
    assert ended.sum is not None
    assert again.require_sum() == ended.sum.sha256
    start = safetensors.torch.load(base64.b64decode(FROZEN["start_model"]))
    master, published = empty_state(layout, master_dtype), empty_state(layout, torch_dtype)
    again.write_model(InMemory(start), InMemory(master), InMemory(published), None)
    assert master["bias"].tolist() == [-0.02380952425301075, 1.273809552192688]
    published_sha256 = sha256_of(published, metadata_of(layout))
    assert ended.model_out == ModelId(1, published_sha256, sha256_of(master, master_metadata_of(layout)))


@pytest.mark.parametrize(("text", "value"), FROZEN["numbers"].items())
def test_numbers_are_written_as_javascript_writes_them(text: str, value: float) -> None:
    assert number_text(float(value)) == text
