"""Everything that reads bytes from strangers, one function each: bytes in, nothing out but the refusals it may raise.

A reader that raises anything else has a bug, and so has one that takes what it should not: where there is an
independent way to say what is good, the function compares. `test_readers.py` calls these with hypothesis and with the
saved corpus, `fuzz.py` with libFuzzer.
"""

import contextlib
import json
import tempfile
from base64 import b64encode
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from io import BytesIO, RawIOBase
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import TypeAdapter
from safetensors import safe_open

from tests.federations.consortium import first_list
from tests.federations.consortium import signed as signed_list
from umbel.aggregation.audit.bundle import (
    AuditFailed,
    Bundle,
    KeptUpdates,
    Maker,
    ModelId,
    Participant,
    RoundEnded,
    RunCreated,
    SignedReport,
    json_sha256,
)
from umbel.aggregation.canonical import canonical, parsed
from umbel.aggregation.codec.entropy.payload import Precision
from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.codec.vectors.buckets import Qsgd
from umbel.aggregation.codec.vectors.codec import CodecContext
from umbel.aggregation.codec.vectors.eden import Eden
from umbel.aggregation.codec.vectors.registry import CODECS
from umbel.aggregation.codec.vectors.sparse import TopK
from umbel.aggregation.downlink.change import ChangeWriter, apply_change
from umbel.aggregation.errors import LayoutError, SignatureRefused, UpdateRefused
from umbel.aggregation.messages import CheckIn, Decline, Enrolment
from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.state import InMemory, torch_dtype
from umbel.aggregation.plans.codec import Codec, CodecPlan, Grid
from umbel.aggregation.reports import WorkDone
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.records import Fate
from umbel.aggregation.run.sections import RoundsSection
from umbel.aggregation.trust.members import MembersRefused, check_first, members_bytes, read_members
from umbel.aggregation.trust.public_keys import public_key_text
from umbel.aggregation.trust.signatures import SignedHeaders, Target, parse, sign
from umbel.aggregation.types import RunId
from umbel.aggregation.update.grid import to_integers
from umbel.aggregation.update.wire import HEADER_BYTES, change_header, float32_header
from umbel.client.operator.audit import read_lines, verify
from umbel.server.blobs.blobs import BlobStore
from umbel.server.http.deps import parse_json
from umbel.server.http.downloads import parse_range
from umbel.server.http.new_run import read_run_file
from umbel.server.problems import Refused
from umbel.server.store.stored import Chunk
from umbel.server.sums.model_files import TensorFile, inspect_model
from umbel.server.sums.updates import check_update, integers

LAYOUT = Layout.of_state({"a": torch.zeros(3), "b": torch.zeros(2, 2), "n": torch.tensor(0)})
GRID = Grid.finest(max_abs=8.0, total_weight_max=1000)
CODEC = codec_for(CodecPlan(), GRID, LAYOUT)
INTEGER_PLAN = CodecPlan(Codec.INTEGER, 8.0, 5)
INTEGER_CODEC = codec_for(INTEGER_PLAN, GRID, LAYOUT)
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
_PUBLIC_KEY = KEY.public_key().public_bytes_raw()
_NOW = 1_700_000_000.0
_RUN_FILE_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "run-file.md"
_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
_MESSAGES = [TypeAdapter(message) for message in (Enrolment, CheckIn, WorkDone, Decline)]

