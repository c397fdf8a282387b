"""Bits that are the same on every machine, as digests (`bits.json`): each kind of kernels, with one thread and two.

`docs/reference/bits.md` says what they promise. `make test-bits-fast` runs them under each setting of the libraries
beneath. What goes in is made of Philox's words without rounding, so that no library has a say in it.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.federations.own_dithers import dither_of
from tests.federations.whole_states import next_master, published_state
from tests.suite.bits import OF_BITS
from umbel.aggregation.codec.entropy.classes import EnergyMeter, Matrices
from umbel.aggregation.codec.feedback import Residual, send
from umbel.aggregation.codec.integer import IntegerCodec
from umbel.aggregation.codec.modular import Modular
from umbel.aggregation.codec.rotated import Rotated, dithers_of
from umbel.aggregation.codec.step import RoundShown, bits_for, step_for
from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.codec.vectors.codec import CodecContext, Sketching
from umbel.aggregation.codec.vectors.eden import BITS_MAX, lloyd_max
from umbel.aggregation.codec.vectors.lowrank import LowRank
from umbel.aggregation.codec.vectors.registry import CODECS, vector_codec
from umbel.aggregation.codec.vectors.sparse import largest, one_in_every
from umbel.aggregation.collective.lanes import Lanes
from umbel.aggregation.downlink.change import ChangeWriter
from umbel.aggregation.downlink.publishing import Spread
from umbel.aggregation.kernels import native
from umbel.aggregation.kernels.native import NoKernels
from umbel.aggregation.kernels.philox import Stream, dither, signs, uniforms, words_by_coordinate
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.next_model import ServerStep, empty_master, first_master_copy, write_next
from umbel.aggregation.model.state import InMemory, State, empty_state, master_dtype, pieces, torch_dtype
from umbel.aggregation.optimizers.section import AggregationSection, ServerOptimizerName
from umbel.aggregation.plans.codec import Codec, CodecPlan, Grid, Part, as_float32
from umbel.aggregation.plans.masks import NoisePlan
from umbel.aggregation.plans.round import Weighting
from umbel.aggregation.plans.training import TrainingPlan
from umbel.aggregation.privacy.sensitivity import rounded_bound
from umbel.aggregation.privacy.skellam import Skellam
from umbel.aggregation.privacy.skellam import contribution as noisy_levels
from umbel.aggregation.round.weighting import Candidate, draw
from umbel.aggregation.run.stopping import robust_mean
from umbel.aggregation.sample_order import sample_order
from umbel.aggregation.secagg.parameters import DEFAULT_RULE, Rule, parameters_for
from umbel.aggregation.stated_order import sum_of_squares
from umbel.aggregation.types import ClientId
from umbel.aggregation.update.wire import HEADER_BYTES

pytestmark = pytest.mark.bits
FROZEN: dict[str, str] = json.loads((Path(__file__).parent / "bits.json").read_text())["digests"]
KEY, RANK = 3 << 60 | 77, 5
LAYOUT = Layout.of_state(
    {
        "conv.weight": torch.zeros(24, 8, 3, 3),
        "dense.weight": torch.zeros(300, 200),
        "embedding.weight": torch.zeros(70, 40, dtype=torch.bfloat16),
        "norm.running_mean": torch.zeros(300),
        "steps": torch.tensor(0),
    }
)
N = LAYOUT.n_values
GRID = Grid.finest(max_abs=4.0, total_weight_max=1 << 20)
INTEGER = CodecPlan(Codec.INTEGER, as_float32(3000.0), KEY)
COMPRESSED = (Codec.QSGD, Codec.PLANES)  # another release of Zstandard may write other bytes of the same values


def exact(n_values: int, key: int = KEY) -> Tensor:
    """float32 between -1/2 and 1/2 whose sizes differ by octaves, made without rounding."""
    drawn = words_by_coordinate(key, Stream.MASK, 0, -(-n_values // 4) * 4)[:n_values]
    units = torch.tensor([2.0 ** -(16 + octave) for octave in range(16)])
    return ((drawn & 0xFFFF) - 0x8000).to(torch.float32) * units[drawn >> 16 & 15]


def update_of(plan: CodecPlan, key: int = KEY, rank: int = RANK) -> bytes:
    """What a client sends, as bytes."""
    return b"".join(codec_for(plan, GRID, LAYOUT).encode(lambda: iter(exact(N, key).split(50_000)), rank))


def integers_of(plan: CodecPlan, update: bytes, rank: int = RANK) -> Iterator[Tensor]:
    codec = codec_for(plan, GRID, LAYOUT)
    n_head = codec.header_bytes
    return codec.integers(update[:n_head], [update[n_head:]], rank)


# --- what is digested -------------------------------------------------------------------------------------------------


def the_draws() -> Iterator[Tensor]:
    yield dither(KEY, 0, 10_000)
    yield signs(KEY, 0, 10_000)
    yield uniforms(KEY, 0, 10_000)
    yield one_in_every(KEY, 7, 10_000)


def the_cohorts() -> Iterator[bytes]:
    candidates = [Candidate(ClientId(f"client-{i}"), 1 + i * i % 97, f"tier-{i % 3}") for i in range(200)]
    for weighting, seed in itertools.product(Weighting, range(5)):
        yield repr(draw(weighting, candidates, 40, seed)).encode()
    yield sample_order(KEY, 3, 5000).tobytes()


def the_factors() -> Iterator[Tensor]:
    for spec, rank in itertools.product(LAYOUT.owners(), (1, 4, 23)):
        if (factor := LowRank(rank).factor(spec, CodecContext(LAYOUT, KEY))) is not None:
            yield factor


def the_points() -> Iterator[Tensor]:
    for bits in range(1, BITS_MAX + 1):
        yield torch.tensor(lloyd_max(bits), dtype=torch.float32)


def the_noise() -> Iterator[Tensor]:
    for variance in (0.01, 3.7, 1e4, 3e8):
        yield Skellam(variance).draw(bytes(range(32)), 1000, 20_000)


def the_private_levels() -> Iterator[Tensor]:
    rotated = Rotated(replace(INTEGER, clip_norm=2.0), N)
    bound = rounded_bound(2.0 * INTEGER.inverse_step, rotated.n_levels)
    plan = NoisePlan(5.5, bound, rotated.n_levels, 10)
    return noisy_levels(rotated, exact(N), dither_of(RANK), plan, bytes(range(32)))


def the_numbers_that_both_ends_work_out() -> Iterator[bytes]:
    for n in (2, 100, 301, 700):
        yield repr(parameters_for(n)).encode()
    yield repr(parameters_for(400, Rule(corrupt=0.05, dropouts=0.05, security_bits=40))).encode()
    yield repr(DEFAULT_RULE.survivors_min(10_000)).encode()
    for sigma, n in itertools.product((0.0, 1e-6, 0.37, 11.0), (1, 10, 1000)):
        yield repr(bits_for(inverse_step=INTEGER.inverse_step, sigma_sum=sigma, n_clients=n)).encode()
    for clip, n in itertools.product((0.1, 33.3, 7e5), (16, 4096, 10_000_000)):
        yield repr(rounded_bound(clip, n)).encode()
    for rate in (1e3, 1e5, 1e7):
        shown = RoundShown(600.0, N, 0.013, [90_000, 100_000], [rate, 2 * rate])
        yield repr(step_for(INTEGER, shown, 0.5)).encode()
    yield repr(robust_mean([(0.1 * i * i % 1.7, 1 + i) for i in range(25)])).encode()


def the_sums_of_squares() -> Iterator[bytes]:
    for n in (0, 1, 4095, 65_537, 150_000):
        yield sum_of_squares(exact(n)).hex().encode()


def the_energies() -> Iterator[Tensor]:
    meter = EnergyMeter(Matrices(LAYOUT), INTEGER.inverse_step)
    meter.add(0, exact(N))
    yield meter.energies()
    yield meter.energies(0.37)


def the_integer_updates() -> Iterator[Tensor]:
    """Encoded and decoded, clipped and not. The bytes themselves are Zstandard's."""
    for plan in (INTEGER, replace(INTEGER, clip_norm=1.5)):
        update = update_of(plan)
        yield torch.frombuffer(bytearray(update[: HEADER_BYTES + 24]), dtype=torch.uint8)[64:]
        yield from integers_of(plan, update)


