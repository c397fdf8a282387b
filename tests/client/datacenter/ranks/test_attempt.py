"""Ranks agree on a name of their attempt through a store that is full of what dead ranks have written."""

from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from umbel.client.datacenter.ranks.attempt import agreed_attempt

_SIZE, _PATIENCE_S = 4, 60.0
_stores: Any = dist


def _store() -> Any:
    store = _stores.HashStore()
    store.set_timeout(timedelta(seconds=_PATIENCE_S))
    return store


def _begin(threads: ThreadPoolExecutor, store: Any, *ranks: int) -> list["Future[str]"]:
    return [threads.submit(agreed_attempt, store, rank, _SIZE, _PATIENCE_S) for rank in ranks]


def _names(begun: list["Future[str]"]) -> set[str]:
    return {one.result(_PATIENCE_S) for one in begun}


def test_every_attempt_has_a_name_of_its_own_whoever_comes_first() -> None:
    store, found = _store(), set[str]()
    with ThreadPoolExecutor(_SIZE) as threads:
        for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)):
            names = _names(_begin(threads, store, *order))
            assert len(names) == 1
            found |= names
    assert len(found) == 3


def test_a_rank_that_comes_after_its_dead_predecessor_was_answered_gets_the_name_too() -> None:
    store = _store()
    with ThreadPoolExecutor(_SIZE) as threads:
        (earlier,) = _names(_begin(threads, store, 0, 1, 2, 3))
        dead = store.get("umbel_token/2").decode()
        store.delete_key(f"umbel_answer/{dead}")
        begun = _begin(threads, store, 0, 1, 3)
        answer = store.get(f"umbel_answer/{dead}").decode()  # rank 0 has seen the old token of rank 2
        assert not begun[0].done()
        names = _names([*begun, *_begin(threads, store, 2)])
    assert names == {answer}
    assert names != {earlier}


def test_rank_0_does_not_wait_without_end() -> None:
    store = _store()
    store.set("umbel_token/1", "dead")
    with pytest.raises(TimeoutError, match="not all of the 2 ranks have come"):
        agreed_attempt(store, 0, 2, 0.0)
