"""The frozen vectors: what `docs/reference/wire.md` promises to other languages. They never change within version 1."""

import base64
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.federations.whole_states import state_change
from umbel.aggregation.codec.entropy import entropy
from umbel.aggregation.codec.entropy.classes import Classes, Matrices
from umbel.aggregation.codec.entropy.coded_levels import Knowledge, LevelsHead
from umbel.aggregation.codec.update_codec import UpdateCodec, codec_for
from umbel.aggregation.downlink.change import apply_change
from umbel.aggregation.downlink.publishing import Publication, Spread
from umbel.aggregation.kernels.arguments import Levels, phase
from umbel.aggregation.kernels.philox import dither
from umbel.aggregation.kernels.quantize import quantize
from umbel.aggregation.model.artifact import decode_model, encode_model
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.state import InMemory, master_dtype
from umbel.aggregation.plans.codec import Codec, CodecPlan, Grid, Part
from umbel.aggregation.plans.round import Weighting
from umbel.aggregation.round.weighting import Candidate, draw
from umbel.aggregation.seeds import derive_seed
from umbel.aggregation.trust.signatures import Target, parse, sign, signature_base
from umbel.aggregation.types import ClientId
from umbel.aggregation.update.grid import to_integers
from umbel.aggregation.update.wire import HEADER_BYTES, float32_header, least_chunk_bytes, read_header

pytestmark = pytest.mark.bits

FOLDER = Path(__file__).parent


def load(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


def test_the_bytes_of_an_update() -> None:
    vector = load("update")
    layout = Layout.from_json(vector["layout_json"])
    assert layout.digest == vector["layout_digest"]
    payload = struct.pack(f"<{layout.n_values}f", *vector["values"])
    data = float32_header(layout).encode() + payload
    assert data.hex() == vector["update_hex"]
    assert hashlib.sha256(data).hexdigest() == vector["update_sha256"]
    lengths = range(len(payload), len(payload) + 1)
    assert read_header(data[:HEADER_BYTES], layout, Codec.FLOAT32, lengths) == float32_header(layout)


def test_the_least_lengths_of_chunks() -> None:
    for update_bytes, least in load("chunk")["least_bytes"]:
        assert least_chunk_bytes(update_bytes) == least


def test_the_layout_and_the_values_of_an_update() -> None:
    vector = load("update")
    weight = torch.zeros(2, 1, dtype=torch.bfloat16)
    start = {
        "dense.bias": torch.tensor([0.0, 1.0]),
        "dense.weight": weight,
        "norm.num_batches_tracked": torch.tensor(3),
    }
    local = {
        "dense.bias": torch.tensor([0.5, 0.75]),
        "dense.weight": torch.tensor([[1.5], [-2.0]], dtype=torch.bfloat16),
        "norm.num_batches_tracked": torch.tensor(13),
    }
    layout = Layout.of_state({**start, "tied": weight})
    assert layout.to_json() == vector["layout_json"]
    assert state_change(layout, local, start).tolist() == vector["values"]


def test_the_integers_of_an_update() -> None:
    vector = load("update")
    bounds = vector["grid"]
    grid = Grid.finest(max_abs=bounds["max_abs"], total_weight_max=bounds["total_weight_max"])
    assert grid.step == bounds["step"]
    assert to_integers(torch.tensor(vector["values"]), grid).tolist() == vector["integers"]


@pytest.mark.parametrize("request_", load("signature")["requests"], ids=lambda request: request["method"])
def test_the_signature_of_a_request(request_: dict[str, Any]) -> None:
    vector = load("signature")
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(vector["private_key_hex"]))
    target = Target(request_["method"], request_["path"], request_["query"])
    body_sha256 = hashlib.sha256(request_["body"].encode()).digest()
    headers = sign(key, vector["keyid"], target, body_sha256, vector["created"], vector["nonce"])
    assert headers.as_dict() == request_["headers"]
    parse(headers).verify(base64.b64decode(vector["public_key_base64"]), target, vector["created"])


@pytest.mark.parametrize("request_", load("signature")["requests"], ids=lambda request: request["method"])
def test_the_base_that_is_signed(request_: dict[str, Any]) -> None:
    vector = load("signature")
    headers = request_["headers"]
    components = (
        ("@method", request_["method"]),
        ("@path", request_["path"]),
        ("@query", "?" + request_["query"]),
        ("content-digest", headers["Content-Digest"]),
    )
    base = signature_base(components, headers["Signature-Input"].removeprefix("umbel="))
    assert base.decode() == request_["base"]
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(vector["private_key_hex"]))
    assert f"umbel=:{base64.b64encode(key.sign(base)).decode()}:" == headers["Signature"]


def test_the_cohorts_of_fixed_seeds() -> None:
    vector = load("draw")
    candidates = [Candidate(ClientId(client), n) for client, n in vector["sample_counts"].items()]
    for case in vector["cohorts"]:
        assert draw(Weighting(case["weighting"]), candidates, case["n_draws"], case["seed"]) == case["cohort"], case


