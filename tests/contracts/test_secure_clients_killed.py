"""kill -9 of clients at each step of secure rounds: their keys die with them, and nothing else does.

Four sites, a real process each, and a real coordinator; of four, three are enough. In each round one of them kills
itself, one step further on than the one before it, and is started again over the same state directory.
"""

import base64
import signal
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch

from tests.contracts.test_client_and_coordinator import Coordinator
from tests.federations.consortium import first_list, signed
from tests.federations.mortal_sites import IN_TRAINING, LATE_IN_TRAINING, NAMES, RUN, SAMPLES, MortalSite, fresh_model
from tests.servers.killing import start
from tests.servers.waits import LIMIT_S, wait_for_file
from umbel.aggregation.model.artifact import decode_model, encode_model
from umbel.aggregation.run.records import Fate, RoundRecord
from umbel.aggregation.secagg.messages import AdvertiseKeys
from umbel.aggregation.trust.members import members_bytes
from umbel.aggregation.types import RunId
from umbel.client import SitePolicy
from umbel.client.state.secure_store import RememberedSum
from umbel.client.state.store import Store
from umbel.server.settings import Settings

pytestmark = pytest.mark.slow
RUN_FILE = """
name = "{name}"
rounds = {{ count = {count}, target = 4, minimum = 3, over_selection = 1.0, window_s = 300 }}
codec = {{ name = "integer", step = 0.01, first_norm = 4.0 }}
secure_aggregation = {{ members_sha256 = "{members_sha256}", expected_sample_count = 4 }}
"""

UNSAID, SENT, SIGNED, REVEALED = "", "its update may be in it", "it knows whose it is", "it has revealed shares"
BEFORE_ITS_REPORT = {  # what a site dies of, a round each, and what it remembers of that round's sum then
    "before PUT advertise-keys": UNSAID,
    "after PUT advertise-keys": UNSAID,
    "before PUT share-keys": UNSAID,
    "after PUT share-keys": UNSAID,
    IN_TRAINING: UNSAID,
    "before POST update": SENT,  # the masked update is on disk
    "after POST update": SENT,
}
AFTER_ITS_REPORT = {
    "after PUT report": SENT,
    "before PUT consistency-check": SIGNED,
    "after PUT consistency-check": SIGNED,
    "before PUT unmasking": REVEALED,
    "after PUT unmasking": REVEALED,
}


@dataclass(frozen=True)
class Death:
    """One that has happened. `life`: the site's process that it was of; `remembers`: what stands on the site's disk of
    the sum of that round.
    """

    name: str
    round: int
    life: int
    step: str
    remembers: str


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    with running(tmp_path / "coordinator") as coordinator:
        yield coordinator


@contextmanager
def running(data: Path) -> Generator[Coordinator]:
    """A coordinator in a process of its own."""
    process = start(Settings(data=data, port=0))
    try:
        wait_for_file(data / "endpoint", process, data / "log")
        yield Coordinator((data / "endpoint").read_text().strip(), (data / "admin.key").read_text().strip())
    finally:
        process.terminate()
        process.join(LIMIT_S)


