"""Simulated sites decline what their policies do not allow, in the words of production and from the same round on."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.sim.engines.clients.sites import net
from tests.sim.experiment.test_own_clients import table
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.masks import NoisePlan
from umbel.aggregation.privacy.accounting import Ledger
from umbel.aggregation.privacy.section import release_of
from umbel.aggregation.run.records import Fate
from umbel.aggregation.run.standing import beginning
from umbel.aggregation.secagg.parameters import parameters_for
from umbel.aggregation.types import ClientId, RunId
from umbel.client.errors import AttemptRefused, WorkRefused
from umbel.client.policy.policy import SecureTerms, SitePolicy, read_policy
from umbel.client.policy.two_sums import check_cohort_change
from umbel.sim import simulate
from umbel.sim.experiment.checkpoint import CheckpointError
from umbel.sim.experiment.file import TrialSpec, experiment_of
from umbel.sim.experiment.trials import Watcher
from umbel.sim.experiment.world import make_world
from umbel.sim.federation.federation import Federation, SimulatedAttempt
from umbel.sim.federation.rows import Row

N_SITES, N_VALUES = 4, Layout.of_state(net().state_dict()).n_values
LISTED = 'members = "pilot.json"\n'  # whose keys are not checked
ROUNDS = {"count": 2, "target": N_SITES, "minimum": N_SITES, "over_selection": 1.0, "attempts_max": 2}
MASKED: dict[str, Any] = {"codec": {"name": "integer"}, "secure_aggregation": {}}
PRIVATE: dict[str, Any] = {**MASKED, "privacy": {"noise_multiplier": 2.0, "clip_norm": 1.0}}
ENOUGH: dict[str, Any] = {"secure_aggregation": {"minimum_work": 0.05}, "codec": {"name": "integer"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def with_policies(folder: Path, *texts: str, count: int = N_SITES, **changes: Any) -> dict[str, Any]:
    """An experiment of real clients with the policies of these texts; "" is a site without one."""
    names = [f"site-{number}.toml" if text else "" for number, text in enumerate(texts)]
    for name, text in zip(names, texts, strict=True):
        if name:
            (folder / name).write_text(text)
    policy = str(folder / names[0]) if len(texts) == 1 else [str(folder / name) if name else "" for name in names]
    rounds = {**ROUNDS, **changes.pop("rounds", {})}
    return table(section={"count": count}, sites={"policy": policy}, rounds=rounds, **changes)


def attempts_of(described: dict[str, Any]) -> list[SimulatedAttempt]:
    trial = experiment_of(described).trials[0]
    made = make_world(trial, Path(), None)
    try:
        return list(Federation(made.world, beginning(trial.run, made.model), made.model).attempts())
    finally:
        made.world.close()


def words_of_production(policy: SitePolicy, run: str, terms: SecureTerms | None) -> str:
    """What a site with this policy tells its coordinator. `terms`: None of a plain round."""
    try:
        policy.check_run(RunId(run))
        if terms is None:
            policy.check_plain_round(N_VALUES)
        else:
            policy.check_secure_round(terms)
    except WorkRefused as refusal:
        return refusal.public_reason
    raise AssertionError("the policy allows the round")


def terms_of(names: tuple[str, ...], n_invited: int, noise: NoisePlan | None = None, **known: Any) -> SecureTerms:
    parameters = parameters_for(len(names), n_invited=n_invited)
    colluders = None if noise is None else noise.colluders
    asked = (ROUNDS["minimum"], parameters.t, parameters.k + 1, N_VALUES)
    return SecureTerms(names, *asked, colluders=colluders, **known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        'allowed_runs = ["other"]',
        f"max_parameters = {N_VALUES - 1}",
        "epsilon = 8.0",
        "epsilon_total = 8.0",
        "share_sample_count = false",
        "share_metrics = false",
        LISTED,
    ],
)
def test_a_plain_round_beyond_a_policy_is_declined_in_the_words_of_production(text: str, folder: Path) -> None:
    ended = attempts_of(with_policies(folder, text, "", "", "", rounds={"minimum": 3}))
    policy = read_policy(folder / "site-0.toml")
    for one in ended:
        first, *others = one.record.clients
        assert (first.fate, first.reason) == (Fate.DECLINED, words_of_production(policy, "own", None))
        assert one.declines == {first.client: first.reason}
        assert {other.fate for other in others} == {Fate.ACCEPTED}
        assert (first.bytes_up, first.bytes_down) == (0, 0)
    assert [one.record.committed for one in ended] == [True, True]


@pytest.mark.parametrize(
    ("text", "sections"),
    [
        ("", MASKED),  # a policy without a list, from the next line on
        (LISTED + 'allowed_runs = ["other"]', MASKED),
        (LISTED + f"minimum_cohort = {N_SITES + 1}", MASKED),
        (LISTED + f"max_parameters = {N_VALUES - 1}", MASKED),
        (LISTED + "epsilon = 8.0", MASKED),
        (LISTED + "epsilon_total = 8.0", MASKED),
        (LISTED + "threshold_share = 0.8", MASKED),
        (LISTED + "colluders = 2", PRIVATE),
    ],
)
def test_a_secure_round_beyond_a_policy_is_declined_in_the_words_of_production(
    text: str, sections: dict[str, Any], folder: Path
) -> None:
    (first, *_) = ended = attempts_of(with_policies(folder, text or "max_parameters = 1000000", **sections))
    noise = None if "privacy" not in sections else NoisePlan.of(1.0, 1, 1, least=N_SITES, colluders=1)
    terms = terms_of(tuple(one.client for one in first.record.clients), N_SITES, noise)
    words = words_of_production(read_policy(folder / "site-0.toml"), "own", terms)
    assert set(first.declines.values()) == {words}
    assert len(first.declines) == N_SITES
    assert not any(one.record.committed for one in ended)
    assert ended[-1].standing.status is RunStatus.FAILED
    assert ended[-1].standing.reason.endswith(f"such as for this: {words}")


def test_sites_leave_a_secure_round_that_loses_a_client_before_the_keys_are_shared(folder: Path) -> None:
    """Of eight, the threshold is within 0.74 of the holders of a secret; of seven it is not."""
    rounds = {"target": 8, "minimum": 5}
    texts = [LISTED + "max_parameters = 10", *[LISTED + "threshold_share = 0.74"] * 7]
    ended = attempts_of(with_policies(folder, *texts, count=8, rounds=rounds, **MASKED))
    names = tuple(one.client for one in ended[0].record.clients)
    strict, one_of_seven = read_policy(folder / "site-1.toml"), ended[0].record.clients[1].client
    words = words_of_production(strict, "own", replace(terms_of(names[1:], 8), minimum=5))
    assert ended[0].declines.get(ClientId(one_of_seven)) == words
    assert "requires a threshold of at least 6 of 7" in words
    assert not ended[0].record.committed
    ended = attempts_of(with_policies(folder, *texts[1:], texts[1], count=8, rounds=rounds, **MASKED))
    assert all(one.record.committed and not one.declines for one in ended)


@pytest.mark.parametrize("key", ["epsilon", "epsilon_total"])
def test_a_site_declines_from_the_round_on_that_productions_ledger_does_not_allow(key: str, folder: Path) -> None:
    budget, delta = 6.0, 1e-5
    text = f"{LISTED}minimum_cohort = 4\n{key} = {budget}\ndelta = {delta}"
    rounds = {"count": 8, "target": 4, "attempts_max": 2}
    ended = attempts_of(with_policies(folder, text, "", "", "", rounds=rounds, **PRIVATE))
    noise = ended[0].standing.state.plan.noise
    assert noise is not None
    ledger, n_within = Ledger(delta).after(release_of(noise)), 0
    while ledger.epsilon_within(budget) <= budget:
        ledger, n_within = ledger.after(release_of(noise)), n_within + 1
    assert 1 < n_within < 8
    assert [(one.record.round, one.record.committed) for one in ended] == [
        *((number, True) for number in range(1, n_within + 1)),
        *[(n_within + 1, False)] * 2,
    ]
    name = ended[0].record.clients[0].client
    assert [name in one.declines for one in ended] == [not one.record.committed for one in ended]


def test_a_site_without_a_budget_may_send_no_part_of_its_work_where_others_may(folder: Path) -> None:
    slow = {"speed": {"samples_per_s": 0.3, "spread": 0.0, "jitter": 0.0}}
    texts = (LISTED, LISTED + "minimum_work = 0.01", "", "")
    rounds = {"minimum": 3, "window_s": 35.0}
    described = with_policies(folder, *texts, rounds=rounds, fleet=slow, **ENOUGH)
    (first, *_) = attempts_of(described)
    clients = {one.client: one for one in first.record.clients}
    assert list(first.declines) == [min(clients)]
    assert first.record.committed
    assert first.record.reported == N_SITES - 1


def test_a_site_counts_as_no_more_samples_than_its_policy_says(folder: Path) -> None:
    capped = attempts_of(with_policies(folder, LISTED + "weight_max = 3", **MASKED))
    assert [one.record.sample_count for one in capped] == [3 * N_SITES] * 2


def test_metrics_that_a_site_does_not_share_are_not_in_the_sum(folder: Path) -> None:
    measured: dict[str, Any] = {**MASKED, "secure_aggregation": {"metrics": ["loss"]}}
    silent = attempts_of(with_policies(folder, LISTED + "share_metrics = false", **measured))
    spoken = attempts_of(with_policies(folder, LISTED, **measured))
    assert all(one.record.committed for one in (*silent, *spoken))
    assert not any(one.record.metrics for one in silent)
    assert all(one.record.metrics["loss"] > 0 for one in spoken)


FIVE: dict[str, Any] = {"target": 4, "minimum": 3, "count": 3, "attempts_max": 4}


def sums_of(ended: list[SimulatedAttempt]) -> list[tuple[int, set[str], set[str]]]:
    """Of each attempt: its round, the clients that were asked, and those of the sum."""
    records = [one.record for one in ended]
    return [
        (one.round, {c.client for c in one.clients}, {c.client for c in one.clients if c.report_s is not None})
        for one in records
    ]


def test_a_cohort_that_differs_too_little_from_an_earlier_sum_is_declined_in_the_words_of_production(
    folder: Path,
) -> None:
    described = with_policies(folder, LISTED, count=5, rounds=FIVE, **MASKED)
    ended, policy, n_declined = attempts_of(described), read_policy(folder / "site-0.toml"), 0
    before = list[tuple[int, set[str]]]()  # the sums that were unmasked
    for one, (number, asked, summed) in zip(ended, sums_of(ended), strict=True):
        near = [(earlier, names) for earlier, names in before if 0 < len(names ^ asked) < policy.minimum_cohort]
        for client, why in one.declines.items():
            said = next(earlier for earlier in near if client in earlier[1])
            with pytest.raises(AttemptRefused) as refusal:
                check_cohort_change(policy, said[1], asked, f"round {said[0]}")
            assert why == str(refusal.value)
            n_declined += 1
        if one.record.committed:
            assert not near
            before.append((number, summed))
        else:
            assert {client for client, _ in one.declines.items()} == asked & near[0][1]
    assert n_declined
    warned = with_policies(folder, LISTED + 'cohort_change = "warn"', count=5, rounds=FIVE, **MASKED)
    assert all(one.record.committed and not one.declines for one in attempts_of(warned))


@pytest.mark.parametrize("masks", [False, True])
def test_a_sum_that_lacks_a_client_of_an_earlier_one_is_not_signed(masks: bool, folder: Path) -> None:
    lost = {"dropouts": {"per_round": 0.2, "download": 0.0, "training": 0.0, "upload": 1.0}}
    phases = dict.fromkeys(("advertise_keys", "share_keys", "consistency_check", "unmasking"), 0.0)
    fleet = {"dropouts": {**lost["dropouts"], **phases}}
    rounds = {**FIVE, "target": 5, "count": 8, "attempts_max": 3, "window_s": 60.0}
    engine = {"name": "sequential", "masks": masks}
    described = with_policies(folder, LISTED, count=5, rounds=rounds, fleet=fleet, engine=engine, **MASKED)
    ended = attempts_of(described)
    unsigned = [
        one for one in ended if any(why.startswith("this client does not sign") for why in one.declines.values())
    ]
    assert unsigned
    for one in unsigned:
        assert not one.record.committed
        assert "declined by client-" in one.record.reason
        assert {c.reason for c in one.record.clients if c.fate is Fate.DECLINED} <= set(one.declines.values())


def test_an_evaluation_is_declined_too(folder: Path) -> None:
    described = with_policies(folder, LISTED, "", "", "", rounds={"target": 3, "minimum": 3, "count": 1})
    described |= {"evaluation": {"every": 1, "clients": 4}, "rounds": {**described["rounds"], "over_selection": 4 / 3}}
    (training, evaluation) = attempts_of(described)
    assert training.record.committed
    words = words_of_production(read_policy(folder / "site-0.toml"), "own", None)
    assert set(evaluation.declines.values()) == {words}
    assert len(evaluation.declines) == 1


def test_the_results_say_how_many_declined_and_why(folder: Path) -> None:
    found = simulate(with_policies(folder, "max_parameters = 10", "", "", "", rounds={"minimum": 3}))
    words = words_of_production(read_policy(folder / "site-0.toml"), "own", None)
    assert found.declines == (f"2 of 8 asked clients declined, for this reason: {words}",)
    assert [(row["declined"], row["declined_for"]) for row in found.rows] == [(1, {words: 1})] * 2
    assert found.declines[0] in repr(found)
    assert found.summary()["points"][0]["declined"] == 2


class _Stops(Watcher):
    def row(self, trial: TrialSpec, row: Row) -> None:
        if row.round == 2:
            raise KeyboardInterrupt


def private_run(folder: Path) -> dict[str, Any]:
    text = f"{LISTED}minimum_cohort = 4\nepsilon = 6.0\ndelta = 1e-5"
    return with_policies(folder, text, rounds={"count": 8}, **PRIVATE)


def run_of_changing_cohorts(folder: Path) -> dict[str, Any]:
    return with_policies(folder, LISTED, count=5, rounds=FIVE, **MASKED)


@pytest.mark.parametrize("described_in", [private_run, run_of_changing_cohorts])
def test_a_resumed_run_remembers_what_one_that_was_not_interrupted_does(
    described_in: Callable[[Path], dict[str, Any]], folder: Path
) -> None:
    described = described_in(folder)
    whole = simulate(described)
    with pytest.raises(KeyboardInterrupt):
        simulate(described, folder / "out", watcher=_Stops())
    resumed = simulate(described, folder / "out")
    rows = [
        [(row.round, row.attempt, row.model_sha256, row.declined_for) for row in one.trials[0].rows]
        for one in (whole, resumed)
    ]
    assert rows[0] == rows[1]
    assert any(declined_for for _, _, _, declined_for in rows[0])
    assert whole.trials[0].reason == resumed.trials[0].reason


def test_a_run_is_not_resumed_with_a_policy_that_was_changed(folder: Path) -> None:
    described = with_policies(folder, "max_parameters = 1000", rounds={"count": 4})
    with pytest.raises(KeyboardInterrupt):
        simulate(described, folder / "out", watcher=_Stops())
    (folder / "site-0.toml").write_text("max_parameters = 1001")
    with pytest.raises(CheckpointError, match=r"sites.policy \(.*site-0.toml\) changed"):
        simulate(described, folder / "out")


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("missing.toml", "sites.policy names .*missing.toml, and there is no such file"),
        (["lax.toml", ""], r"sites.policy has 2 entries, and the experiment has 4 clients: give one for each"),
        ("wrong.toml", "wrong.toml.*max_parameter"),
    ],
)
def test_what_is_wrong_with_the_policies_is_said_before_the_first_round(policy: Any, words: str, folder: Path) -> None:
    (folder / "lax.toml").write_text("max_parameters = 1000")
    (folder / "wrong.toml").write_text("max_parameter = 1000")
    one = experiment_of(table(section={"count": 4}, sites={"policy": policy}), folder=folder)
    with pytest.raises(ValueError, match=words):
        simulate(one)


def test_the_results_name_the_keys_that_a_simulation_does_not_check(folder: Path) -> None:
    text = f'{LISTED}members_epoch = 2\nlinks = "none"\ncohort_change = "warn"'
    (note,) = simulate(with_policies(folder, text, rounds={"count": 1}, **MASKED)).notes
    assert "does not check these keys of the sites' policies: members_epoch, links, because" in note


@pytest.mark.parametrize("policy", ["", ["", ""], []])
def test_a_section_without_any_policy_is_refused(policy: Any) -> None:
    with pytest.raises(ValueError, match=r"sites: policy must name a policy file"):
        experiment_of(table(sites={"policy": policy}))


@pytest.mark.parametrize("policy", [5, ["site.toml", 5], {"file": "site.toml"}, True])
def test_a_policy_is_a_file_or_a_list_of_files(policy: Any) -> None:
    with pytest.raises(ValueError, match=r"sites.policy: it must be a file, such as") as refusal:
        experiment_of(table(sites={"policy": policy}))
    assert ";" not in str(refusal.value)


@pytest.mark.parametrize("sections", [{}, MASKED])
def test_a_device_whose_site_declines_answers_after_a_round_trip_and_fetches_nothing(
    sections: dict[str, Any], folder: Path
) -> None:
    fleet = {"network": {"latency_s": 0.5, "down_bytes_per_s": 100.0}}
    policies = (LISTED + "max_parameters = 10", "", "", "", "")
    rounds = {"target": 5, "minimum": 4, "count": 1, "window_s": 600.0}
    described = with_policies(folder, *policies, count=5, rounds=rounds, fleet=fleet, **sections)
    (one,), (without,) = (
        attempts_of(described),
        attempts_of({key: value for key, value in described.items() if key != "sites"}),
    )
    first, *others = one.record.clients
    assert one.record.committed
    assert (first.fate, first.bytes_up, first.bytes_down) == (Fate.DECLINED, 0, 0)
    assert all(other.bytes_down >= one.record.model_bytes for other in others)
    assert one.device_time.busy_s < without.device_time.busy_s


def test_clients_without_an_app_have_policies_too(folder: Path) -> None:
    (folder / "site.toml").write_text("max_parameters = 10")
    described = table(
        clients=None,
        data={"name": "digits", "train_limit": 100},
        partition={"scheme": "iid", "clients": 4},
        sites={"policy": ["site.toml", "", "", ""]},
        rounds={**ROUNDS, "minimum": 3},
    )
    found = simulate(experiment_of(described, folder=folder))
    assert found.points[0].declined == 2