def test_derived_seeds() -> None:
    for case in load("seed")["seeds"]:
        assert derive_seed(case["seed"], *case["labels"]) == int(case["derived"]), case


@pytest.mark.parametrize("name", load("codecs")["codecs"])
def test_an_update_of_every_other_codec(name: str) -> None:
    vector = load("codecs")
    case, layout, grid = vector["codecs"][name], Layout.from_json(vector["layout_json"]), Grid(**vector["grid"])
    plan = CodecPlan(Codec[name.upper()], key=vector["key"], parameters=case["parameters"])
    assert plan.codec == case["id"]
    codec, update = codec_for(plan, grid, layout), bytes.fromhex(case["update_hex"])
    assert read_integers(codec, update, vector["rank"]).tolist() == case["integers"]
    made = b"".join(codec.encode(lambda: iter([torch.tensor(vector["values"])]), vector["rank"]))
    found, expected = read_integers(codec, made, vector["rank"]), torch.tensor(case["integers"])
    if plan.codec is Codec.LOWRANK:  # a library solves, and its last bits are the machine's: docs/reference/bits.md
        assert made[:HEADER_BYTES] == update[:HEADER_BYTES]
        torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=1e-5 * float(expected.abs().max()))
        return
    assert torch.equal(found, expected)
    if name not in ("qsgd", "planes"):  # another Zstandard may compress otherwise
        assert made == update


def read_integers(codec: UpdateCodec, update: bytes, rank: int) -> torch.Tensor:
    return torch.cat(list(codec.integers(update[:HEADER_BYTES], [update[HEADER_BYTES:]], rank)))


def test_the_integers_of_an_update_and_their_mean() -> None:
    vector = load("integers")
    layout = Layout.from_json(vector["layout_json"])
    plan = CodecPlan(Codec.INTEGER, vector["inverse_step"], vector["key"])
    codec = codec_for(plan, Grid.finest(max_abs=vector["max_abs"], total_weight_max=1 << 20), layout)
    shared = dither(plan.key, 0, layout.n_values)
    assert shared.tolist() == vector["dither"]
    total, parts = codec.new_sum(), list[Part]()
    for client in vector["clients"]:
        assert phase(client["rank"]) == client["phi"]
        levels = quantize(torch.tensor(client["values"]), plan.inverse_step, shared, client["phi"], Levels())
        assert levels.tolist() == client["levels"]
        update = bytes.fromhex(client["update_hex"])
        read = list(codec.integers(update[:88], [update[88:]], client["rank"]))
        assert torch.cat(read[:-1]).tolist() == client["levels"]
        total.add(read, client["weight"])
        parts.append(Part(client["weight"], client["rank"]))
        energies = bytes.fromhex(client["energies_hex"])
        known = torch.frombuffer(bytearray(energies), dtype=torch.uint8) if energies else None
        dithered = (plan.key, client["phi"]) if client["knowledge"] & Knowledge.DITHER else None
        classes = Classes(Matrices(layout), known, dithered).of(0, layout.n_values)
        assert classes.tolist() == client["classes"]
        segment = entropy.write_segment(levels, classes, LevelsHead.decode(update[64:88]).coding.widths)
        assert zstandard.ZstdDecompressor().decompress(segment[4:]).hex() == client["segment_hex"]
    assert total.sums.tolist() == vector["sums"]
    assert codec.mean(total, parts).mean_slice(0, layout.n_values).tolist() == vector["mean"]
    assert codec.update_rms(total) == vector["update_rms"]


def test_a_change_from_one_model_to_the_next() -> None:
    vector = load("change")
    layout, base = Layout.from_json(vector["layout_json"]), base64.b64decode(vector["base_base64"])
    change = bytes.fromhex(vector["change_hex"])
    assert hashlib.sha256(base).hexdigest() == vector["base_sha256"]
    assert hashlib.sha256(change).hexdigest() == vector["change_sha256"]
    found, state = decode_model(base)
    assert found == layout
    public = {spec.name: state[spec.name].clone() for spec in layout.owners()}
    master = {spec.name: torch.tensor(vector["master"], dtype=torch.float64) for spec in layout.owners()}
    master = {s.name: master[s.name][s.place].to(master_dtype(s)).reshape(s.shape) for s in layout.owners()}
    spread = Spread()
    for spec in layout.owners():
        spread.add(spec, master[spec.name].reshape(-1), public[spec.name].reshape(-1))
    assert spread.step(vector["step_in_rms"]) == vector["step"]
    publication = Publication(layout, vector["step"], InMemory(master), InMemory(public))
    assert torch.cat([levels for _, levels in publication.sample()]).tolist() == vector["levels"]
    apply_change(layout, [change], len(change), InMemory(public))
    assert [float(value) for spec in layout.owners() for value in public[spec.name].reshape(-1)] == vector["model"]
    assert hashlib.sha256(encode_model(layout.full_state(public))).hexdigest() == vector["model_sha256"]
