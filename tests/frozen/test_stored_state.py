"""What an earlier umbel has left on disk, in the midst of its work, opens with today's code and goes on to its end."""

import asyncio
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frozen.archive import unpacked
from tests.frozen.kept import frozen
from tests.frozen.stored_clients import (
    ask_member_of_fewer,
    ask_member_under_old_list,
    facts_in,
    pinned_epoch,
    take_up_member,
    take_up_sender,
    take_up_trainer,
    train_undisturbed,
)
from tests.frozen.stored_coordinator import COMES_OF_IT
from umbel.aggregation.trust.members import MembersRefused
from umbel.client.errors import AttemptRefused

pytestmark = pytest.mark.slow
LOST_KEYS = (
    "this client already began this attempt, and a restart or an error lost its keys; "
    "it can take part in the next attempt"
)


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """The directories as they were left."""
    return unpacked(tmp_path / "left")


@pytest.fixture
def kept(left: Path) -> dict[str, Any]:
    """What the clients' coordinators knew."""
    return facts_in(left)


def test_a_run_that_is_over_answers_as_it_did_is_audited_and_made_again(left: Path) -> None:
    """Records, versions, bundles, model files. A round that is made again must come to the same hash, or this fails."""
    assert asyncio.run(COMES_OF_IT["over"](left)) == frozen("stored_runs.json")["over"]


def test_a_plain_round_with_half_an_update_in_it_commits_to_the_frozen_model(left: Path) -> None:
    assert asyncio.run(COMES_OF_IT["open"](left)) == frozen("stored_runs.json")["open"]


def test_a_secure_round_goes_on_with_the_masked_updates_that_were_in(left: Path) -> None:
    assert asyncio.run(COMES_OF_IT["masked"](left)) == frozen("stored_runs.json")["masked"]


def test_a_secure_round_whose_clients_have_lost_their_keys_is_begun_again_and_makes_the_same_model(left: Path) -> None:
    found = asyncio.run(COMES_OF_IT["masked, begun again"](left))
    assert found == frozen("stored_runs.json")["masked, begun again"]
    assert found["versions"] == frozen("stored_runs.json")["masked"]["versions"]


def test_keys_are_their_owners_alone_as_they_were(left: Path) -> None:
    """A key that others can read is refused, so the tests here would fail without its mode."""
    keys = [*left.rglob("key.pem"), *left.rglob("*.key")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in keys] == [0o600] * 5


def test_an_update_that_was_never_sent_is_sent_as_it_is_and_what_it_left_out_goes_into_the_next(
    left: Path, kept: dict[str, Any]
) -> None:
    """Error feedback: the update after it is made of what the two before, and this one, have left over."""
    assert take_up_sender(left / "clients" / "sender", kept["sender"]) == frozen("stored_runs.json")["sender"]


def test_a_training_goes_on_from_its_checkpoint_and_ends_in_the_frozen_bits(
    left: Path, kept: dict[str, Any], tmp_path: Path
) -> None:
    taken_up, undisturbed = take_up_trainer(left / "clients" / "trainer", kept["trainer"]), train_undisturbed(tmp_path)
    assert taken_up.updates == undisturbed.updates == frozen("stored_runs.json")["trainer"]
    is_same_torch = kept["trainer"]["torch"] == torch.__version__  # else it begins anew, and says so
    assert taken_up.n_read == (undisturbed.n_read // 2 if is_same_torch else undisturbed.n_read)


def test_a_secure_attempt_that_was_begun_is_not_begun_twice_and_the_next_one_counts(
    left: Path, kept: dict[str, Any]
) -> None:
    end, declined = take_up_member(left / "clients" / "member", kept["member"])
    assert (end.status, end.masked, end.opened) == ("finished", 2, 2)
    assert declined == {"demo.3.1.ward-7": LOST_KEYS}


def test_a_sum_that_was_revealed_still_refuses_another_of_nearly_the_same_clients(
    left: Path, kept: dict[str, Any]
) -> None:
    with pytest.raises(AttemptRefused, match="already revealed shares of a sum over the same model, in round 1"):
        ask_member_of_fewer(left / "clients" / "member", kept["member"])


def test_a_member_list_that_was_pinned_is_not_gone_back_from(left: Path, kept: dict[str, Any]) -> None:
    state = left / "clients" / "member"
    assert pinned_epoch(state) == 2
    with pytest.raises(MembersRefused, match=r"this site trusts epoch 2 .* and does not go back"):
        ask_member_under_old_list(state, kept["member"])
