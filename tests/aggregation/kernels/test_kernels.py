"""Every compiled kernel on every path that this machine has, against the plain torch of the same name: equal bits."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.aggregation.conftest import compiled_paths
from tests.aggregation.kernels.test_residues import whole_range
from tests.repository import ROOT
from umbel.aggregation.codec.entropy import entropy_kernels
from umbel.aggregation.codec.entropy.entropy import read_segment, write_segment
from umbel.aggregation.codec.entropy.payload import Payload
from umbel.aggregation.kernels import kernels, native
from umbel.aggregation.kernels.arguments import Blocks, Levels, Quantizer
from umbel.aggregation.kernels.kernels import add_packed, pack_residues
from umbel.aggregation.kernels.native import NoKernels
from umbel.aggregation.kernels.packing import pack, packed_bytes, unpack
from umbel.aggregation.kernels.philox import dither, signs
from umbel.aggregation.kernels.quantize import quantize
from umbel.aggregation.kernels.rotation import rotate, unrotate
from umbel.aggregation.types import LEVEL_MAX

KEYS = st.integers(0, (1 << 64) - 1)
SIZES = st.one_of(
    st.integers(0, 40_000), st.sampled_from([0, 1, 127, 128, 129, 511, 512, 513, 4095, 4096, 4097, 32_768])
)
FIRSTS = st.one_of(st.integers(0, 50), st.integers(1 << 20, 1 << 40))  # tiles
WIDTHS, FOLD_WIDTHS = st.integers(1, 32), st.integers(1, 15)
EXTREMES = torch.tensor(
    [0.0, -0.0, 1e38, -1e38, 3.4e38, -3.4e38, 1e-45, -1e-45, 1e-38, -1e-39, 0.5, -0.5, 1.5, 2.5, 32_766.5, -32_767.5]
)
LIMIT_ROTATED = 1e37  # sixteen of them can be added up; what is not finite has no levels
each_path = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def vectors(draw: st.DrawFn, limit: float = 3.4e38) -> Tensor:
    """Finite floats of any size, extreme ones among them."""
    length = draw(SIZES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    values = torch.randn(length, generator=generator) * 10.0 ** draw(st.integers(-3, 3))
    if length and draw(st.booleans()):
        places = torch.randint(0, length, (len(EXTREMES),), generator=generator)
        values[places] = EXTREMES.clamp(-limit, limit)
    return values


@st.composite
def quantizers(draw: st.DrawFn) -> Quantizer:
    inverse_step = torch.tensor(draw(st.floats(2.0**-140, 2.0**127, width=32))).item()
    if draw(st.booleans()):
        inverse_step = float(2 ** draw(st.integers(-6, 6)))
    fixed = st.integers(1, 15).map(Levels.of_width)
    cut = st.tuples(st.integers(-LEVEL_MAX, 0), st.integers(0, LEVEL_MAX), st.sampled_from([0, -32_768, 65_536]))
    levels = draw(st.one_of(st.just(Levels()), fixed, cut.map(lambda parts: Levels(*parts))))
    return Quantizer(inverse_step, draw(KEYS), draw(st.integers(0, 65_535)), levels)


def equal_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Also tells 0.0 from -0.0."""
    return ours.dtype == theirs.dtype and torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def parts(total: int, size: int) -> list[tuple[int, int]]:
    """First and length of consecutive parts."""
    return [(first, min(size, total - first)) for first in range(0, total, size)]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (1 << 64) - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(
    path: native.Path, counter: tuple[int, int, int, int], key: int, expected: tuple[int, int, int, int]
) -> None:
    chosen = native.chosen()
    if chosen is None:
        pytest.skip("test_philox.py has those of torch")
    out = torch.zeros((4, 16), dtype=torch.int32)
    chosen.words(out, key, counter)
    assert tuple((out[:, 0].to(torch.int64) & 0xFFFFFFFF).tolist()) == expected


