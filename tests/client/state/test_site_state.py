"""What a client keeps across rounds: the newest state of an older version whose work is in the coordinator's model."""

import logging
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.client.doubles.double import TOKEN, URL, Double, Handler, kind_of
from umbel.aggregation.plans.assignment import assignment_id
from umbel.aggregation.types import AssignmentId, ClientId, RunId
from umbel.client import Client, LocalPlan, RunEnd, TrainResult, run_client
from umbel.client.state import site_state
from umbel.client.state.model_files import write_tensors
from umbel.client.state.site_state import SiteState, SiteStateStore, StateTooLarge, write_state

RUN = RunId("demo")


def store(folder: Path) -> SiteStateStore:
    return SiteStateStore(folder / "site", folder / "waiting.safetensors")


def assignment(version: int) -> AssignmentId:
    return assignment_id(RUN, version + 1, 1, ClientId("north"))


class Coordinator:
    """Says what counts: all, but for the trainings from some versions. `asked`: for which it was asked, in order."""

    def __init__(self, *uncounted: int) -> None:
        self.uncounted, self.asked = uncounted, list[AssignmentId]()

    def counts(self, assigned: AssignmentId) -> bool:
        self.asked.append(assigned)
        return assigned not in map(assignment, self.uncounted)


def before(kept: SiteStateStore, version: int, *uncounted: int, run: RunId = RUN) -> SiteState:
    return kept.before(run, version, Coordinator(*uncounted).counts)


def leave(
    kept: SiteStateStore, version: int, state: dict[str, Any], *uncounted: int, accepted: bool = True
) -> SiteState:
    """Train from this version. Returns the state with which that began."""
    began = before(kept, version, *uncounted)
    kept.wait(RUN, version, assignment(version), SiteState(state, {"head": torch.full((2,), float(version))}))
    if accepted:
        kept.keep()
    return began


def versions(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in (folder / "site" / RUN).iterdir())


def test_a_round_begins_with_the_newest_state_of_an_older_version(tmp_path: Path) -> None:
    kept = store(tmp_path)
    assert before(kept, 0) == SiteState()
    leave(kept, 0, {"rounds": 1})
    leave(kept, 3, {"rounds": 2})
    assert before(store(tmp_path), 4).state == {"rounds": 2}
    assert before(kept, 3).state == {"rounds": 1}, "an attempt that is repeated begins as the first did"
    assert torch.equal(before(kept, 9).private["head"], torch.full((2,), 3.0))


def test_a_state_that_was_never_reported_is_gone(tmp_path: Path) -> None:
    kept = store(tmp_path)
    leave(kept, 0, {"rounds": 1})
    leave(kept, 1, {"rounds": 2}, accepted=False)
    assert before(kept, 5).state == {"rounds": 1}


def test_a_state_whose_round_was_abandoned_after_its_report_is_passed_over(tmp_path: Path) -> None:
    kept = store(tmp_path)
    leave(kept, 0, {"rounds": 1})
    leave(kept, 1, {"rounds": 2})
    assert before(kept, 5, 1).state == {"rounds": 1}
    assert leave(kept, 5, {"rounds": 2}, 1).state == {"rounds": 1}
    assert before(kept, 6, 1).state == {"rounds": 2}


def test_a_client_whose_only_work_did_not_count_begins_with_nothing(tmp_path: Path) -> None:
    kept = store(tmp_path)
    leave(kept, 0, {"rounds": 1})
    assert before(kept, 2, 0) == SiteState()
    leave(kept, 2, {"rounds": 1}, 0)
    assert before(kept, 3, 0, 2) == SiteState()


def test_after_a_rollback_a_client_goes_back_to_the_state_of_then(tmp_path: Path) -> None:
    kept = store(tmp_path)
    for version in range(6):
        leave(kept, version, {"version": version})
    assert before(kept, 9, 3, 4, 5).state == {"version": 2}
    leave(kept, 9, {"version": 9}, 3, 4, 5)
    assert before(kept, 11, 9).state == {"version": 5}, "a second rollback has brought back what the first took out"


def test_a_rollback_behind_all_that_is_here_leaves_the_oldest_state(tmp_path: Path) -> None:
    kept = store(tmp_path)
    for version in range(20):
        leave(kept, version, {"version": version})
    assert before(kept, 22, *range(4, 20)).state == {"version": 4}