class Sites:
    """The sites of one run. `died`: of what, in the order of time."""

    def __init__(
        self, coordinator: Coordinator, folder: Path, n_rounds: int, deaths: Mapping[str, Mapping[int, str]]
    ) -> None:
        """`deaths`: by site, the step of a round that it does not outlive."""
        self.died: list[Death] = []
        self._coordinator = coordinator
        self._folder = folder
        self._keys = {name: self._store(folder / name / "state").identity(name).public_key for name in NAMES}
        members = signed(replace(first_list(), members=self._keys), "anna", "bert")
        (folder / "pilot.json").write_bytes(members_bytes(members))
        policy = SitePolicy("required", folder / "pilot.json", members.list.sha256, cohort_change="warn")
        text = RUN_FILE.format(name=RUN, count=n_rounds, members_sha256=members.list.sha256)
        with coordinator.operator() as operator:
            operator.create_run(RUN, text, operator.upload_model(encode_model(fresh_model().state_dict())))
            tokens = dict(zip(NAMES, operator.create_tokens(len(NAMES)), strict=True))
        self._sites = {
            name: MortalSite(name, coordinator.url, tokens[name], policy, folder / name, deaths.get(name, {}))
            for name in NAMES
        }
        self._lives = Counter[str]()

    def live(self, come_back: bool = True) -> None:
        """Until the run is finished. Who has died is looked at and, if they `come_back`, started again."""
        processes = {name: site.start(life=0, after_round=0) for name, site in self._sites.items()}
        try:
            while processes:
                ready = wait([process.sentinel for process in processes.values()], LIMIT_S)
                assert ready, "for long nobody has died or left"
                for name in [name for name, process in processes.items() if process.sentinel in ready]:
                    process, log = processes.pop(name), self._sites[name].log
                    process.join()
                    assert process.exitcode in (0, -signal.SIGKILL), log.read_text()[-3000:]
                    if process.exitcode and come_back:
                        processes[name] = self._live_again(self._sites[name])
        finally:
            for process in processes.values():
                process.kill()

    def _live_again(self, site: MortalSite) -> ForkServerProcess:
        life = self._lives[site.name]
        number = sorted(site.deaths)[life]
        self._check_disk(site)
        self.died.append(Death(site.name, number, life, site.deaths[number], self._remembered(site, number)))
        self._lives[site.name] += 1
        return site.start(life + 1, after_round=number)

    def _check_disk(self, site: MortalSite) -> None:
        """There is no secret, and nothing with which another process could go on where this one has ended."""
        written = [form for one in site.secrets() for form in (one, one.hex().encode(), base64.b64encode(one))]
        paths = {path.name: path for path in site.state.rglob("*") if path.is_file()}
        assert {"key.pem", "enrolment.json"} <= paths.keys()
        assert not {"report.json", "checkpoint.safetensors"} & paths.keys()
        for path in paths.values():
            data = path.read_bytes()
            assert not any(one in data for one in written), path

    def _remembered(self, site: MortalSite, number: int) -> str:
        of_round = [one for one in self._store(site.state).secure.sums(RunId(RUN)) if one.round == number]
        return _in_words(*of_round)

    def _store(self, state: Path) -> Store:
        return Store(state, self._coordinator.url)

    # --- what came of it ---

    def records(self) -> list[RoundRecord]:
        """Of all attempts."""
        with self._coordinator.operator() as operator:
            assert operator.run(RUN).status == "finished"
            return list(operator.progress(RUN).ended)

    def require_sums(self, sums: list[tuple[str, ...]]) -> None:
        """Each round has committed, and in its sum are these sites."""
        committed = [record for record in self.records() if record.committed]
        assert [record.round for record in committed] == [*range(1, len(sums) + 1)]
        for record, change, names in zip(committed, self._changes(), sums, strict=True):
            counted = tuple(one.client for one in record.clients if one.fate is Fate.ACCEPTED)
            n_samples = sum(SAMPLES[name] for name in names)
            assert (counted, record.sample_count) == (names, n_samples), f"round {record.round}: {record.reason}"
            expected = torch.tensor([SAMPLES[name] / n_samples if name in names else 0.0 for name in NAMES])
            assert torch.allclose(change, expected[:, None].expand_as(change), rtol=0.0, atol=0.01), record.round

    def models(self) -> list[str]:
        """The hash of each version."""
        with self._coordinator.operator() as operator:
            return [version.sha256 for version in operator.versions(RUN)]

    def _changes(self) -> list[torch.Tensor]:
        """By how much each round has changed the weights, a row for each site."""
        weights, path = list[torch.Tensor](), self._folder / "model.safetensors"
        with self._coordinator.operator() as operator:
            for sha256 in self.models():
                operator.download_model(sha256, path)
                weights.append(decode_model(path.read_bytes())[1]["weight"])
        return [after - before for before, after in pairwise(weights)]

    def require_new_lives(self) -> None:
        """No process has gone on with what another had begun: it has made other keys. Who it is has not changed."""
        for name, site in self._sites.items():
            lives, keys = defaultdict[str, set[int]](set), defaultdict[str, set[bytes]](set)
            for said in site.said():
                if said.assignment and said.what != "PUT decline":
                    lives[said.assignment].add(said.life)
                if said.what == "PUT advertise-keys":
                    advert = AdvertiseKeys.decode(bytes.fromhex(said.body))
                    keys[said.assignment] |= {advert.channel_key, advert.mask_key}
            assert all(len(one) == 1 for one in lives.values()), name
            assert len(set[bytes]().union(*keys.values())) == 2 * len(keys), name
            assert len(site.secrets()) >= 3 * len(keys), "what is looked for on disk"
            assert {one.life for one in site.said() if one.what == "POST enrolments"} == {0}
            assert self._store(site.state).identity(name).public_key == self._keys[name]
            assert not list(site.state.rglob("pending/*"))

    def said_again(self, death: Death) -> set[str]:
        """What the site's later processes have said of the attempt in which it died."""
        said, attempt = self._sites[death.name].said(), f"{RUN}.{death.round}.1.{death.name}"
        return {one.what for one in said if one.assignment == attempt and one.life > death.life}