_MESSAGES_THAT_PARSE = (
    Enrolment("token", "ward-7", public_key_text(_PUBLIC_KEY), {"tier": "hospital"}),
    CheckIn(RunId("demo"), 10, LAYOUT.digest, 1.5),
    WorkDone(10, 3, 4, "0" * 64, 1.5, {"loss": 0.5}, {"loss": 0.25}, 4, counts={"n": (1, 2)}),
    Decline("no time"),
)
_CODECS = (*(make() for make in CODECS.values()), Eden(1), Qsgd(1000), TopK(0.5, Precision.FLOAT32))
_VECTOR_CODECS = [codec_for(CodecPlan(codec, key=5), GRID, LAYOUT) for codec in CODECS]
_CONTEXT = CodecContext(Layout.of_state({"a": torch.zeros(12, 3), "b": torch.zeros(7)}), 1)
_CHANGED_LAYOUT = Layout.of_state(
    {"a": torch.zeros(40), "h": torch.zeros(5).half(), "m": torch.zeros(2).bool(), "n": torch.tensor(0)}
)
_MODEL = ModelId(0, "a" * 64, "a" * 64)
_MEMBERS = signed_list(first_list(), "anna", "bert")


def _bundle(kind: Literal["run", "round"], number: int, previous: str, facts: RunCreated | RoundEnded) -> Bundle:
    maker = Maker("1", "2", "3", "x86_64")
    return Bundle(kind, "demo", number, previous, public_key_text(_PUBLIC_KEY), maker, facts)


def _chain() -> list[Bundle]:
    """A run's creation, and a round that was abandoned although a client had reported in time."""
    file = RunFile("demo", RoundsSection(count=2, target=2))
    written = parsed(canonical(file))
    assert isinstance(written, dict)
    created = RunCreated(_NOW, written, json_sha256(written), _MODEL, LAYOUT.to_json())
    first = _bundle("run", 0, "", created)
    report = SignedReport('{"sample_count":10,"update_sha256":"b"}')
    client = Participant("d0", "k", 1, 10, "", Fate.ACCEPTED, "", 10, report, 1.0, 0.0, 1, 1)
    ended = RoundEnded(
        round=1,
        attempt=1,
        committed=False,
        reason="",
        run_status="running",
        run_reason="",
        run_file_sha256=json_sha256(written),
        layout_digest=LAYOUT.digest,
        model_in=_MODEL,
        model_out=None,
        rolled_back_to=None,
        plan=file.round_plan(1, 1),
        grid=file.round_plan(1, 1).grid,
        training=file.training_plan(1),
        server_learning_rate=1.0,
        clients=(client,),
        sum=None,
        passed_over=0,
        samples_passed_over=0,
        uncovered=(),
        metrics={},
        evaluation={"loss": 1.0},
        opened_at=_NOW,
        closed_at=_NOW,
        ended_at=_NOW,
        updates=KeptUpdates(True, (), ""),
    )
    return [first, _bundle("round", 1, sha256(canonical(first).encode()).hexdigest(), ended)]


class _Chunks:
    """Chunks in memory, as far as reading an update back needs a store."""

    def __init__(self, chunks: Sequence[bytes]) -> None:
        self._chunks = dict(enumerate(chunks))

    @contextmanager
    def open(self, key: str, offset: int = 0, length: int | None = None) -> Generator[RawIOBase]:
        yield cast(RawIOBase, BytesIO(self._chunks[int(key)]))


def update(data: bytes) -> None:
    """An update in up to 256 chunks. First byte: where to cut, and whether a header as it should be comes before."""
    how, rest = data[0] if data else 0, data[1:]
    whole = float32_header(LAYOUT).encode() + rest if how & 1 else rest
    size = (how >> 1) + 1
    pieces = [whole[first : first + size] for first in range(0, len(whole), size)]
    blobs = cast(BlobStore, _Chunks(pieces))
    chunks = [Chunk(str(i), len(piece)) for i, piece in enumerate(pieces)]
    taken = False
    with contextlib.suppress(UpdateRefused):
        check_update(blobs, chunks, sha256(whole).hexdigest(), CODEC, 0)
        taken = True
    assert taken == _is_good(whole), "an update is taken exactly if it is good"
    if taken:
        folded = torch.cat([part.clone() for part in integers(blobs, chunks, CODEC, 0)])
        sent = torch.frombuffer(bytearray(whole[HEADER_BYTES:]), dtype=torch.float32)
        assert torch.equal(folded, to_integers(sent, GRID)), "what is folded is what was sent"