def test_the_coordinator_is_asked_only_as_far_as_needed(tmp_path: Path) -> None:
    kept, coordinator = store(tmp_path), Coordinator(3)
    for version in range(4):
        leave(kept, version, {"version": version})
    kept.before(RUN, 4, coordinator.counts)
    assert coordinator.asked == [assignment(3), assignment(2)]


def test_a_state_of_an_earlier_release_counts(tmp_path: Path) -> None:
    kept = store(tmp_path)
    leave(kept, 0, {"rounds": 1})
    leave(kept, 1, {"rounds": 2})
    write_state(tmp_path / "site" / RUN / "1.safetensors", SiteState({"rounds": 2}), RUN, 1)
    assert before(kept, 2, 1).state == {"rounds": 2}


def test_small_states_stay_for_rollbacks_and_runs_are_apart(tmp_path: Path) -> None:
    kept = store(tmp_path)
    for version in range(20):
        leave(kept, version, {"version": version})
    assert versions(tmp_path) == list(range(4, 20))
    assert before(kept, 9, run=RunId("other")) == SiteState()


def test_of_large_states_two_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_state, "_OLDER_BYTES_MAX", 100)
    kept = store(tmp_path)
    for version in range(5):
        leave(kept, version, {"version": version})
    assert versions(tmp_path) == [3, 4]
    leave(kept, 6, {"version": 6}, 4)
    assert versions(tmp_path) == [3, 6], "the state with which the last training began"


def test_after_a_restored_backup_states_are_kept_again(tmp_path: Path) -> None:
    """States of later versions stayed, so each new state was removed at once until the old version came again."""
    kept = store(tmp_path)
    for version in (9, 10, 5, 6):
        leave(kept, version, {"version": version})
    assert before(kept, 7).state == {"version": 6}
    assert before(kept, 6).state == {"version": 5}


def test_after_a_restored_backup_a_site_goes_on_with_the_newest_state_that_it_has(tmp_path: Path) -> None:
    kept = store(tmp_path)
    for version in (9, 10):
        leave(kept, version, {"version": version})
    assert before(kept, 5).state == {"version": 10}
    leave(kept, 5, {"version": 5})
    assert before(kept, 5).state == {"version": 10}, "an attempt that is repeated begins as the first did"
    assert before(kept, 6).state == {"version": 5}


def test_what_was_emptied_stays_empty(tmp_path: Path) -> None:
    kept = store(tmp_path)
    leave(kept, 0, {"a": 1})
    kept.wait(RUN, 1, assignment(1), SiteState())
    kept.keep()
    assert not before(kept, 2)


