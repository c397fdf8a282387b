"""kill -9 at every step that only secure rounds have, and at what they have in common with others where they do it
differently: clients say what they had said again, and the same model is made."""

import asyncio
from pathlib import Path

import pytest

from tests.federations.secure_federation import CheatedFederation, SecureFederation
from tests.server.runs.test_kill_matrix import fare
from tests.servers.killing import COMMANDS, PHASE_STEPS, Death
from tests.servers.ports import own_port
from tests.servers.postgres import Cluster
from umbel.server.settings import Settings

pytestmark = pytest.mark.slow
STEPS = {  # and which times it is done: four say a thing in each phase of the first round
    "check a message": (2, 6, 10),
    "carry out Announce": (1, 2, 3, 4),
    "check a masked update": (2,),
    "carry out Fold": (2,),
    "write a masked sum": (1, 2),
    "hand in a masked sum": (1,),
    "forget masked updates": (1,),
    "take revealed shares": (1, 2),
    "carry out Commit": (1,),
    "make the secrets": (1,),
    "unmask": (1,),
    "make the model": (1,),
    "keep a file of the model": (2,),
    "store the end of an attempt": (1,),
    "remove the updates of an attempt": (1,),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    settings = Settings(data=tmp_path_factory.mktemp("undisturbed"), port=own_port())
    return asyncio.run(fare(settings, (), SecureFederation)).model_sha256


@pytest.fixture
def settings(request: pytest.FixtureRequest, database: str, tmp_path: Path) -> Settings:
    url = None
    if database == "postgresql":
        cluster: Cluster = request.getfixturevalue("postgresql")
        url = cluster.new_database()
    return Settings(data=tmp_path, port=own_port(), database_url=url)


def test_every_step_of_secure_rounds_is_tried() -> None:
    assert set(STEPS) >= BY_DAY
    assert set(PHASE_STEPS) <= set(STEPS)
    assert "Announce" in {command.__name__ for command in COMMANDS}


DATABASES = ("sqlite", "postgresql")  # in turn


def deaths_of(step: str, nth: int) -> tuple[Death, ...]:
    """What each process in turn dies of: the first time before the step, and once it has come back, after it; what is
    done again, before and after in turn.
    """
    if nth == STEPS[step][0]:
        return Death(step, True, nth), Death(step, False)
    return (Death(step, nth % 4 == 2, nth),)


BY_DAY = {
    "carry out Fold",
    "write a masked sum",
    "hand in a masked sum",
    "take revealed shares",
    "carry out Commit",
    "make the secrets",
    "store the end of an attempt",
}
AT_NIGHT = pytest.mark.nightly  # the other steps, and these when they are done again
TIMES = [(step, nth) for step, times in STEPS.items() for nth in times]


@pytest.mark.parametrize(
    ("step", "nth", "database"),
    [
        pytest.param(
            step,
            nth,
            DATABASES[i % 2],
            id=f"{step}-{nth}-{DATABASES[i % 2]}",
            marks=[AT_NIGHT] * (step not in BY_DAY or nth != STEPS[step][0]),
        )
        for i, (step, nth) in enumerate(TIMES)
    ],
)
def test_killed_at_a_step_it_goes_on_to_the_same_model(
    step: str, nth: int, settings: Settings, undisturbed: str
) -> None:
    deaths = deaths_of(step, nth)
    outcome = asyncio.run(fare(settings, deaths, SecureFederation))
    assert outcome.n_deaths == len(deaths), "the step was not done"
    assert outcome.model_sha256 == undisturbed


@pytest.fixture(scope="module")
def cheated(tmp_path_factory: pytest.TempPathFactory) -> str:
    settings = Settings(data=tmp_path_factory.mktemp("cheated"), port=own_port())
    return asyncio.run(fare(settings, (), CheatedFederation)).model_sha256


CHEATED = [  # the first attempt is the one that is spoiled
    (Death("make the secrets", True),),
    (Death("decide how it was abandoned", True), Death("decide how it was abandoned", False)),
    (Death("store the end of an attempt", True), Death("store the end of an attempt", False)),
    (Death("carry out Discard", True),),
    (Death("remove the updates of an attempt", True),),
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("deaths", "database"),
    [
        pytest.param(deaths, DATABASES[i % 2], id=deaths[0].step, marks=[AT_NIGHT] * (i != 2))
        for i, deaths in enumerate(CHEATED)
    ],
)
def test_killed_while_a_false_dealer_is_found_out_it_names_it_all_the_same(
    deaths: tuple[Death, ...], settings: Settings, cheated: str
) -> None:
    outcome = asyncio.run(fare(settings, deaths, CheatedFederation))
    assert outcome.n_deaths == len(deaths), "the step was not done"
    assert outcome.model_sha256 == cheated