@given(KEYS, FIRSTS, SIZES)
@each_path
def test_dither_and_signs_are_those_of_torch(path: native.Path, key: int, tile: int, n_values: int) -> None:
    first = tile * kernels.TILE
    shared, sign = torch.zeros(n_values, dtype=torch.int32), torch.zeros(n_values)
    kernels.dither_into(shared, key, first)
    kernels.signs_into(sign, key, first)
    assert equal_bits(shared, dither(key, first, n_values))
    assert equal_bits(sign, signs(key, first, n_values))


@given(vectors(LIMIT_ROTATED), KEYS)
@each_path
def test_a_rotation_is_that_of_torch_to_the_last_bit(path: native.Path, values: Tensor, key: int) -> None:
    blocks = Blocks.of(values.numel())
    out = torch.full((blocks.n_padded,), float("nan"))
    kernels.rotate_into(out, values, blocks, key)
    assert equal_bits(out, rotate(values, blocks, key))


@given(vectors(LIMIT_ROTATED), KEYS, st.integers(1, 4))
@each_path
def test_a_rotation_in_parts_is_the_whole(path: native.Path, values: Tensor, key: int, n_tiles: int) -> None:
    blocks = Blocks.of(values.numel())
    whole = rotate(values, blocks, key)
    for first, length in parts(blocks.n_padded, n_tiles * kernels.TILE):
        out = torch.empty(length)
        kernels.rotate_into(out, values, blocks, key, first)
        assert equal_bits(out, whole[first : first + length])