def test_a_client_without_a_state_writes_nothing(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.wait(RUN, 0, assignment(0), SiteState())
    kept.keep()
    assert list(tmp_path.iterdir()) == []


def test_a_training_that_must_not_show_how_it_went_leaves_a_state_in_any_case(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.wait(RUN, 0, assignment(0), kept.as_it_began(), if_empty=True)
    kept.keep()
    assert versions(tmp_path) == [0]
    leave(kept, 1, {"rounds": 1})
    state = before(kept, 2).state
    state["rounds"] = "changed by a training that failed"
    kept.wait(RUN, 2, assignment(2), kept.as_it_began(), if_empty=True)
    kept.keep()
    assert before(kept, 3).state == {"rounds": 1}


def test_a_damaged_file_is_set_aside_and_the_older_one_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = store(tmp_path)
    leave(kept, 0, {"rounds": 1})
    leave(kept, 1, {"rounds": 2})
    damaged = tmp_path / "site" / RUN / "1.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-5])
    with caplog.at_level(logging.WARNING):
        assert before(kept, 2).state == {"rounds": 1}
    assert "1.damaged" in caplog.text
    assert damaged.with_suffix(".damaged").exists(), "nothing is lost"


def test_too_much_is_refused_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_state, "STATE_BYTES_MAX", 1000)
    with pytest.raises(StateTooLarge, match=r"take 4,0\d\d bytes.*at most 1,000 bytes"):
        store(tmp_path).wait(RUN, 0, assignment(0), SiteState({"big": torch.zeros(1000)}))


def test_what_cannot_be_stored_is_refused_by_its_type(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a set cannot be kept on disk"):
        store(tmp_path).wait(RUN, 0, assignment(0), SiteState({"seen": {1, 2}}))


def test_a_tensor_and_a_part_of_it_are_kept(tmp_path: Path) -> None:
    """safetensors refuses tensors with memory in common, with an error that ended the client."""
    whole, kept = torch.arange(6.0).reshape(3, 2), store(tmp_path)
    leave(kept, 0, {"whole": whole, "row": whole[1], "again": whole})
    found = before(kept, 1).state
    assert torch.equal(found["whole"], whole)
    assert torch.equal(found["row"], whole[1])
    assert found["again"] is found["whole"]


class Counting(Client):
    """Counts its rounds."""

    def __init__(self) -> None:
        self.model, self.sample_count = nn.Linear(2, 1), 5

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        plan.state["rounds"] = plan.state.get("rounds", 0) + 1
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        return TrainResult(5, 1, 1, {"rounds": plan.state["rounds"]})


class Crash(BaseException):
    """Stands for kill -9: nothing in the client may catch it."""


@pytest.mark.parametrize("when", ["before the report", "after the report"])
def test_a_kill_around_the_report_loses_no_state_whose_work_counts(tmp_path: Path, when: str) -> None:
    """After the restart the round is over, so nothing is sent again."""
    double, killed = Double(Counting().model, rounds=4), set[int]()

    def dying(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            if kind_of(request) != "PUT report" or double.round in killed:
                return handler(request)
            killed.add(double.round)
            if when == "after the report":
                handler(request)
            raise Crash

        return handle

    def live() -> RunEnd:
        transport = double.transport(dying)
        return run_client(
            Counting(), URL, tmp_path, "demo", None if double.keys else TOKEN, "ward-7", transport=transport
        )

    for _ in range(4):
        with pytest.raises(Crash):
            live()
    assert live().status == "finished"
    assert [report["metrics"]["rounds"] for report in double.reports.values()] == [1, 2, 3, 4]


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"before": found}
    return found


def test_values_in_too_many_others_are_refused(tmp_path: Path) -> None:
    kept, endless = store(tmp_path), dict[str, Any]()
    endless["me"] = endless
    for state in (nested(400), endless):
        with pytest.raises(ValueError, match="in more than 100 others"):
            leave(kept, 0, state)
    leave(kept, 0, nested(95))
    assert before(kept, 1).state == nested(95)


def test_a_file_of_values_in_too_many_others_is_set_aside(tmp_path: Path) -> None:
    kept = store(tmp_path)
    leave(kept, 0, {"rounds": 1})
    path = tmp_path / "site" / RUN / "0.safetensors"
    write_tensors(path, {}, {"umbel.run": RUN, "umbel.version": "0", "umbel.state": "[" * 100_000})
    assert not before(kept, 1)
    assert path.with_suffix(".damaged").exists()


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.zeros(2, device="meta")], ids=["sparse", "meta"])
def test_a_tensor_without_plain_memory_is_refused(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="make it dense"):
        leave(store(tmp_path), 0, {"tensor": tensor})


def test_a_state_may_be_changed_in_place_without_changing_what_is_stored(tmp_path: Path) -> None:
    kept = store(tmp_path)
    leave(kept, 0, {"moments": torch.zeros(3), "table": np.zeros(3)})
    taken = before(kept, 1).state
    taken["moments"] += 1
    taken["table"] += 1
    again = before(kept, 1).state
    assert torch.equal(again["moments"], torch.zeros(3))
    assert not again["table"].any()


SCALARS = (
    st.none() | st.booleans() | st.integers(-(1 << 60), 1 << 60) | st.floats(allow_nan=False) | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=4))
def test_nested_values_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> None:
    kept = store(tmp_path_factory.mktemp("state"))
    kept.wait(RUN, 0, assignment(0), SiteState(state, {"head": torch.ones(1)}))
    kept.keep()
    assert before(kept, 1).state == state


def test_arrays_keep_their_shapes_and_types(tmp_path: Path) -> None:
    kept = store(tmp_path)
    arrays: dict[str, Any] = {
        "a": np.arange(6, dtype=np.int32).reshape(2, 3),
        "b": np.float64(2.5),
        "c": np.zeros((0, 3)),
    }
    leave(kept, 0, arrays)
    found = before(kept, 1).state
    assert found["a"].dtype == np.int32
    assert np.array_equal(found["a"], arrays["a"])
    assert found["b"] == 2.5
    assert found["c"].shape == (0, 3)
