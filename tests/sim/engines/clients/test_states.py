"""What simulated clients keep across rounds: on disk, by the version that they trained from, and only if it counted."""

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.types import RunId
from umbel.client.state.site_state import SiteState
from umbel.sim.engines.clients.states import ClientStates

RUN = RunId("ward")


def left(n: int) -> SiteState:
    return SiteState({"n": n}, {"head": torch.full((2,), float(n))})


def test_a_state_is_kept_only_if_its_round_made_a_model(tmp_path: Path) -> None:
    states = ClientStates(tmp_path)
    states.wait(3, RUN, 0, left(1))
    assert not states.before(3, 1), "an abandoned attempt"
    states.wait(3, RUN, 0, left(2))
    states.keep(3, 0)
    assert states.before(3, 1).state == {"n": 2}
    assert torch.equal(states.before(3, 5).private["head"], torch.tensor([2.0, 2.0]))
    assert not states.before(3, 0), "an attempt that is repeated begins as before"
    assert not states.before(4, 9), "another client's"


def test_a_client_that_keeps_nothing_has_no_file(tmp_path: Path) -> None:
    states = ClientStates(tmp_path)
    states.wait(3, RUN, 0, SiteState())
    states.keep(3, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_state_of_an_abandoned_attempt_is_never_kept_later(tmp_path: Path) -> None:
    states = ClientStates(tmp_path)
    states.wait(3, RUN, 0, left(1))
    states.wait(3, RUN, 1, SiteState())  # its client keeps nothing this time
    states.keep(3, 1)
    assert not states.before(3, 9)


@given(
    trained=st.lists(st.integers(0, 20), unique=True, max_size=10).map(sorted),
    checkpointed=st.lists(st.integers(0, 20), max_size=3).map(sorted),
)
def test_every_state_that_a_resumed_run_needs_is_there(trained: list[int], checkpointed: list[int]) -> None:
    """A list of all states ever kept is the oracle; the run resumes from its last checkpoint."""
    states = ClientStates()
    last = 0
    for version in trained:
        last = max([one for one in checkpointed if one <= version], default=last)
        states.oldest_start = last
        states.wait(0, RUN, version, left(version))
        states.keep(0, version)
    states.forget_from(last)
    for version in range(last, 22):
        expected = max((one for one in trained if one < last and one < version), default=None)
        assert states.before(0, version).state == ({} if expected is None else {"n": expected})
    states.close()


def test_a_run_that_cannot_be_resumed_keeps_one_state_for_each_client() -> None:
    states = ClientStates()
    for version in range(5):
        states.oldest_start = version + 1
        states.wait(0, RUN, version, left(version))
        states.keep(0, version)
        assert states.before(0, version + 1).state == {"n": version}
    assert len(list(states.folder.rglob("*.safetensors"))) == 1
    states.close()
    assert not states.folder.exists()


@given(kept=st.lists(st.integers(0, 9), unique=True, max_size=4).map(sorted), version=st.integers(0, 10))
def test_a_lent_state_is_the_one_that_a_training_here_begins_with(kept: list[int], version: int) -> None:
    """And what the training elsewhere leaves waits here, as if it had been left here."""
    here, elsewhere = ClientStates(), ClientStates()
    for one in kept:
        here.wait(0, RUN, one, left(one))
        here.keep(0, one)
    if (file := here.lend(0, version)) is not None:
        elsewhere.borrow(0, file)
    assert elsewhere.before(0, version + 1).state == here.before(0, version).state
    elsewhere.wait(0, RUN, 11, left(11) if version % 2 else SiteState())
    here.wait_for(0, elsewhere.left(0))
    here.keep(0, 11)
    expected = {"n": 11} if version % 2 else {} if file is not None else here.before(0, 11).state
    assert here.before(0, 12).state == expected