def _in_words(*sums: RememberedSum) -> str:
    """What is remembered of one sum, or of none."""
    if not sums:
        return UNSAID
    (one,) = sums
    return REVEALED if one.is_revealed else SIGNED if one.clients else SENT


def in_turn(steps: Iterable[str]) -> dict[str, dict[int, str]]:
    """A death in each round, of each site in turn."""
    numbered = [*enumerate(steps, 1)]
    return {name: {n: step for n, step in numbered if NAMES[n % len(NAMES)] == name} for name in NAMES}


def without(*dead: str) -> tuple[str, ...]:
    return tuple(name for name in NAMES if name not in dead)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The models of a run in which nobody dies, as many as any of these has."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with running(folder / "coordinator") as coordinator:
        sites = Sites(coordinator, folder, len(AFTER_ITS_REPORT) + 1, {})
        sites.live()
        return sites.models()


def test_a_client_that_is_killed_before_its_report_is_not_in_the_sum_and_in_the_next_one_again(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    sites = Sites(coordinator, tmp_path, len(BEFORE_ITS_REPORT) + 1, in_turn(BEFORE_ITS_REPORT))
    sites.live()
    assert [(death.step, death.remembers) for death in sites.died] == [*BEFORE_ITS_REPORT.items()]
    sites.require_sums([*(without(death.name) for death in sites.died), NAMES])
    sites.require_new_lives()
    assert [sites.said_again(death) for death in sites.died] == [{"PUT decline"}] * len(sites.died)


@pytest.mark.nightly
def test_one_that_is_killed_after_its_report_was_accepted_is_in_the_sum(
    coordinator: Coordinator, tmp_path: Path, undisturbed: list[str]
) -> None:
    sites = Sites(coordinator, tmp_path, len(AFTER_ITS_REPORT) + 1, in_turn(AFTER_ITS_REPORT))
    sites.live()
    assert [(death.step, death.remembers) for death in sites.died] == [*AFTER_ITS_REPORT.items()]
    sites.require_sums([NAMES] * (len(AFTER_ITS_REPORT) + 1))
    assert sites.models() == undisturbed
    sites.require_new_lives()
    assert [sites.said_again(death) for death in sites.died] == [set()] * len(sites.died)


def test_where_too_few_are_left_alive_the_next_attempt_has_everyone_with_new_keys(
    coordinator: Coordinator, tmp_path: Path, undisturbed: list[str]
) -> None:
    sites = Sites(coordinator, tmp_path, 2, {"north": {1: "after PUT share-keys"}, "west": {1: "before POST update"}})
    sites.live()
    first, *_ = sites.records()
    assert (first.round, first.attempt, first.committed) == (1, 1, False)
    assert {death.name for death in sites.died} == {"north", "west"}
    sites.require_sums([NAMES, NAMES])
    assert sites.models() == undisturbed[:3]
    sites.require_new_lives()
    assert [sites.said_again(death) for death in sites.died] == [{"PUT decline"}] * 2


def test_one_that_is_killed_before_it_has_begun_takes_part_all_the_same(
    coordinator: Coordinator, tmp_path: Path, undisturbed: list[str]
) -> None:
    """It was asked, and has made no keys yet."""
    sites = Sites(coordinator, tmp_path, 1, {"south": {1: "after POST check-ins"}})
    sites.live()
    (death,) = sites.died
    assert "PUT unmasking" in sites.said_again(death)
    sites.require_sums([NAMES])
    assert sites.models() == undisturbed[:2]
    sites.require_new_lives()


@pytest.mark.nightly
def test_a_round_does_not_wait_for_one_that_is_killed_and_stays_away(coordinator: Coordinator, tmp_path: Path) -> None:
    """The others are in at once, and the window is of 300 s: the bound of silence is 5 s then."""
    sites = Sites(coordinator, tmp_path, 1, {"north": {1: LATE_IN_TRAINING}})
    sites.live(come_back=False)
    sites.require_sums([without("north")])
    (record,) = sites.records()
    (lost,) = [one for one in record.clients if one.fate is Fate.LOST]
    assert lost.client == "north"
    assert record.reason == "3 reports are in, and north fell silent"