def integers_update(data: bytes) -> None:
    """An update of the integer codec. What is taken stands within the bounds of the round."""
    taken = list[torch.Tensor]()
    head = INTEGER_CODEC.header_bytes
    with contextlib.suppress(UpdateRefused):
        taken = list(INTEGER_CODEC.integers(data[:head], [data[head:]], 1))
    if taken:
        levels = torch.cat(taken[:-1])
        assert levels.numel() == LAYOUT.n_values
        rounded, exact = levels[:-1], levels[-1:]  # the last tensor is a counter
        assert int(rounded.abs().max()) <= GRID.max_abs * INTEGER_PLAN.inverse_step + 1
        assert int(exact.abs()) * GRID.step <= GRID.max_abs


def payload(data: bytes) -> None:
    """A codec's payload, in pieces of seven bytes. First byte: which codec. What is taken is finite, and all there."""
    codec, rest = _CODECS[data[0] % len(_CODECS) if data else 0], data[1:]
    pieces = [rest[first : first + 7] for first in range(0, len(rest), 7)]
    with contextlib.suppress(UpdateRefused):
        values = torch.cat(list(codec.decode(pieces, _CONTEXT)))
        assert values.dtype == torch.float32
        assert values.shape == (_CONTEXT.n_values,)
        assert bool(values.isfinite().all())
        assert len(rest) in codec.payload_bytes(_CONTEXT.layout)


def change(data: bytes) -> None:
    """A change of a model. First byte: where to cut, and whether a header as it should be comes before. What is taken
    leaves a model of finite values and of bools that are bools."""
    how, rest = data[0] if data else 0, data[1:]
    whole = change_header(_CHANGED_LAYOUT, len(rest)) + rest if how & 1 else rest
    size, state = (how >> 1) + 1, _changed_model()
    pieces = [whole[first : first + size] for first in range(0, len(whole), size)]
    with contextlib.suppress(UpdateRefused):
        apply_change(_CHANGED_LAYOUT, pieces, len(whole), InMemory(state))
        assert all(bool(state[name].isfinite().all()) for name in "ah")
        assert int(state["m"].view(torch.uint8).max()) <= 1


def _changed_model() -> dict[str, torch.Tensor]:
    half, mask = torch.full((5,), 65504.0, dtype=torch.float16), torch.tensor([True, False])
    return {"a": torch.linspace(-1, 1, 40), "h": half, "m": mask, "n": torch.tensor(-5)}


def _a_change() -> bytes:
    """A change that is good, without its header."""
    master = {name: tensor.float() if name == "h" else tensor for name, tensor in _changed_model().items()}
    master["a"], master["n"] = master["a"] * 1.5, master["n"] + 1
    writer = ChangeWriter(_CHANGED_LAYOUT, 0.125, InMemory(master), InMemory(_changed_model()))
    body = b"".join(writer.body())
    return writer.head()[HEADER_BYTES:] + body


def vector_update(data: bytes) -> None:
    """An update of a codec of vectors. First byte: which. What is taken is all there, and stands on the grid."""
    codec, rest = _VECTOR_CODECS[data[0] % len(_VECTOR_CODECS) if data else 0], data[1:]
    with contextlib.suppress(UpdateRefused):
        taken = torch.cat(list(codec.integers(rest[:HEADER_BYTES], [rest[HEADER_BYTES:]], 1)))
        assert taken.shape == (LAYOUT.n_values,)
        assert int(taken.abs().max()) * GRID.step <= GRID.max_abs
        assert len(rest) in codec.update_bytes


def _is_good(whole: bytes) -> bool:
    if whole[:HEADER_BYTES] != float32_header(LAYOUT).encode() or len(whole) != HEADER_BYTES + 4 * LAYOUT.n_values:
        return False
    values = np.frombuffer(whole[HEADER_BYTES:], dtype="<f4")
    return bool(np.isfinite(values).all() and (np.abs(values) <= GRID.max_abs).all())


