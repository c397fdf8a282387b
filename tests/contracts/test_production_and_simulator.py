"""The same run file with the same clients makes the same models over HTTP and in the simulator, bit for bit.

A coordinator process and eight clients with the loop of the SDK; the simulator with the same clients, named in an
experiment's file; and the simulator with training of its own. The same cohorts are drawn, the same reports count, and
every version has the same SHA-256.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contracts.house import House
from tests.contracts.own_clients import (
    HERE,
    make_adapted_client,
    make_array_client,
    make_measuring_client,
    make_own_loop,
    make_remembering_client,
    make_torch_client,
)
from tests.contracts.scripted_federation import (
    MINIMUM_WORK,
    SIZES,
    Death,
    Made,
    MakeClient,
    Return,
    Role,
    Script,
    listed,
    over_http,
    refusals_of,
    simulated_by_clients,
    simulated_by_engine,
)
from tests.suite.nights import at_night
from umbel.aggregation.model.base import base_sha256
from umbel.client import SitePolicy
from umbel.client.cli.audit import replay_run
from umbel.client.training.shared_state import SharedState

pytestmark = pytest.mark.slow
RUN = """
name = "{name}"
seed = 5
rounds = {{ count = 4, target = {target}, minimum = 3, over_selection = {over_selection}, window_s = 300 }}
training = {{ local_epochs = 2, batch_size = 4, learning_rate = 0.1, proximal_mu = 0.05 }}
"""
STRAGGLER, UNNEEDED, UNFIT = Role(steps=2), Role(is_unneeded=True), Role(has_nan=True)
PLAIN: Script = {  # six are asked, and four reports close a round
    (1, 1): {0: Role(3, Death.IN_TRAINING, Return.IN_THE_NEXT), 3: STRAGGLER, 5: UNNEEDED},
    (2, 1): {1: Role(None, Death.AT_ITS_UPLOAD, Return.NEVER), 2: UNNEEDED, 4: STRAGGLER},
    (3, 1): dict.fromkeys(range(4), UNFIT),  # two reports are too few: the round is tried again with others
    (3, 2): {0: Role(2, Death.IN_TRAINING, Return.IN_THIS_ROUND), 1: UNNEEDED, 2: UNNEEDED, 5: STRAGGLER},
    (4, 1): {2: Role(None, Death.AT_ITS_UPLOAD, Return.IN_THIS_ROUND), 3: STRAGGLER, 4: UNNEEDED, 5: UNNEEDED},
}
LEFT_OUT: Script = {  # the third round is made without the two clients whose reports the first attempt had accepted
    **PLAIN,
    (3, 2): {0: Role(2, Death.IN_TRAINING, Return.IN_THIS_ROUND), 1: STRAGGLER, 4: UNNEEDED, 5: UNNEEDED},
    (4, 1): {0: UNNEEDED, 1: UNNEEDED, 2: Role(None, Death.AT_ITS_UPLOAD, Return.IN_THIS_ROUND), 3: STRAGGLER},
}
CODECS = {
    "float32": 'codec = { name = "float32" }',
    "integer": 'codec = { name = "integer" }\ndownlink = { name = "change" }',
    "auto": 'codec = { name = "auto" }',
    "lowrank": 'codec = { name = "lowrank", rank = 2 }',
    "topk": 'codec = { name = "topk", share = 0.2, error_feedback = true }',
}
BY_DAY = ("integer",)
FED_BN = '\n[tensors]\nprivate = ["1.*"]\n'
FROZEN = '\n[tensors]\nglobal = ["0.*"]\n'
PART: Script = {(1, 1): {3: STRAGGLER}, (2, 1): {4: STRAGGLER}, (3, 1): {}, (4, 1): {0: STRAGGLER}}


MASKED: Script = {  # of six, five are the fewest; keys are in memory alone, so who dies is out of the round
    (1, 1): {0: Role(None, Death.AT_ITS_UPLOAD, Return.IN_THE_NEXT), 3: STRAGGLER},
    (2, 1): {1: Role(None, Death.AT_ITS_UPLOAD, Return.NEVER), 4: STRAGGLER},
    (3, 1): {2: UNNEEDED, 5: STRAGGLER},
    (4, 1): {0: STRAGGLER, 5: Role(None, Death.AT_ITS_UPLOAD, Return.NEVER)},
}
UNDER_MASKS = """
codec = {{ name = "integer", first_norm = 1.0 }}
secure_aggregation = {{ expected_sample_count = 10, minimum_work = {minimum_work}, members_sha256 = "{members}" }}
"""


def without_metrics(made: Sequence[Made]) -> list[Made]:
    return [one.without_metrics for one in made]


@pytest.mark.parametrize(
    "codec", [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in CODECS]
)
def test_a_plain_run_makes_the_same_models_over_http_and_in_the_simulator(
    codec: str, house: House, tmp_path: Path
) -> None:
    script = LEFT_OUT if codec == "topk" else PLAIN  # whose residuals are kept
    run_file = RUN.format(name=f"plain-{codec}", target=4, over_selection=1.5) + CODECS[codec]
    found = simulated_by_clients(run_file, script, f"{HERE}:make_torch_client", "sequential")
    with house.operator() as operator:
        assert over_http(operator, house.url, run_file, tmp_path, found.roles, make_torch_client) == found.made
    by_engine = simulated_by_engine(run_file, script)
    assert without_metrics(by_engine.made) == without_metrics(found.made)


@pytest.mark.parametrize("make", [make_own_loop, *at_night(make_array_client, make_measuring_client)])
def test_clients_with_code_of_their_own_make_the_same_models_over_http_and_in_an_experiment(
    make: MakeClient, house: House, tmp_path: Path
) -> None:
    """Their metrics and their evaluations before the training are the same too, and so are both engines."""
    name = make.__name__.removeprefix("make_").replace("_", "-")
    run_file = RUN.format(name=name, target=4, over_selection=1.5) + CODECS["integer"]
    run_file = run_file.replace("proximal_mu = 0.05", "proximal_mu = 0.05, evaluate = true")
    found = simulated_by_clients(run_file, PLAIN, f"{HERE}:{make.__name__}", "sequential")
    assert found.made[-1].metrics.keys() == {"loss", "last"}
    assert bool(found.made[-1].evaluation) == (make is make_measuring_client)
    with house.operator() as operator:
        assert over_http(operator, house.url, run_file, tmp_path, found.roles, make) == found.made
    assert simulated_by_clients(run_file, PLAIN, f"{HERE}:{make.__name__}", "processes").made == found.made


@pytest.mark.parametrize(
    ("kinds", "more"),
    [(FED_BN, ""), *at_night((FROZEN, CODECS["integer"]))],
    ids=["FedBN", "a frozen layer and changes"],
)
def test_a_run_of_which_a_part_travels_makes_the_same_models_over_http_and_in_the_simulator(
    kinds: str, more: str, house: House, tmp_path: Path
) -> None:
    run_file = RUN.format(name="part", target=6, over_selection=1.0) + more + kinds
    found = simulated_by_clients(run_file, PART, f"{HERE}:make_torch_client", "sequential")
    with house.operator() as operator:
        assert over_http(operator, house.url, run_file, tmp_path, found.roles, make_torch_client) == found.made
    if kinds == FROZEN:
        assert without_metrics(simulated_by_engine(run_file, PART).made) == without_metrics(found.made)


@pytest.mark.nightly
def test_a_site_whose_policy_refuses_declines_the_same_over_http_and_in_an_experiment(
    house: House, tmp_path: Path
) -> None:
    policies = {2: SitePolicy(max_parameters=10), 5: SitePolicy(epsilon=8.0), 6: SitePolicy(max_parameters=10_000)}
    run_file = RUN.format(name="refusing", target=8, over_selection=1.0).replace("count = 4", "count = 2")
    found = simulated_by_clients(run_file, {}, f"{HERE}:make_torch_client", "sequential", policies)
    assert [sorted(one) for one in found.refusals] == [["client-0000002", "client-0000005"]] * 2
    with house.operator() as operator:
        made = over_http(operator, house.url, run_file, tmp_path, found.roles, make_torch_client, policies=policies)
        assert made == found.made
        assert [refusals_of(record) for record in operator.progress("refusing").ended] == found.refusals


def over_http_simulated_and_replayed(
    run_file: str, name: str, house: House, tmp_path: Path, script: Script = PLAIN
) -> None:
    """Assert that this run makes the same models everywhere; its replay prints a line for each."""
    found = simulated_by_clients(run_file, script, f"{HERE}:make_torch_client", "sequential")
    assert without_metrics(simulated_by_engine(run_file, script).made) == without_metrics(found.made)
    with house.operator() as operator:
        assert over_http(operator, house.url, run_file, tmp_path, found.roles, make_torch_client) == found.made
        replay_run(operator, name, all_=True)


KEEPS_UPDATES = '\n[retention]\nupdates = "all"\n'
SERVER_OPTIMIZERS = {
    "momentum": 'optimizer = "momentum"',
    "adam": 'optimizer = "adam"\nschedule = { name = "cosine", warm_up_rounds = 2, per_clients = 5 }',
    "lamb": 'optimizer = "lamb"\ntau = 0.1',
}


@pytest.mark.parametrize("name", ["momentum", *at_night("adam", "lamb")])
def test_a_server_optimizer_makes_the_same_models_over_http_in_the_simulator_and_in_a_replay(
    name: str, house: House, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = CODECS["integer"] if name == "adam" else CODECS["float32"]
    more = f"\n[aggregation]\n{SERVER_OPTIMIZERS[name]}{KEEPS_UPDATES}"
    run_file = RUN.format(name=f"server-{name}", target=4, over_selection=1.5) + changes + more
    over_http_simulated_and_replayed(run_file, f"server-{name}", house, tmp_path)
    assert capsys.readouterr().out.count("the same hash") == 4


def with_algorithm(run_file: str, name: str) -> str:
    keys = {
        "fednova": 'algorithm = "fednova"',
        "feddyn": 'proximal_mu = 0.5, algorithm = "feddyn", total_samples = 87',
        "scaffold": 'algorithm = "scaffold", total_samples = 87',
        "scaffold-gradient": 'algorithm = "scaffold", total_samples = 87, control_variate = "gradient"',
        "adaptive": 'proximal_mu = 0.0, algorithm = "fedprox", adaptive_mu = true, mu_step = 0.25',
        "qfedavg": 'algorithm = "qfedavg", q = 1.5, loss_max = 5.0',
    }
    return run_file.replace("proximal_mu = 0.05", keys[name])


@pytest.mark.parametrize("name", ["scaffold", *at_night("feddyn", "scaffold-gradient")])
def test_what_clients_keep_makes_the_same_models_over_http_in_the_simulator_and_in_a_replay(
    name: str, house: House, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where clients die, come back with what they have kept, or take part in an attempt that is made again, with
    them or without them.
    """
    run_file = RUN.format(name=name, target=4, over_selection=1.5) + CODECS["integer"] + KEEPS_UPDATES
    run_file = with_algorithm(run_file, name)
    over_http_simulated_and_replayed(run_file, name, house, tmp_path, LEFT_OUT)
    assert capsys.readouterr().out.count("the same hash") == 4