def the_mean_of_integer_updates() -> Iterator[Tensor]:
    codec = IntegerCodec(INTEGER, GRID, LAYOUT)
    total = codec.new_sum()
    for rank in range(3):
        total.add(integers_of(INTEGER, update_of(INTEGER, KEY + rank, rank), rank), 3 + rank)
    yield total.sums
    parts = [Part(3 + rank, rank) for rank in range(3)]
    yield codec.mean(total, parts).mean_slice(0, N)
    yield torch.tensor(codec.update_rms(total), dtype=torch.float64)


def the_models() -> Iterator[Tensor]:
    """The next master copy and the published model, of float32 updates at a learning rate that nothing divides."""
    codec = codec_for(CodecPlan(), GRID, LAYOUT)
    total = codec.new_sum()
    for rank in range(3):
        total.add(integers_of(CodecPlan(), update_of(CodecPlan(), KEY + rank), rank), 3 + rank)
    start = state_of(exact(N, 1))
    master = {spec.name: start[spec.name].to(master_dtype(spec)) for spec in LAYOUT.owners()}
    master = next_master(LAYOUT, master, codec.mean(total, [Part(3 + rank, rank) for rank in range(3)]), 0.7)
    for state in (master, published_state(LAYOUT, master)):
        yield from (state[spec.name] for spec in LAYOUT.owners())