def model(data: bytes) -> None:
    """A model file. What is taken has the values, at the places, that both of its readers agree on."""
    with _file(data) as path:
        try:
            layout = inspect_model(path)
        except LayoutError:
            return
        assert Layout.from_json(layout.to_json()) == layout
        with safe_open(path, framework="pt") as theirs, TensorFile(path) as ours:
            for spec in (spec for spec in layout.owners() if spec.n_values):
                values = ours.read(spec.name, torch_dtype(spec), 0, spec.n_values)
                expected = theirs.get_tensor(spec.name).reshape(-1)
                assert torch.equal(values, expected), f"two readers see different values in {spec.name!r}"


def header(data: bytes) -> None:
    """A model file's header, with its length before it and as many zeros after it as it asks for, up to a limit."""
    n_bytes = 0
    with contextlib.suppress(
        ValueError, RecursionError, KeyError, TypeError, IndexError, AttributeError, OverflowError
    ):
        ends = [entry["data_offsets"][1] for name, entry in json.loads(data).items() if name != "__metadata__"]
        n_bytes = int(max(ends, default=0))
    model(len(data).to_bytes(8, "little") + data + bytes(min(max(n_bytes, 0), 1 << 16)))


def run_file(data: bytes) -> None:
    """A run file. Of what is taken, every round can be planned, and it can be written down and hashed."""
    try:
        file = read_run_file(data)
    except Refused:
        return
    for number in {1, file.rounds.count, *(o.first_round for o in file.override)}:
        file.round_plan(number, 1)
        file.training_plan(number)
    canonical(file)
    adapter = TypeAdapter(RunFile)
    assert adapter.validate_json(adapter.dump_json(file), strict=True) == file


def signature(data: bytes) -> None:
    """Three header fields, then path and query, one a line."""
    lines = [line.decode("latin-1") for line in data.split(b"\n")] + [""] * 5
    with contextlib.suppress(SignatureRefused):
        claims = parse(SignedHeaders(*lines[:3]))
        claims.verify(_PUBLIC_KEY, Target("PUT", lines[3], lines[4]), _NOW)


def byte_range(data: bytes) -> None:
    """A `Range` field, for files of several sizes. What is answered lies within the file."""
    for size in (0, 1, 10, 1 << 40):
        with contextlib.suppress(Refused):
            span = parse_range(data.decode("latin-1"), size)
            assert span is None or 0 <= span.start < span.stop <= size


def layout(data: bytes) -> None:
    """A layout's JSON: what is taken is what would be written."""
    text = data.decode("utf-8", "replace")
    with contextlib.suppress(LayoutError):
        assert Layout.from_json(text).to_json() == text


def message(data: bytes) -> None:
    """A control message of each kind."""
    for adapter in _MESSAGES:
        with contextlib.suppress(Refused):
            taken = parse_json(data, adapter)
            assert adapter.validate_json(adapter.dump_json(taken), strict=True) == taken


def canonical_json(data: bytes) -> None:
    """JSON in one spelling: reading what was written, and writing it again, changes nothing."""
    with contextlib.suppress(ValueError):
        text = canonical(parsed(data.decode("utf-8", "replace")))
        assert canonical(parsed(text)) == text


def audit_file(data: bytes) -> None:
    """An audit file as it lies on an auditor's disk."""
    with _file(data) as path, contextlib.suppress(AuditFailed):
        verify(read_lines(path), [_PUBLIC_KEY])


def audit_chain(data: bytes) -> None:
    """Bundles, one a line, linked and signed by the trusted key: a coordinator that lies, not one that cannot sign."""
    lines, head, run_file_sha256 = list[str](), "", ""
    for text in data.split(b"\n"):
        with contextlib.suppress(ValueError):
            bundle = parsed(text.decode("utf-8", "replace"))
            if isinstance(bundle, dict):
                bundle |= {"key": public_key_text(_PUBLIC_KEY), "previous": head}
                if isinstance(facts := bundle.get("facts"), dict):
                    run_file_sha256 = json_sha256(facts["run_file"]) if "run_file" in facts else run_file_sha256
                    facts["run_file_sha256"] = run_file_sha256
            line = canonical(bundle)
            head = sha256(line.encode()).hexdigest()
            lines.append(_audit_line(line))
    audit_file("\n".join(lines).encode())


