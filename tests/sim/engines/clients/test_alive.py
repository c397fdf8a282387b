"""Only some clients are in memory: the least recently used one goes, and their number follows from their size."""

import gc
import weakref

import numpy as np
import torch
from torch import nn

from tests.sim.engines.clients.sites import app_of
from umbel.client import Client
from umbel.sim.engines.clients.alive import LiveClients, bytes_of
from umbel.sim.engines.clients.app import ClientApp


def test_the_least_recently_used_client_goes_and_is_made_again() -> None:
    clients = LiveClients(app_of("make_client"), 2)
    first = clients.of(0, lambda: None)
    gone = weakref.ref(clients.of(1, lambda: None).app)
    assert clients.of(0, lambda: None) is first
    clients.of(2, lambda: None)
    gc.collect()
    assert gone() is None
    assert clients.of(0, lambda: None) is first
    assert len(clients) == 2
    again = clients.of(1, lambda: None).app.model.state_dict()
    made = app_of("make_client").make(1, None).model.state_dict()
    assert all(torch.equal(again[name], made[name]) for name in made)


class _Holder:
    def __init__(self, *parts: object) -> None:
        self.parts = parts


def test_bytes_of_tensors_and_arrays_are_counted_once_and_shared_ones_not_again() -> None:
    mine, shared, array = torch.zeros(1000), torch.zeros(5000), np.zeros(2000)
    seen = set[int]()
    first = bytes_of(_Holder(mine, mine[:10], shared, nn.Linear(10, 10), lambda: array), seen)
    assert 4 * 6000 + 8 * 2000 <= first < 60_000
    assert bytes_of(_Holder(shared, torch.zeros(100)), seen) < 4_000, "the shared tensor is known"


def test_their_number_follows_from_the_size_of_the_second() -> None:
    """Each holds 1 MB of its own, and all share 8 MB; a quarter of the free memory has room for ten."""
    shared = torch.zeros(2_000_000)

    class Large(ClientApp):
        def make(self, number: int, share: object) -> Client:
            made = app_of("make_client").make(number, None)
            made.data = torch.zeros(250_000), shared  # type: ignore[attr-defined]  # as a site's own code would
            return made

    clients = LiveClients(Large("tests:large", 40, 1, False), None, free_bytes=lambda: 44_000_000)
    for number in range(40):
        clients.of(number, lambda: None)
    assert 9 <= len(clients) <= 11
