"""The documents say enough to read an update of every codec: a decoder of theirs finds what the coordinator finds."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.vectors.documented_codecs import CODECS, read_integers
from tests.vectors.documented_draws import derived_seed
from tests.vectors.documented_payload import Told
from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.codec.vectors.codec import CHUNK_VALUES
from umbel.aggregation.kernels.arguments import Blocks
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.state import State
from umbel.aggregation.plans.codec import Codec, CodecPlan, Grid
from umbel.aggregation.update.wire import HEADER_BYTES

pytestmark = pytest.mark.bits

FOLDER = Path(__file__).parent
FROZEN: dict[str, Any] = json.loads((FOLDER / "codecs.json").read_text())
SEEDS: list[dict[str, Any]] = json.loads((FOLDER / "seed.json").read_text())["seeds"]
GRID = Grid.finest(max_abs=64.0, total_weight_max=1 << 20)
KEY, RANK = 3 << 60 | 12345, 7


def state_of(n_rows: int, n_columns: int) -> State:
    """A model of all that a layout may hold, with a matrix of that shape."""
    embedding = torch.zeros(n_rows, n_columns, dtype=torch.bfloat16)
    return {
        "conv.weight": torch.zeros(6, 3, 2, 2),
        "embedding.weight": embedding,
        "empty": torch.zeros(0, 4),
        "flags": torch.zeros(3, dtype=torch.bool),
        "head.weight": embedding,
        "norm.running_mean": torch.zeros(6),
        "norm.steps": torch.tensor(0),
        "running_var": torch.zeros(2, 3),
    }


MODELS: dict[str, State] = {
    "three values": {"bias": torch.zeros(3)},
    "many tensors": state_of(40, 15),
    "two chunks": state_of(700, 401),
    "256 blocks": {"weight": torch.zeros(1_045_000)},
}
OF_EVERY_LENGTH: list[tuple[str, Mapping[str, Any]]] = [
    ("eden", {}),
    ("eden", {"bits": 1}),
    ("eden", {"bits": 2}),
    ("eden", {"bits": 3}),
    ("eden", {"bits": 8}),
    ("sign", {}),
    ("ternary", {}),
    ("ternary", {"clip_sigmas": 1.5}),
    ("qsgd", {}),
    ("qsgd", {"levels": 127}),
    ("qsgd", {"levels": 128}),
    ("qsgd", {"levels": 32767}),
    ("topk", {}),
    ("topk", {"share": 0.001, "precision": "float32"}),
    ("topk", {"share": 0.4}),
    ("mask", {}),
    ("mask", {"every": 1, "precision": "bfloat16"}),
    ("mask", {"every": 7, "mode": "structured"}),
    ("mask", {"every": 300, "mode": "sketched", "precision": "bfloat16"}),
    ("lowrank", {}),
    ("lowrank", {"rank": 1, "mode": "sketched"}),
    ("lowrank", {"rank": 6}),
    ("lowrank", {"rank": 13}),
    ("planes", {}),
    ("planes", {"precision": "bfloat16"}),
]
FRESH = [(name, parameters, model) for name, parameters in OF_EVERY_LENGTH for model in list(MODELS)[:3]]
FRESH.append(("eden", {"bits": 1}, "256 blocks"))


def written(name: str, parameters: Mapping[str, Any], model: str) -> tuple[bytes, Told, np.ndarray[Any, Any]]:
    """A new update of that model, what its reader is told, and the integers that the coordinator reads."""
    layout, generator = Layout.of_state(MODELS[model]), torch.Generator().manual_seed(20)
    change = torch.randn(layout.n_values, generator=generator).pow_(3).mul_(0.001)
    codec = codec_for(CodecPlan(Codec[name.upper()], key=KEY, parameters=parameters), GRID, layout)
    update = b"".join(codec.encode(lambda: iter([change]), RANK))
    read = torch.cat(list(codec.integers(update[:HEADER_BYTES], [update[HEADER_BYTES:]], RANK)))
    return update, Told(layout.to_json(), name, parameters, KEY, RANK, GRID.step), read.numpy()


@pytest.mark.parametrize("name", FROZEN["codecs"])
def test_the_documents_read_the_frozen_update_of_every_codec(name: str) -> None:
    case = FROZEN["codecs"][name]
    assert CODECS[name][0] == case["id"]
    told = Told(FROZEN["layout_json"], name, case["parameters"], FROZEN["key"], FROZEN["rank"], FROZEN["grid"]["step"])
    assert read_integers(bytes.fromhex(case["update_hex"]), told).tolist() == case["integers"]


def test_every_codec_that_the_documents_read_has_a_frozen_update() -> None:
    assert set(CODECS) == set(FROZEN["codecs"])


@pytest.mark.parametrize(("name", "parameters", "model"), FRESH, ids=str)
def test_the_documents_read_a_new_update_as_the_coordinator_does(
    name: str, parameters: Mapping[str, Any], model: str
) -> None:
    update, told, integers = written(name, parameters, model)
    assert np.array_equal(read_integers(update, told), integers)


def test_the_new_updates_hold_what_the_frozen_ones_do_not() -> None:
    """A second chunk, an odd number of many blocks, and places as a bitmap and as gaps of more bytes than one."""
    layout = Layout.of_state(MODELS["two chunks"])
    n_exact = sum(spec.n_values for spec in layout.owners() if not spec.is_coded)
    gaps, bitmap = (
        written("topk", parameters, "two chunks")[0][HEADER_BYTES + 4 * n_exact :]
        for parameters in ({"share": 0.001, "precision": "float32"}, {"share": 0.4})
    )
    assert (gaps[0], bitmap[0]) == (0, 1)
    count = int.from_bytes(gaps[1:9], "little")
    assert len(gaps) > 9 + (4 + 1) * count
    assert layout.n_values > CHUNK_VALUES
    many = Blocks.of(Layout.of_state(MODELS["256 blocks"]).n_values)
    assert many.n_blocks == 257
    assert many.n_values <= 256 * many.size


@pytest.mark.parametrize("case", SEEDS, ids=lambda case: case["derived"])
def test_the_documents_derive_the_frozen_seeds(case: dict[str, Any]) -> None:
    assert derived_seed(case["seed"], *case["labels"]) == int(case["derived"])
