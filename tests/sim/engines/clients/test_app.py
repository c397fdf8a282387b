"""A make_client function is found, checked, and called so that each client is the same each time it is made."""

import pytest
import torch

from tests.sim.engines.clients.sites import HERE, app_of, make_client
from umbel.client.local.devices import generators, set_generators
from umbel.sim.engines.clients.app import ClientApp, measuring_client
from umbel.sim.engines.work import EngineError


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("A_CLIENT", "is one Client, but each simulated client needs its own; write it as `def make_client"),
        ("A_NUMBER", "is a int; write it as `def make_client"),
        ("make_without_arguments", r"make_without_arguments\(\).* cannot be called with a client's number"),
        ("make_client_of_share", "has a parameter `data`, but the experiment has no data to deal out"),
        ("make_nothing", "has no 'make_nothing'"),
    ],
)
def test_what_is_no_make_client_is_refused_with_what_one_looks_like(name: str, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        app_of(name)


def test_data_that_no_client_would_see_are_refused() -> None:
    with pytest.raises(EngineError, match="has no parameter `data`, so its clients would never see them"):
        app_of("make_client", has_data=True)


def test_an_unknown_argument_is_refused_with_its_name() -> None:
    words = r"the number of clients and the arguments widht \(.*\); change these arguments in \[clients\], or write it"
    with pytest.raises(EngineError, match=words):
        app_of("make_wide", widht=8)


def test_an_error_in_a_library_has_the_line_of_the_users_own_code() -> None:
    app = app_of("make_wide", hidden="eight")
    with pytest.raises(EngineError, match=r"could not make client 3: TypeError: .* \(\S*sites.py, line \d+\)$"):
        app.make(3, None)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("make_none", "returned a NoneType; it must return an umbel.client.Client"),
        ("make_broken", r"make_broken could not make client 3: KeyError: 'ward 7' \(.*sites.py, line \d+\)"),
    ],
)
def test_a_client_that_cannot_be_made_is_named(name: str, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        app_of(name).make(3, None)


def test_a_client_is_the_same_each_time_and_leaves_the_generators_alone() -> None:
    app = ClientApp.from_json(app_of("make_client").to_json())
    first = app.make(2, None).model.state_dict()
    before = generators(torch.device("cpu"))
    torch.rand(3)
    again, other = app.make(2, None).model.state_dict(), app.make(3, None).model.state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["1.weight"], other["1.weight"])
    set_generators(before, torch.device("cpu"))
    app.make(2, None)
    after = generators(torch.device("cpu"))
    assert torch.equal(after.pop("torch"), before.pop("torch"))
    assert after == before


def test_the_first_model_is_what_umbel_model_init_makes_with_the_seed_of_the_run() -> None:
    app = app_of("make_client")
    torch.manual_seed(app.seed)
    expected = app_of("make_client").make_first(None)
    torch.manual_seed(app.seed)
    assert torch.equal(make_client(0, 6).model.state_dict()["1.weight"], expected.model.state_dict()["1.weight"])


def test_more_arguments_reach_the_function_or_are_refused() -> None:
    with pytest.raises(EngineError, match="unexpected keyword argument 'depth'"):
        app_of("make_client", depth=3)


def test_a_tester_may_be_a_client_or_a_function() -> None:
    assert measuring_client(f"{HERE}:A_CLIENT", None, 1).sample_count == 9
    assert measuring_client(f"{HERE}:make_tester", None, 1).sample_count == 9
    with pytest.raises(EngineError, match="is a int; name a Client, or a function that returns one"):
        measuring_client(f"{HERE}:A_NUMBER", None, 1)
