"""Each path of the kernels that this machine has, one after the other."""

from collections.abc import Iterator

import pytest

from umbel.aggregation.kernels import native
from umbel.aggregation.kernels.native import NoKernels


def compiled_paths() -> tuple[native.Path, ...]:
    try:
        return native.library().paths
    except NoKernels:
        return ()


PATHS = tuple(native.Path) if not compiled_paths() else (native.Path.TORCH, *compiled_paths())


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[native.Path]:
    if request.param not in (native.Path.TORCH, *compiled_paths()):
        pytest.skip("the kernels are not compiled here, or not for this machine")
    monkeypatch.setenv(native.VARIABLE, request.param)
    native.chosen.cache_clear()
    yield request.param
    native.chosen.cache_clear()