def the_server_optimizers() -> Iterator[Tensor]:
    """Two steps of each that remembers: the master copy, with what is remembered."""
    codec = codec_for(CodecPlan(), GRID, LAYOUT)
    total = codec.new_sum()
    for rank in range(2):
        total.add(integers_of(CodecPlan(), update_of(CodecPlan(), KEY + rank), rank), 3 + rank)
    mean, start = codec.mean(total, [Part(3 + rank, rank) for rank in range(2)]), state_of(exact(N, 1))
    for name in get_args(ServerOptimizerName)[1:]:
        step = ServerStep.of(
            (AggregationSection(0.3, optimizer=name, bias_correction=name == "adam"), TrainingPlan()), 1, 1, 1
        )
        master = first_master_copy(LAYOUT, step.optimizer, start)
        for _ in range(2):
            public, after = empty_state(LAYOUT, torch_dtype), empty_master(LAYOUT, step.optimizer)
            write_next(LAYOUT, InMemory(master), mean, step, InMemory(public), InMemory(after))
            master = after
        yield from (master[one] for one in sorted(master))


def the_change_between_models() -> Iterator[Tensor]:
    """The step, the published model that follows the master copy, and how its integers are coded."""
    public = {spec.name: state_of(exact(N, 1))[spec.name] for spec in LAYOUT.owners()}
    after = state_of(exact(N, 2))
    master = {spec.name: after[spec.name].to(master_dtype(spec)) for spec in LAYOUT.owners()}
    spread, old, new = Spread(), InMemory(public), InMemory(master)
    for piece in pieces(LAYOUT):
        spread.add(piece.spec, piece.of(new, master_dtype(piece.spec)), piece.of(old, torch_dtype(piece.spec)))
    writer = ChangeWriter(LAYOUT, spread.step(0.5), new, old)
    for _ in writer.body():
        pass
    yield torch.frombuffer(bytearray(writer.head()[HEADER_BYTES : HEADER_BYTES + 4]), dtype=torch.uint8)
    yield from public.values()


def the_masked_sum() -> Iterator[Tensor]:
    """Levels modulo 2^bits, packed, added up, lifted, and their mean; clipped, so that the norm decides the step."""
    modular = Modular(Rotated(replace(INTEGER, clip_norm=1.5), N), 17)
    sums = modular.new_sum()
    for rank in range(3):
        packed = torch.cat(list(modular.packed(modular.residues(exact(N, KEY + rank), dither_of(rank)))))
        yield packed
        modular.add(sums, packed)
    yield sums
    yield modular.mean(sums, 3)


def the_all_reduced_sums() -> Iterator[Tensor]:
    rotated = Rotated(replace(INTEGER, inverse_step=as_float32(9.0)), N)
    levels = [torch.cat([*rotated.levels(exact(N, KEY + rank), rank)]) for rank in range(3)]
    for bits in (8, 12):
        lanes = Lanes(rotated.n_levels, bits)
        words = [lanes.words([one]) for one in levels]
        sums = lanes.sums(sum(words[1:], words[0].clone()))
        yield words[0]
        yield rotated.mean([sums], dithers_of(range(3)))


def the_largest_of_many_equals() -> Iterator[Tensor]:
    equal = (words_by_coordinate(KEY, Stream.MASK, 0, 100_000) % 5).to(torch.float32)
    yield largest(equal, 30_000, KEY)
    yield largest(equal[:5000], 100, KEY)


def the_residual_of_error_feedback() -> Iterator[Tensor]:
    codec, context = vector_codec(Codec.SIGN, {}), CodecContext(LAYOUT, KEY, RANK)
    left = send(codec, exact(N), context, 4, Residual(3, exact(N, 2))).left
    yield left.values