@pytest.mark.nightly
def test_fednova_makes_the_same_models_over_http_in_the_simulator_and_in_a_replay(
    house: House, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Clients differ in their steps, and some do only a part of them."""
    more = CODECS["integer"] + '\n[aggregation]\noptimizer = "momentum"' + KEEPS_UPDATES
    run_file = with_algorithm(RUN.format(name="nova", target=4, over_selection=1.5) + more, "fednova")
    over_http_simulated_and_replayed(run_file, "nova", house, tmp_path)
    assert capsys.readouterr().out.count("the same hash") == 4


@pytest.mark.nightly
def test_a_mu_that_adapts_makes_the_same_models_over_http_in_the_simulator_and_in_a_replay(
    house: House, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss rises twice, and between the rises an attempt is made again."""
    run_file = RUN.format(name="prox", target=4, over_selection=1.5) + CODECS["float32"] + KEEPS_UPDATES
    run_file = with_algorithm(run_file, "adaptive").replace("learning_rate = 0.1", "learning_rate = 0.3")
    over_http_simulated_and_replayed(run_file, "prox", house, tmp_path)
    assert capsys.readouterr().out.count("the same hash") == 4
    with house.operator() as operator:
        ended = operator.progress("prox").ended
    losses = [one.metrics["loss"] for one in ended if one.committed]
    assert losses[0] < losses[1] < losses[2]
    assert [(one.round, one.attempt, one.proximal_mu) for one in ended] == [
        (1, 1, 0.0),
        (2, 1, 0.0),
        (3, 1, 0.25),
        (3, 2, 0.25),
        (4, 1, 0.5),
    ]


@pytest.mark.nightly
def test_qfedavg_makes_the_same_models_over_http_in_the_simulator_and_in_a_replay(
    house: House, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step of each round follows from what clients say of their losses and norms, which the replay reads in their
    signed reports.
    """
    run_file = with_algorithm(RUN.format(name="fair", target=4, over_selection=1.5) + KEEPS_UPDATES, "qfedavg")
    over_http_simulated_and_replayed(run_file, "fair", house, tmp_path)
    assert capsys.readouterr().out.count("the same hash") == 4


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["fednova", "adaptive", *at_night("feddyn")])
def test_an_algorithm_under_masks_makes_the_same_models_over_http_and_in_the_simulator(
    name: str, house: House, tmp_path: Path
) -> None:
    policy = listed(house.url, tmp_path)
    masked = UNDER_MASKS.format(minimum_work=MINIMUM_WORK, members=policy.members_sha256)
    run_file = with_algorithm(RUN.format(name=f"masked-{name}", target=5, over_selection=1.2) + masked, name)
    found = simulated_by_clients(run_file, MASKED, f"{HERE}:make_torch_client", "sequential")
    by_engine = simulated_by_engine(run_file, MASKED)
    assert without_metrics(by_engine.made) == without_metrics(found.made)
    with house.operator() as operator:
        assert over_http(operator, house.url, run_file, tmp_path, found.roles, make_torch_client, policy) == found.made


EVERYTHING = """
[training]
local_epochs = 2
batch_size = 4
learning_rate = 0.02
proximal_mu = 0.05
optimizer = "adamw"
weight_decay = 0.01
clip_norm = 0.5
options = { smoothing = 0.2 }
schedule = { name = "cosine", warm_up_rounds = 1 }
"""


@pytest.mark.nightly
def test_a_client_that_remembers_makes_the_same_models_over_http_and_in_an_experiment(
    house: House, tmp_path: Path
) -> None:
    """Also where clients die, come back, or take part in an attempt that is made again. Both engines agree."""
    plain = RUN.format(name="remembering", target=4, over_selection=1.5)
    run_file = plain[: plain.index("training =")] + CODECS["integer"] + EVERYTHING
    app = f"{HERE}:make_remembering_client"
    found = simulated_by_clients(run_file, LEFT_OUT, app, "sequential")
    assert found.made[-1].metrics["rounds"] > 1
    with house.operator() as operator:
        assert over_http(operator, house.url, run_file, tmp_path, found.roles, make_remembering_client) == found.made
    assert simulated_by_clients(run_file, LEFT_OUT, app, "processes").made == found.made


@pytest.mark.nightly
def test_adapters_make_the_same_models_over_http_and_in_an_experiment(house: House, tmp_path: Path) -> None:
    base = base_sha256(SharedState(make_adapted_client(0, 1)).base())
    run_file = f'base_sha256 = "{base}"' + RUN.format(name="adapters", target=6, over_selection=1.0)
    found = simulated_by_clients(run_file, PART, f"{HERE}:make_adapted_client", "sequential")
    with house.operator() as operator:
        assert over_http(operator, house.url, run_file, tmp_path, found.roles, make_adapted_client) == found.made


@pytest.mark.nightly
def test_policies_limit_what_is_masked_the_same_over_http_and_in_an_experiment(house: House, tmp_path: Path) -> None:
    """A site that counts as few samples, and one that shares no metrics."""
    policy = listed(house.url, tmp_path)
    policies = dict.fromkeys(range(len(SIZES)), policy)
    policies |= {1: replace(policy, weight_max=3), 4: replace(policy, weight_max=2, share_metrics=False)}
    masked = UNDER_MASKS.format(minimum_work=MINIMUM_WORK, members=policy.members_sha256)
    run_file = RUN.format(name="limited", target=5, over_selection=1.2) + masked
    app = f"{HERE}:make_torch_client"
    found = simulated_by_clients(run_file, MASKED, app, "sequential", policies)
    assert found.made != simulated_by_clients(run_file, MASKED, app, "sequential").made
    with house.operator() as operator:
        made = over_http(operator, house.url, run_file, tmp_path, found.roles, make_torch_client, policies=policies)
    assert made == found.made


def test_a_run_under_masks_makes_the_same_models_over_http_and_in_the_simulator(house: House, tmp_path: Path) -> None:
    """Sites are given the seeds of their training here, which they would draw themselves."""
    policy = listed(house.url, tmp_path)
    masked = UNDER_MASKS.format(minimum_work=MINIMUM_WORK, members=policy.members_sha256)
    run_file = RUN.format(name="masked", target=5, over_selection=1.2) + masked
    found = simulated_by_clients(run_file, MASKED, f"{HERE}:make_torch_client", "sequential")
    with house.operator() as operator:
        assert over_http(operator, house.url, run_file, tmp_path, found.roles, make_torch_client, policy) == found.made
    by_engine = simulated_by_engine(run_file, MASKED)
    assert without_metrics(by_engine.made) == without_metrics(found.made)


@pytest.mark.nightly
def test_the_last_model_of_a_run_under_masks_is_measured_the_same_over_http_and_in_the_simulator(
    house: House, tmp_path: Path
) -> None:
    """Its metrics are those of all sites together, as the rounds before it have them of the models before."""
    policy = listed(house.url, tmp_path)
    masked = UNDER_MASKS.format(minimum_work=MINIMUM_WORK, members=policy.members_sha256)
    run_file = RUN.format(name="measured", target=len(SIZES), over_selection=1.0) + masked
    run_file = run_file.replace("minimum = 3", f"minimum = {len(SIZES)}")
    run_file = run_file.replace("minimum_work =", 'evaluation = ["loss", "recall"], minimum_work =')
    run_file = run_file.replace("proximal_mu = 0.05", "evaluate = true").replace("count = 4", "count = 2")
    app = f"{HERE}:make_measuring_client"
    found = simulated_by_clients(run_file, {}, app, "sequential")
    *_, trained, measured = found.made
    assert (trained.attempt, measured.attempt, measured.metrics) == ((2, 1), (2, 1), {})
    assert measured.evaluation.keys() == {"loss", "recall"}, "also where a site has nothing to measure"
    assert measured.evaluation["loss"] != trained.evaluation["loss"]
    with house.operator() as operator:
        made = over_http(operator, house.url, run_file, tmp_path, found.roles, make_measuring_client, policy)
        last = operator.versions("measured")[-1]
    assert made == found.made
    assert (last.version, last.evaluation) == (2, measured.evaluation)