def _audit_line(text: str) -> str:
    digest = sha256(text.encode()).hexdigest()
    signed = b64encode(KEY.sign(f"umbel audit bundle 1\n{digest}".encode())).decode()
    return f'{{"bundle":{text},"sha256":"{digest}","signature":"{signed}","updates_deleted_at":null}}'


def member_list(data: bytes) -> None:
    """What is read and passes for signed is the list that was signed."""
    try:
        found = read_members(data)
        check_first(found)
    except MembersRefused:
        return
    assert found.list == _MEMBERS.list, "nobody has signed another list"
    assert read_members(members_bytes(found)) == found


@contextmanager
def _file(data: bytes) -> Generator[Path]:
    """In memory, where there is such a thing: a fuzzer writes thousands of files a second."""
    with tempfile.NamedTemporaryFile(prefix="umbel-fuzz-", dir=_MEMORY) as file:
        file.write(data)
        file.flush()
        yield Path(file.name)


READERS: Mapping[str, Callable[[bytes], None]] = {
    reader.__name__: reader
    for reader in (
        update,
        integers_update,
        payload,
        change,
        vector_update,
        model,
        header,
        run_file,
        signature,
        byte_range,
        layout,
        message,
        canonical_json,
        audit_file,
        audit_chain,
        member_list,
    )
}


def seeds() -> dict[str, list[bytes]]:
    """For each reader, inputs that it takes, for a fuzzer to begin with."""
    state = {"w": torch.ones(2, 2), "v": torch.ones(1, dtype=torch.bfloat16), "e": torch.zeros(0), "n": torch.tensor(1)}
    file = encode_model(state)
    n_bytes = int.from_bytes(file[:8], "little")
    target = Target("PUT", "/v1/x", "a=b")
    signed = sign(KEY, "ward-7", target, bytes(32), int(_NOW), "n" * 22).as_dict().values()
    documented = _RUN_FILE_PAGE.read_text().split("```toml\n")[1].split("```")[0]
    return {
        "update": [bytes([1]) + bytes(4 * LAYOUT.n_values), bytes([40]) + float32_header(LAYOUT).encode()],
        "integers_update": [b"".join(INTEGER_CODEC.encode(lambda: iter([torch.randn(8)]), 1))],
        "vector_update": [
            bytes([i]) + b"".join(codec.encode(lambda: iter([torch.linspace(-1, 1, LAYOUT.n_values)]), 1))
            for i, codec in enumerate(_VECTOR_CODECS)
        ],
        "payload": [
            bytes([i]) + b"".join(codec.encode(torch.linspace(-1, 1, _CONTEXT.n_values), _CONTEXT))
            for i, codec in enumerate(_CODECS)
        ],
        "change": [bytes([i]) + _a_change() for i in (1, 255)],
        "model": [file],
        "header": [file[8 : 8 + n_bytes]],
        "run_file": [documented.encode()],
        "signature": ["\n".join([*signed, target.path, target.query]).encode()],
        "byte_range": [b"bytes=0-1", b"bytes=-2", b"bytes=3-"],
        "layout": [LAYOUT.to_json().encode()],
        "message": [canonical(one).encode() for one in _MESSAGES_THAT_PARSE],
        "canonical_json": [b'{"b":[1,2.5e-9,null,true],"a":"\\u00e4"}'],
        "audit_file": ["\n".join(_audit_line(canonical(one)) for one in _chain()).encode()],
        "audit_chain": ["\n".join(canonical(one) for one in _chain()).encode()],
        "member_list": [canonical(_MEMBERS).encode()],
    }