def state_of(values: Tensor) -> State:
    return {s.name: values[s.place].mul(64).to(torch_dtype(s)).view(s.shape) for s in LAYOUT.owners()}


def updates_of(name: Codec) -> Callable[[], Iterator[Tensor]]:
    """What a codec writes of a vector, and what is read of that; with its defaults."""

    def both() -> Iterator[Tensor]:
        plan = CodecPlan(name, key=KEY, clip_norm=1.5)
        update = update_of(plan)
        if name not in COMPRESSED:
            yield torch.frombuffer(bytearray(update), dtype=torch.uint8)
        yield from integers_of(plan, update)

    return both


def the_products_of_low_rank() -> Iterator[Tensor]:
    """Decoded from a payload that no library has solved for."""
    for mode, rank in itertools.product(Sketching, (1, 4, 23)):
        codec, context = LowRank(rank, mode), CodecContext(LAYOUT, KEY)
        payload = exact(codec.payload_bytes(LAYOUT).start // 4).numpy().tobytes()
        yield from codec.decode([payload], context)


DIGESTED: dict[str, Callable[[], Iterable[Tensor | bytes]]] = {
    "draws of Philox": the_draws,
    "cohorts and the order of samples": the_cohorts,
    "factors of low rank": the_factors,
    "products of low rank": the_products_of_low_rank,
    "points of EDEN": the_points,
    "Skellam noise": the_noise,
    "levels with noise": the_private_levels,
    "numbers that both ends work out": the_numbers_that_both_ends_work_out,
    "sums of squares": the_sums_of_squares,
    "energies of rows and columns": the_energies,
    "updates: integer": the_integer_updates,
    "mean: integer": the_mean_of_integer_updates,
    "next model": the_models,
    "server optimizers": the_server_optimizers,
    "change between models": the_change_between_models,
    "masked sum": the_masked_sum,
    "all-reduced sums": the_all_reduced_sums,
    "largest of many equals": the_largest_of_many_equals,
    "residual of error feedback": the_residual_of_error_feedback,
    "updates: float32": updates_of(Codec.FLOAT32),
    **{f"updates: {codec.name.lower()}": updates_of(codec) for codec in CODECS if codec is not Codec.LOWRANK},
}


def digest(name: str) -> str:
    sha = hashlib.sha256()
    for part in DIGESTED[name]():
        sha.update(part if isinstance(part, bytes) else part.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=list(native.Path))
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each kind of kernels that this machine has."""
    try:
        have = (native.Path.TORCH, *native.library().paths)
    except NoKernels:
        have = (native.Path.TORCH,)
    if request.param not in have:
        pytest.skip(f"no {request.param} kernels here")
    monkeypatch.setenv(native.VARIABLE, request.param)
    native.chosen.cache_clear()
    yield
    native.chosen.cache_clear()


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("kernels", "threads")
@pytest.mark.parametrize("name", DIGESTED)
def test_the_bits_are_those_of_every_machine(name: str) -> None:
    assert digest(name) == FROZEN[name]


def test_the_command_runs_all_that_is_marked() -> None:
    tests = Path(__file__).parent.parent
    marked = {path for path in tests.rglob("test_*.py") if "\npytestmark = pytest.mark.bits" in path.read_text()}
    run = {path for named in OF_BITS for path in [tests.parent / named, *(tests.parent / named).rglob("*.py")]}
    assert marked
    assert marked <= run


def test_all_that_is_frozen_is_made() -> None:
    assert set(FROZEN) == set(DIGESTED)


@pytest.mark.usefixtures("kernels", "threads")
@pytest.mark.parametrize("mode", Sketching)
def test_what_low_rank_writes_is_what_any_machine_may_write(mode: Sketching) -> None:
    """Its last bits are a library's. Its length is not, and what is read of it is off by what was promised."""
    codec, context, values = LowRank(4, mode), CodecContext(LAYOUT, KEY), exact(N)
    written = b"".join(codec.encode(values, context))
    assert len(written) in codec.payload_bytes(LAYOUT)
    found = torch.cat(list(codec.decode([written], context)))
    for spec in LAYOUT.owners():
        factor = codec.factor(spec, context)
        expected = values[spec.place].double()
        if factor is not None:
            q, _ = np.linalg.qr(factor.double().numpy())
            projected = torch.from_numpy(q @ (q.T @ expected.view(spec.shape[0], -1).numpy())).view(-1)
            expected = projected * (spec.shape[0] / 4 if mode is Sketching.SKETCHED else 1)
        torch.testing.assert_close(found[spec.place].double(), expected, rtol=0, atol=1e-5)
