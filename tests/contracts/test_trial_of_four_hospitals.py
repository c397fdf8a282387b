"""The trial of four hospitals: an agent at each site, an own client, and masked runs that need nobody at a site.

Two runs come one after the other and two at the same time, all from the same first model. In two of them one site is
killed for good, and another one is killed and comes back.
"""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.contracts.house import House
from tests.contracts.test_agent import SiteAgent, agent_of, wait_for_status
from tests.federations.consortium import first_list, signed
from tests.federations.trial_hospital import SITES, model_of_all, records_of
from tests.servers.waits import wait_for_file, wait_until
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.model.artifact import decode_model, encode_model
from umbel.aggregation.plans.round import Task
from umbel.aggregation.round.silence import cut_s
from umbel.aggregation.run.records import RoundRecord
from umbel.aggregation.trust.members import SignedMembers, members_bytes
from umbel.client.state.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1800)]
WITHIN = 1e-6
WINDOW_S = 600.0
RUN = """
name = "{name}"
rounds = {{ count = {count}, target = 4, minimum = 3, over_selection = 1.0, window_s = 600 }}
[training]
evaluate = true
optimizer = "adamw"
learning_rate = 0.05
batch_size = 8
[secure_aggregation]
metrics = ["loss"]
evaluation = ["accuracy", "sensitivity"]
members_sha256 = "{members_sha256}"
"""
POLICY = """
allowed_runs = ["heart-*"]
secure_aggregation = "required"
members = "pilot.json"
members_sha256 = "{members_sha256}"
cohort_change = "warn"
"""
LAST, BACK = "genf", "basel"  # the site that is killed for good in round 3, and the one that comes back in round 4
STAYED = tuple(site for site in SITES if site != LAST)


@pytest.fixture
def members(house: House, tmp_path: Path) -> SignedMembers:
    """The member list, which two officers have signed."""
    keys = {name: Store(tmp_path / f"state-{name}", house.url).identity(name).public_key for name in SITES}
    return signed(replace(first_list(), members=keys), "anna", "bert")


@pytest.fixture
def sites(house: House, members: SignedMembers, tmp_path: Path) -> Iterator[Mapping[str, SiteAgent]]:
    """Four agents that are at work. From here on no test touches a site, except to kill it and to start it again."""
    (tmp_path / "pilot.json").write_bytes(members_bytes(members))
    policy = tmp_path / "site.toml"
    policy.write_text(POLICY.format(members_sha256=members.list.sha256))
    arguments = ("--app", "heart-*=tests.federations.trial_hospital:Hospital", "--policy", str(policy))
    with ExitStack() as stack:
        agents = {name: stack.enter_context(agent_of(house, tmp_path, *arguments, name=name)) for name in SITES}
        with house.operator() as operator:
            wait_until("four enrolled sites", lambda: len(operator.clients()) == len(SITES))
        yield agents


def create(house: House, members: SignedMembers, name: str, count: int) -> None:
    text = RUN.format(name=name, count=count, members_sha256=members.list.sha256)
    with house.operator() as operator:
        model = operator.upload_model(encode_model(model_of_all().state_dict()))
        operator.create_run(name, text, model, same_first_model=True)


def records_of_run(house: House, name: str) -> list[RoundRecord]:
    with house.operator() as operator:
        return [record for page in operator.ended(name) for record in page.ended if record.committed]


def reporters(record: RoundRecord) -> tuple[str, ...]:
    return tuple(sorted(one.client for one in record.clients if one.report_s is not None))


def pooled(model: nn.Module, names: Sequence[str]) -> dict[str, float]:
    """What this model is worth on the held-out patients of these sites together."""
    values, ill = (torch.cat(parts) for parts in zip(*(records_of(one, held_out=True) for one in names), strict=True))
    with torch.no_grad():
        is_found = (model(values) > 0).double()
    sensitivity = float((is_found * ill).sum() / ill.double().sum())
    return {"accuracy": float((is_found == ill).double().mean()), "sensitivity": sensitivity}


def require_measured(house: House, folder: Path, name: str, records: Sequence[RoundRecord]) -> None:
    """Every version, the last one included, has the metrics of the patients of all sites that measured it."""
    measured = [*[record for record in records if record.task is Task.TRAINING][1:], records[-1]]
    assert records[-1].task is Task.EVALUATION
    with house.operator() as operator:
        versions = operator.versions(name)
        for version in versions:
            operator.download_model(version.sha256, folder / "version.safetensors")
            model = model_of_all()
            model.load_state_dict(decode_model((folder / "version.safetensors").read_bytes())[1])
            number = version.version
            by = reporters(records[0] if number == 0 else measured[number - 1])
            assert version.evaluation == pytest.approx(pooled(model, by), abs=WITHIN, rel=0), (name, number, by)


def kill(site: SiteAgent, processes: Sequence[int]) -> None:
    """As if the machine had lost its power: the agent, and the processes of its runs."""
    assert site.process is not None
    for process in (site.process.pid, *processes):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    site.process.wait()


def hold(folder: Path, *pairs: tuple[str, int]) -> list[Path]:
    """From now on these sites train in these rounds until the files are gone."""
    files = [folder / f"hold-{site}-{number}" for site, number in pairs]
    for file in files:
        file.touch()
    return files


def trains(folder: Path, site: SiteAgent, run: str, number: int) -> int:
    """Wait until the site trains in this round; the process that does."""
    path = wait_for_file(folder / f"{site.name}-{run}-{number}", site.process, site.log)
    return int(wait_until("the number of its process", path.read_text))


def watches(house: House, site: str, run: str) -> bool:
    """Whether the site holds a request open while it trains."""
    with house.operator() as operator:
        live = operator.progress(run).live
    return live is not None and any(one.client == site and one.silent_s == 0.0 for one in live.clients)


def test_two_runs_one_after_the_other_and_two_at_once_through_two_deaths(
    house: House, members: SignedMembers, sites: Mapping[str, SiteAgent], tmp_path: Path
) -> None:
    for name in ("heart-1", "heart-2"):
        create(house, members, name, count=2)
        wait_for_status(house, name, RunStatus.FINISHED)
        records = records_of_run(house, name)
        assert [reporters(record) for record in records] == [SITES] * 3
        require_measured(house, tmp_path, name, records)

    runs = ("heart-3", "heart-4")
    held, back = hold(tmp_path, (LAST, 3)), hold(tmp_path, (BACK, 4))
    for name in runs:
        create(house, members, name, count=5)
    dying = [trains(tmp_path, sites[LAST], name, 3) for name in runs]
    for name in runs:
        wait_until(f"a held request in {name}", partial(watches, house, LAST, name))
    kill(sites[LAST], dying)
    for file in held:
        file.unlink()

    away = [trains(tmp_path, sites[BACK], name, 4) for name in runs]
    kill(sites[BACK], away)
    for file in back:
        file.unlink()
    sites[BACK].start()

    for name in runs:
        wait_for_status(house, name, RunStatus.FINISHED)
        records = records_of_run(house, name)
        by_round = {record.round: record for record in records if record.task is Task.TRAINING}
        assert [reporters(by_round[number]) for number in range(1, 6)] == [SITES, SITES, STAYED, STAYED, STAYED]
        assert by_round[3].reason == f"3 reports are in, and {LAST} fell silent"
        require_measured(house, tmp_path, name, records)
        others_s = max(one.report_s for one in by_round[3].clients if one.report_s is not None)
        print(f"{name}: round 3 was over {by_round[3].open_s - others_s:.1f} s after the others' reports")
        assert by_round[3].open_s < WINDOW_S / 2
    assert cut_s(WINDOW_S) == 10.0
