"""The run that a client is checked with: a run file's own terms, with two short rounds of one client."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from umbel.aggregation.codec.section import CodecSection
from umbel.aggregation.codec.vector_update import GradientProjections
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.codec import CodecPlan
from umbel.aggregation.plans.round import CoverageFloor
from umbel.aggregation.plans.tensors import TensorRules
from umbel.aggregation.plans.training import TrainingSection
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.sections import RetentionSection, RoundsSection
from umbel.aggregation.secagg.section import SecureAggregationSection
from umbel.client.check.cohort import PEERS
from umbel.client.local.gradients import Projection
from umbel.client.local.plan import LocalPlan
from umbel.client.rounds.site_code import asked_of_site

RUN, CLIENT, SECURE_RUN = "client-check", "checked", "client-check-secure"
STEPS, STEPS_LEAST = 6, 4  # a training that is stopped after two steps may end after three, which are still not all
SEED = 20_260_101
MU, CLIP_NORM = 0.1, 1.0  # of rounds, where no run file says them
_TINY_CLIP = 1e-6
_WINDOW_S = 86_400.0  # no check depends on speed
_MASK = CodecSection("mask", every=2, mode="structured")


@dataclass(frozen=True, slots=True)
class PracticeRun:
    """`file`: with rounds of one client and `steps` local steps. `is_own`: whether the user gave the run file."""

    file: RunFile
    steps: int
    is_own: bool

    def plain(self) -> LocalPlan:
        """A round's plan, without what is asked of gradients."""
        section = replace(_without_proximal_term(self.file.training), clip_norm=None, evaluate=False)
        training = replace(self.file, training=section).training_plan(1)
        return asked_of_site(training, SEED, run=RUN, client=CLIENT)

    def strong(self, key: str, layout: Layout) -> LocalPlan | None:
        """A plan whose gradients this key changes so much that the weights tell; None if the run does not ask for it.

        `key`: "proximal_mu", "clip_norm" or "codec".
        """
        plan, training = self.plain(), self.file.training
        match key:
            case "proximal_mu" if training.proximal_mu or training.adaptive_mu:
                return replace(plan, proximal_mu=max(training.proximal_mu, 0.5 / plan.learning_rate))
            case "clip_norm" if training.clip_norm is not None:
                return replace(plan, clip_norm=min(training.clip_norm, _TINY_CLIP))
            case "codec" if within := self._within(layout):
                return replace(plan, within=within)
            case _:
                return None

    def of_rounds(self, ignored: frozenset[str]) -> RunFile:
        """The file of the plain rounds, without what the client is known to fail at: "proximal_mu", "clip_norm",
        "codec", "evaluate".
        """
        training = self.file.training
        training = replace(
            _without_proximal_term(training) if "proximal_mu" in ignored else training,
            clip_norm=None if "clip_norm" in ignored else training.clip_norm,
            evaluate="evaluate" not in ignored,
        )
        return replace(self.file, training=training, codec=CodecSection() if "codec" in ignored else self.file.codec)

    def of_kill(self) -> RunFile:
        """The file of the round with a kill, whose trainings are those of `plain`."""
        training = replace(_without_proximal_term(self.file.training), clip_norm=None, evaluate=False)
        return replace(self.file, rounds=_rounds(1), training=training, codec=CodecSection())

    def secure(self, ignored: frozenset[str], sample_count: int) -> RunFile:
        """The file of the secure round. `sample_count`: the client's."""
        plain, cohort = self.of_rounds(ignored), 1 + len(PEERS)
        given = self.file.secure_aggregation or SecureAggregationSection()
        expected = min(sample_count, plain.aggregation.sample_count_max)
        has_room = given.has_room_for_personal  # a plain run need not list them
        training = replace(plain.training, evaluate_after=plain.training.evaluate_after and has_room)
        return replace(
            plain,
            name=SECURE_RUN,
            rounds=replace(_rounds(1), target=cohort, minimum=cohort),
            training=training,
            codec=CodecSection("integer"),
            secure_aggregation=replace(given, enabled=True, expected_sample_count=expected, members_sha256=""),
        )

    def codec(self, ignored: frozenset[str], n_values: int) -> CodecPlan:
        """The codec of the plain rounds. `n_values`: of an update."""
        return self.of_rounds(ignored).first_plan(n_values).codec

    def _within(self, layout: Layout) -> Mapping[str, Projection]:
        section = self.file.codec if self.is_own else _MASK
        return GradientProjections(section.first(layout.update.n_values, SEED), layout)


def practice_run(
    given: RunFile | None, steps: int, base: TensorRules | None, *, in_one_call: bool = False
) -> PracticeRun:
    """The practice run for a given run file, or for usual terms with FedProx and a clip.

    `in_one_call`: whether the client trains in one call, so that usual terms ask nothing of its gradients. `base`: the
    rules of a client whose own `shares` declare base tensors, used without a run file. Raises `ValueError` for fewer
    steps than `STEPS_LEAST`.
    """
    if steps < STEPS_LEAST:
        raise ValueError(
            f"steps must be at least {STEPS_LEAST}, not {steps}: with fewer, a training that stops cannot be told from "
            "one that does all steps"
        )
    if given is None:
        training = TrainingSection(local_epochs=None, local_steps=steps)
        if not in_one_call:
            training = replace(training, proximal_mu=MU, clip_norm=CLIP_NORM)
        patterns, sha256 = ({}, "") if base is None else (base.patterns, base.base_sha256)
        file = RunFile(RUN, _rounds(2), SEED, training, tensors=patterns, base_sha256=sha256)
        return PracticeRun(file, steps, is_own=False)
    file = replace(
        given,
        name=RUN,
        seed=SEED,
        rounds=_rounds(2),
        training=replace(given.training, local_epochs=None, local_steps=steps, inexactness=False),
        coverage=CoverageFloor(),
        override=(),
        evaluation=None,
        canary=None,
        stop=None,
        retention=RetentionSection(),
        secure_aggregation=replace(given.secure_aggregation, enabled=False) if given.secure_aggregation else None,
        privacy=None,
    )
    return PracticeRun(file, steps, is_own=True)


def _without_proximal_term(training: TrainingSection) -> TrainingSection:
    """The terms as FedAvg has them, for an algorithm that adds something to gradients."""
    if training.algorithm in ("fedprox", "feddyn", "scaffold"):
        plain = {"adaptive_mu": False, "mu_step": None, "control_variate": "change"}
        training = replace(training, algorithm="fedavg", total_samples=None, **plain)  # type: ignore[arg-type]
    return replace(training, proximal_mu=0.0)


def _rounds(count: int) -> RoundsSection:
    return RoundsSection(count, target=1, over_selection=1.0, window_s=_WINDOW_S)