@given(SIZES, KEYS, st.integers(1, 4), st.sampled_from([torch.float32, torch.float64]), st.integers(0, 99))
@each_path
def test_the_inverse_in_parts_is_that_of_torch_to_the_last_bit(
    path: native.Path, n_values: int, key: int, n_tiles: int, dtype: torch.dtype, seed: int
) -> None:
    blocks = Blocks.of(n_values)
    rotated = torch.randn(blocks.n_padded, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    out = torch.full((n_values,), float("nan"), dtype=dtype)
    for first, length in parts(blocks.n_padded, n_tiles * kernels.TILE):
        kernels.unrotate_into(out, rotated[first : first + length], blocks, key, first)
    assert equal_bits(out, unrotate(rotated, blocks, key))


@given(vectors(), quantizers(), FIRSTS, st.sampled_from([torch.int32, torch.int16]))
@each_path
def test_levels_are_those_of_torch(
    path: native.Path, values: Tensor, quantizer: Quantizer, group: int, dtype: torch.dtype
) -> None:
    first = group * 128
    out = torch.zeros(values.numel(), dtype=dtype)
    kernels.quantize_into(out, values, quantizer, first)
    assert equal_bits(out, quantized(values, quantizer, first).to(dtype))


def quantized(values: Tensor, quantizer: Quantizer, first: int) -> Tensor:
    shared = dither(quantizer.key, first, values.numel())
    return quantize(values, quantizer.inverse_step, shared, quantizer.phi, quantizer.levels)


@given(vectors(), quantizers(), FIRSTS, WIDTHS)
@each_path
def test_packed_levels_are_those_of_torch(
    path: native.Path, values: Tensor, quantizer: Quantizer, group: int, bits: int
) -> None:
    out = torch.full((packed_bytes(values.numel(), bits),), 255, dtype=torch.uint8)
    kernels.pack_into(out, values, quantizer, bits, group * 512)
    assert torch.equal(out, pack(quantized(values, quantizer, group * 512), bits))


@given(vectors(LIMIT_ROTATED), KEYS, quantizers(), WIDTHS, st.integers(1, 4))
@each_path
def test_rotated_and_packed_at_once_is_one_after_the_other(
    path: native.Path, values: Tensor, sign_key: int, quantizer: Quantizer, bits: int, n_tiles: int
) -> None:
    blocks = Blocks.of(values.numel())
    whole = pack(quantized(rotate(values, blocks, sign_key), quantizer, 0), bits)
    out = torch.full_like(whole, 255)
    kernels.rotate_and_pack_into(out, values, blocks, sign_key, quantizer, bits)
    assert torch.equal(out, whole)
    for first, length in parts(blocks.n_padded, n_tiles * kernels.TILE):
        place = slice(packed_bytes(first, bits), packed_bytes(first + length, bits))
        out[place] = 255
        kernels.rotate_and_pack_into(out[place], values, blocks, sign_key, quantizer, bits, (first, length))
    assert torch.equal(out, whole)


@given(
    SIZES,
    FOLD_WIDTHS,
    st.integers(-(1 << 31), (1 << 31) - 1),
    st.sampled_from([torch.int32, torch.int64]),
    st.integers(0, 999),
)
@each_path
def test_folding_adds_weighted_levels_and_tells_their_size(
    path: native.Path, n_values: int, bits: int, weight: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    bound = 1 << (bits - 1)
    levels = torch.randint(-bound, bound, (n_values,), generator=generator, dtype=torch.int32)
    sums = torch.randint(-(1 << 30), 1 << 30, (n_values,), generator=generator, dtype=torch.int64).to(dtype)
    expected = (sums.to(torch.int64) + levels.to(torch.int64) * weight).to(dtype)  # int32 wraps in all of them
    folded = kernels.fold_packed(sums, pack(levels, bits), bits, weight)
    assert torch.equal(sums, expected)
    assert folded.sum_of_squares == int(levels.to(torch.int64).square().sum())
    assert folded.greatest == (int(levels.abs().max()) if n_values else 0)


@pytest.mark.parametrize("bits", range(1, 16))
@pytest.mark.parametrize("is_greatest", [False, True])
def test_squares_of_the_extreme_levels_do_not_overflow(path: native.Path, bits: int, is_greatest: bool) -> None:
    level = (1 << (bits - 1)) - 1 if is_greatest else -(1 << (bits - 1))
    sums = torch.zeros(5000, dtype=torch.int64)
    folded = kernels.fold_packed(sums, pack(torch.full((5000,), level, dtype=torch.int32), bits), bits, -7)
    assert folded == native.Folded(5000 * level * level, abs(level))
    assert bool((sums == -7 * level).all())


def test_what_lies_beside_the_buffers_is_left_alone(path: native.Path) -> None:
    """Buffers in the middle of a larger one, at odd places, of lengths that end groups early."""
    values = torch.randn(33_001, generator=torch.Generator().manual_seed(2))
    blocks, quantizer = Blocks.of(33_000), Quantizer(4.0, 5, 6, Levels())
    floats, ints = torch.full((blocks.n_padded + 2,), 7.0), torch.full((33_002,), 7, dtype=torch.int32)
    kernels.rotate_into(floats[1:-1], values[1:], blocks, 3)
    kernels.quantize_into(ints[1:-1], values[1:], quantizer)
    assert equal_bits(floats[1:-1].clone(), rotate(values[1:], blocks, 3))
    assert torch.equal(ints[1:-1], quantized(values[1:], quantizer, 0))
    assert floats[[0, -1]].tolist() == [7.0, 7.0]
    assert ints[[0, -1]].tolist() == [7, 7]
    back = torch.full((33_002,), 7.0)
    kernels.unrotate_into(back[1:-1], floats[1:-1].clone(), blocks, 3)
    assert equal_bits(back[1:-1].clone(), unrotate(floats[1:-1], blocks, 3))
    assert back[[0, -1]].tolist() == [7.0, 7.0]
    kernels.fold_packed(ints[1:-1], torch.zeros(packed_bytes(33_000, 4), dtype=torch.uint8), 4, 1)
    assert ints[[0, -1]].tolist() == [7, 7]


def test_tensors_that_are_not_contiguous_are_quantized_by_torch(path: native.Path) -> None:
    values = torch.randn(2000, generator=torch.Generator().manual_seed(3))[::2]
    quantizer = Quantizer(4.0, 5, 6, Levels())
    out = torch.zeros(1000, dtype=torch.int32)
    kernels.quantize_into(out, values, quantizer)
    assert torch.equal(out, quantized(values, quantizer, 0))


def test_levels_and_weights_that_need_more_than_32_bits_are_computed_by_torch(path: native.Path) -> None:
    values, quantizer = torch.ones(100), Quantizer(1.0, 5, 6, Levels(offset=1 << 33))
    out, sums = torch.zeros(100, dtype=torch.int32), torch.zeros(100, dtype=torch.int64)
    kernels.quantize_into(out, values, quantizer)
    assert torch.equal(out, quantized(values, quantizer, 0))
    kernels.fold_packed(sums, pack(torch.ones(100, dtype=torch.int32), 4), 4, 1 << 40)
    assert bool((sums == 1 << 40).all())


def test_buffers_of_a_wrong_length_or_type_are_refused() -> None:
    values, blocks, quantizer = torch.ones(1000), Blocks.of(1000), Quantizer(1.0, 5, 6, Levels())
    out = torch.zeros(blocks.n_padded)
    with pytest.raises(ValueError, match=r"must have shape \[1000\]"):
        kernels.rotate_into(out, values[1:], blocks, 1)
    with pytest.raises(ValueError, match="not whole blocks"):
        kernels.rotate_into(out[1:], values, blocks, 1)
    with pytest.raises(ValueError, match="not whole blocks"):
        kernels.rotate_into(out, values, blocks, 1, first=4096)
    with pytest.raises(ValueError, match="must be a multiple of"):
        kernels.rotate_into(out, values, blocks, 1, first=64)
    with pytest.raises(ValueError, match="cannot hold"):
        kernels.rotate_into(out, values, Blocks(1000, 1, 4), 1)
    with pytest.raises(TypeError, match=r"type must be torch\.float32, not torch\.float64"):
        kernels.rotate_into(out, values.double(), blocks, 1)
    with pytest.raises(TypeError, match=r"type must be torch\.int32 or torch\.int16, not torch\.int64"):
        kernels.quantize_into(torch.zeros(1000, dtype=torch.int64), values, quantizer)
    with pytest.raises(ValueError, match=r"must have shape \[512\]"):
        kernels.pack_into(torch.zeros(511, dtype=torch.uint8), values, quantizer, 4)
    with pytest.raises(ValueError, match="between 1 and 32"):
        kernels.pack_into(torch.zeros(512, dtype=torch.uint8), values, quantizer, 33)
    with pytest.raises(ValueError, match="between 1 and 15"):
        kernels.fold_packed(torch.zeros(512, dtype=torch.int32), torch.zeros(1024, dtype=torch.uint8), 16, 1)
    with pytest.raises(ValueError, match=r"must have shape \[512\]"):
        kernels.fold_packed(torch.zeros(1000, dtype=torch.int32), torch.zeros(513, dtype=torch.uint8), 4, 1)


def test_widths_that_triton_has_not_never_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    values, blocks, quantizer = torch.linspace(-9, 9, 4096), Blocks.of(4096), Quantizer(1.0, 5, 6, Levels())
    monkeypatch.delattr(kernels, "_native")
    for bits in (16, 32):
        out = torch.zeros(packed_bytes(4096, bits), dtype=torch.uint8)
        kernels.pack_into(out, values, quantizer, bits)
        assert torch.equal(out, pack(quantized(values, quantizer, 0), bits))
        kernels.rotate_and_pack_into(out, values, blocks, 3, quantizer, bits)
        assert torch.equal(out, pack(quantized(rotate(values, blocks, 3), quantizer, 0), bits))


# --- choosing --------------------------------------------------------------------------------------------------------


@pytest.fixture
def unchosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """As a process that has not used the kernels yet, and is not told which."""
    monkeypatch.delenv(native.VARIABLE, raising=False)
    for cached in (native.chosen, native.library):
        cached.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for cached in (native.chosen, native.library):
        cached.cache_clear()


def test_the_best_path_is_chosen(unchosen: pytest.MonkeyPatch) -> None:
    if not compiled_paths():
        pytest.skip("the kernels are not compiled here")
    chosen = native.chosen()
    assert chosen is not None
    assert chosen.path == native.library().paths[-1]


def test_without_the_library_torch_serves_and_one_line_says_why(
    unchosen: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unchosen.setattr(native, "FILE", "nowhere.so")
    out = torch.zeros(1000, dtype=torch.int32)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            kernels.dither_into(out, 1, 0)
    assert torch.equal(out, dither(1, 0, 1000))
    assert [record.getMessage() for record in caplog.records] == [
        "umbel was installed without its compiled kernels: install a C++ compiler (g++ or clang), then install umbel "
        "again; until then torch computes the same results, more slowly"
    ]


def test_a_library_of_another_version_is_not_used(
    unchosen: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not compiled_paths():
        pytest.skip("the kernels are not compiled here")
    native.library.cache_clear()
    unchosen.setattr(native, "ABI", native.ABI + 1)
    assert native.chosen() is None
    assert f"have version {native.ABI - 1}, and this umbel needs version {native.ABI}" in caplog.text


def test_a_file_that_is_no_such_library_is_not_used(tmp_path: Path) -> None:
    text = tmp_path / "kernels.native.so"
    text.write_text("not a library")
    with pytest.raises(NoKernels, match="cannot be loaded"):
        native.Library(str(text))
    with pytest.raises(NoKernels, match="cannot be loaded"):
        native.Library(next(file for file in map(str, (Path(torch.__file__).parent / "lib").glob("libc10.*"))))


def test_asking_for_a_path_that_is_not_there_is_an_error(unchosen: pytest.MonkeyPatch) -> None:
    unchosen.setenv(native.VARIABLE, "sse9")
    with pytest.raises(NoKernels, match="UMBEL_KERNELS is 'sse9'; it can be torch, generic, avx2, avx512"):
        native.chosen()
    unchosen.setenv(native.VARIABLE, "generic")
    unchosen.setattr(native, "FILE", "nowhere.so")
    with pytest.raises(NoKernels, match="without its compiled kernels"):
        native.chosen()


@pytest.mark.nightly
@pytest.mark.slow
def test_what_machines_other_than_x86_get_is_the_same(tmp_path: Path, unchosen: pytest.MonkeyPatch) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler here")
    library = tmp_path / "portable.so"
    source = ROOT / "aggregation" / "kernels" / "kernels.cpp"
    options = ["-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-Wno-psabi", "-DHAS_X86=0"]
    subprocess.run([compiler, *options, "-o", library, source], check=True)
    portable = native.Library(str(library))
    assert portable.paths == (native.Path.GENERIC,)
    unchosen.setattr(kernels, "chosen", lambda: portable.kernels(native.Path.GENERIC))
    values = torch.randn(40_000, generator=torch.Generator().manual_seed(4))
    values[: len(EXTREMES)] = EXTREMES.clamp(-LIMIT_ROTATED, LIMIT_ROTATED)
    blocks, out, back = Blocks.of(40_000), torch.empty(40_960), torch.empty(40_000)
    kernels.rotate_into(out, values, blocks, 1)
    kernels.unrotate_into(back, out, blocks, 1)
    assert equal_bits(out, rotate(values, blocks, 1))
    assert equal_bits(back, unrotate(out, blocks, 1))
    for bits in range(1, 16):
        quantizer = Quantizer(2.0**bits, 2, 3, Levels.of_width(bits))
        packed = torch.empty(packed_bytes(40_960, bits), dtype=torch.uint8)
        kernels.rotate_and_pack_into(packed, values, blocks, 1, quantizer, bits)
        levels = quantized(out, quantizer, 0)
        assert torch.equal(packed, pack(levels, bits))
        for dtype in (torch.int32, torch.int64):
            sums = torch.zeros(40_960, dtype=dtype)
            folded = kernels.fold_packed(sums, packed, bits, -3)
            assert torch.equal(sums, (levels * -3).to(dtype))
            assert folded.sum_of_squares == int(levels.to(torch.int64).square().sum())
    integers = whole_range(40_001, 5)
    for bits in range(1, 33):
        sums = torch.ones(40_001, dtype=torch.int32)
        packed = pack_residues(integers, bits)
        add_packed(sums, packed, bits)
        assert torch.equal(packed, pack(integers, bits))
        assert torch.equal(sums, unpack(packed, 40_001, bits) + 1)
    whole, classes = quantized(values, Quantizer(64.0, 2, 3, Levels()), 0), torch.zeros(40_000, dtype=torch.uint8)
    entropy_kernels.mix_dither_into(classes, 2, 3, 0)
    is_mirrored = (dither(2, 0, 40_000) + 3 & 0xFFFF) >= 1 << 15
    assert torch.equal(classes >= entropy_kernels.MIRRORED, is_mirrored)
    for width in entropy_kernels.WIDTHS:
        written = write_segment(whole, classes, (width,) * entropy_kernels.N_CLASSES)
        read = read_segment(Payload([written]), classes, (width,) * entropy_kernels.N_CLASSES)
        assert torch.equal(read.levels(), whole)


# --- installing ------------------------------------------------------------------------------------------------------


@pytest.mark.nightly  # `make test` itself installs umbel with a compiler where there is one
@pytest.mark.parametrize("options", [[], ["-e"]], ids=["copied", "editable"])
@pytest.mark.parametrize("has_compiler", [True, False], ids=["compiler", "no compiler"])
def test_umbel_installs_with_and_without_a_compiler(tmp_path: Path, options: list[str], has_compiler: bool) -> None:
    pytest.importorskip("setuptools", "77")
    source = tmp_path / "source"
    tree = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    for name in tree.stdout.decode().splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            (source / name).symlink_to(os.readlink(ROOT / name))
        elif (ROOT / name).is_file():
            (source / name).write_bytes((ROOT / name).read_bytes())
    python = new_environment(tmp_path / "venv")
    compilers = {} if has_compiler else {"CC": "/bin/false", "CXX": "/bin/false"}
    ours = {"PYTHONPATH", "UMBEL_KERNELS"}  # which umbel the tests use, and which of its kernels
    environment = {name: value for name, value in os.environ.items() if name not in ours} | compilers
    install = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", *options, str(source)]
    installed = subprocess.run(install, capture_output=True, text=True, env=environment, check=False)
    assert installed.returncode == 0, installed.stderr
    script = (
        "from umbel.aggregation.kernels import native; print(native.__file__, getattr(native.chosen(), 'path', None))"
    )
    said = subprocess.run(
        [python, "-c", script], capture_output=True, text=True, cwd=tmp_path, env=environment, check=True
    )
    file, path = said.stdout.split()
    assert Path(file).is_relative_to(source if options else tmp_path / "venv")
    assert (path != "None") == has_compiler
    assert ("without its compiled kernels" in said.stderr) == (not has_compiler)


def new_environment(folder: Path) -> str:
    """Its interpreter; it sees this one's packages after its own, but not where this one finds umbel."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "uninstall", "-qy", "setuptools"], capture_output=True, check=True
    )  # an old one
    where = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    theirs = [path for path in sys.path if path.endswith("site-packages")]
    (Path(where) / "theirs.pth").write_text("\n".join(theirs) + "\n")  # a .pth inside these is not read
    return str(python)
