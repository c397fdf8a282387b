"""The auditor of one run: it reads the run's bundles in order, and reports the first fault.

Without updates it can check hashes, signatures and links; that every model came from the one before; that weights, sums
and grids follow from the plan and the reports; and that each client signed its report. No chain can show that its end
was cut off, or that the holder of the audit key made it up anew. So note heads elsewhere, and require them
(`require_head`). docs/explanation/audit.md says what remains open.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar, assert_never

from umbel.aggregation.algorithms.qfedavg import CHANGE_NORM, START_LOSS, FairReport
from umbel.aggregation.audit.adaptive_mu import MuChecks
from umbel.aggregation.audit.bundle import (
    FORMAT,
    AuditFailed,
    Bundle,
    ModelId,
    Participant,
    RoundEnded,
    RunCreated,
    SignedReport,
    json_sha256,
    unseal,
)
from umbel.aggregation.audit.counted import check_counts
from umbel.aggregation.canonical import Json
from umbel.aggregation.codec.section import CodecSection, codec_key
from umbel.aggregation.codec.step import RoundShown
from umbel.aggregation.errors import LayoutError, SignatureRefused
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.optimizers.section import AggregationSection
from umbel.aggregation.phrases import agreeing, counted
from umbel.aggregation.plans.assignment import assignment_id
from umbel.aggregation.plans.codec import CodecPlan
from umbel.aggregation.plans.masks import NoisePlan, SecurePlan, SumShown
from umbel.aggregation.plans.round import RoundPlan, Task
from umbel.aggregation.plans.training import TrainingSection
from umbel.aggregation.privacy.accounting import AccountantMissing
from umbel.aggregation.privacy.section import PrivacySection, PrivacySpent, again, private_numbers, spent_after
from umbel.aggregation.round.weighting import weight_of
from umbel.aggregation.secagg.section import SecureAggregationSection
from umbel.aggregation.trust.public_keys import public_key_bytes, public_key_text
from umbel.aggregation.trust.signatures import CLOCK_SKEW_S, Target, content_digest, parse, signed_headers
from umbel.aggregation.types import LINE_RATE_MAX, LINE_RATE_MIN, AssignmentId, ClientId, RunId

Parse = Callable[[Json], Bundle]
Section = TypeVar("Section")


class Auditor:
    """Checks a chain of bundles, one after the other."""

    def __init__(self, keys: Collection[bytes], parse: Parse) -> None:
        """`keys`: the trusted audit keys, 32 bytes each."""
        self.heads: list[str] = []
        self.rounds: dict[int, tuple[int, RoundEnded]] = {}
        self.created: RunCreated | None = None
        self.n_reports_signed = 0
        self.n_reports_unsigned = 0
        self._keys = {public_key_text(key) for key in keys}
        self._parse = parse
        self.run = ""
        self._versions: list[ModelId] = []
        self._training = (1, 1)
        self._evaluation = (0, 1)
        self._n_canaries = 0
        self._codec = CodecPlan()
        self._mu = MuChecks(None)
        self._summed: tuple[tuple[CodecPlan, SecurePlan], SumShown] | None = None  # of the last secure round
        self._noise: NoisePlan | None = None  # of the last private one
        self._n_revealed = 0  # sums of private rounds: those of the plans' own count, and those that models are made of

    @property
    def head(self) -> str:
        """The hash of the last bundle; empty before the first."""
        return self.heads[-1] if self.heads else ""

    @property
    def members_sha256(self) -> str:
        """The hash of the member list that the run file names; empty without one. Raises `AuditFailed`."""
        if self.created is None:
            return ""
        section = section_of(self.created.run_file, "secure_aggregation", SecureAggregationSection)
        return section.members_sha256 if section.enabled else ""

    def privacy(self) -> PrivacySpent | None:
        """What the revealed sums have cost of the privacy budget; None for a run without [privacy].

        A sum that the newest attempt revealed without making a model is not counted yet: the next attempt's plan counts
        it. Raises `AccountantMissing`, `AuditFailed`.
        """
        privacy, rounds = _privacy_of(self.created) if self.created else (None, 0)
        if not privacy:
            return None
        if not self._noise:
            return PrivacySpent(0.0, privacy.delta, privacy.epsilon, 0, rounds)
        return spent_after(privacy, self._noise, self._n_revealed, rounds)

    def follow(self, bundle: Json, sha256: str, signature: str) -> Bundle:
        """Check the next bundle. Raises `AuditFailed`, naming it."""
        try:
            return self._follow(bundle, sha256, signature)
        except AuditFailed as failed:
            raise AuditFailed(f"bundle {len(self.heads)}{_name(bundle)}: {failed}") from failed

    def require_head(self, sha256: str) -> None:
        """Raise `AuditFailed` unless this chain has a bundle with this hash, which was noted elsewhere."""
        if sha256 not in self.heads:
            raise AuditFailed(
                f"no bundle of this chain has the noted hash {sha256[:16]}…: bundles are missing, or were replaced"
            )

    def _follow(self, raw: Json, sha256: str, signature: str) -> Bundle:
        key = raw.get("key") if isinstance(raw, dict) else None
        if not isinstance(key, str) or key not in self._keys:
            raise AuditFailed(
                f"it names the audit key {key!r}, which is not trusted; if you trust it, pass --key once "
                "for each key that you trust"
            )
        unseal(raw, sha256, signature, public_key_bytes(key))
        bundle = self._parse(raw)
        self._link(bundle)
        match bundle.facts:
            case RunCreated() as created:
                self._created(created, bundle)
            case RoundEnded() as ended:
                self._ended(ended, bundle)
        self.heads.append(sha256)
        return bundle

    def _link(self, bundle: Bundle) -> None:
        number = len(self.heads)
        if bundle.format != FORMAT:
            raise AuditFailed(
                f"it has format {bundle.format}, but this version of umbel reads format {FORMAT}; use the version that "
                "made it"
            )
        if bundle.number != number:
            raise AuditFailed(
                f"it has number {bundle.number} instead of {number}: a bundle is missing, out of order, or repeated"
            )
        if bundle.previous != self.head:
            raise AuditFailed("its `previous` is not the hash of the bundle before it")
        if number and bundle.run != self.run:
            raise AuditFailed(f"it belongs to the run {bundle.run!r}, not to {self.run!r}")
        if isinstance(bundle.facts, RunCreated) is not (number == 0):
            raise AuditFailed("the first bundle of a chain, and only the first, must record the run's creation")

    def _created(self, created: RunCreated, bundle: Bundle) -> None:
        _require(json_sha256(created.run_file) == created.run_file_sha256, "the run file does not match its hash")
        _require(created.run_file.get("name") == bundle.run, "the run file belongs to another run")
        _require(created.model.version == 0, "the run does not begin with version 0 of its model")
        self.run, self.created, self._versions = bundle.run, created, [created.model]
        self._mu = MuChecks(section_of(created.run_file, "training", TrainingSection).mu_rule)
        codec = section_of(created.run_file, "codec", CodecSection)
        self._codec = codec.first(_layout(created).update.n_values, codec_key(_seed(created), 1))

    def _ended(self, ended: RoundEnded, bundle: Bundle) -> None:
        created = self.created
        assert created is not None, "the first bundle is the run's creation"
        _require(
            ended.run_file_sha256 == created.run_file_sha256,
            "its run file is not the one that the run was created with",
        )
        layout_digest = hashlib.sha256(created.layout.encode()).hexdigest()
        _require(ended.layout_digest == layout_digest, "its model layout is not the one that the run was created with")
        _check_plan(ended, bundle, created.run_file)
        _check_sum(ended)
        for one in ended.clients:
            self._check_report(one, ended)
        check_counts(ended, (_work(one) for one in ended.clients if one.report))
        self._check_models(ended)
        self._mu.follow(ended, (_work(one) for one in ended.accepted))
        self._check_place(ended)
        self._check_codec(ended, created)
        if ended.sum is not None:
            self.rounds[ended.round] = (bundle.number, ended)

    def _check_models(self, ended: RoundEnded) -> None:
        """Check that it began with the newest model, and made the next one or none."""
        _require(ended.model_in == self._versions[-1], "its round did not begin with the run's newest model")
        is_model = ended.committed and ended.plan.task.makes_model
        _require(
            (ended.sum is not None) is is_model,
            "it has a sum although its round made no model, or it has no sum although its round made a model",
        )
        back_to, made = ended.rolled_back_to, ended.model_out
        _require(
            (made is not None) is (is_model or back_to is not None),
            "it names a new model although none was made, or it names no new model although one was made",
        )
        if made is None:
            return
        _require(
            made.version == len(self._versions), f"its model has version {made.version}, not {len(self._versions)}"
        )
        if back_to is not None:
            source = self._versions[back_to] if 0 <= back_to < len(self._versions) else None
            same = source is not None and replace(source, version=made.version) == made
            _require(same, f"it rolled back to version {back_to}, but its model is not that version's")
        self._versions.append(made)

    def _check_place(self, ended: RoundEnded) -> None:
        """Check the order of rounds and attempts. Canaries and evaluations are counted apart."""
        place = (ended.round, ended.attempt)
        match ended.plan.task:
            case Task.CANARY:
                self._n_canaries += 1
                first = (1, self._n_canaries)
                _require(place == first, f"the canary's round and attempt should be {first}, not {place}")
                _require(self._training == (1, 1), "it is a canary, but an attempt at the first round came before it")
            case Task.TRAINING:
                _require(place == self._training, f"its round and attempt should be {self._training}, not {place}")
                self._training = (ended.round + 1, 1) if ended.committed else (ended.round, ended.attempt + 1)
            case Task.EVALUATION:
                last = self._evaluation
                newest = self._training[0] - 1
                _require(
                    ended.round == newest,
                    f"it evaluates round {ended.round}, but the last committed round is {newest}",
                )
                expected = last[1] if ended.round == last[0] else 1
                _require(
                    ended.attempt == expected,
                    f"its attempt at this evaluation should be {expected}, not {ended.attempt}",
                )
                self._evaluation = (ended.round, ended.attempt + 1)
            case _:
                assert_never(ended.plan.task)

    def _check_codec(self, ended: RoundEnded, created: RunCreated) -> None:
        """Check that its codec plan follows from the run file and the round before it."""
        if ended.plan.is_secure:
            self._check_secure(ended, created)
            return
        _require(ended.plan.codec == self._codec, "its codec does not follow from the run file and the round before it")
        if ended.sum is not None:
            number = ended.round + 1
            shown, key = _shown(ended, _layout(created).update.n_values), codec_key(_seed(created), number)
            codec = section_of(created.run_file, "codec", CodecSection)
            self._codec = codec.after(self._codec, number, shown, key)

    def _check_secure(self, ended: RoundEnded, created: RunCreated) -> None:
        """Check that a secure round's numbers follow from the run file and the round before it."""
        section = section_of(created.run_file, "secure_aggregation", SecureAggregationSection)
        codec = section_of(created.run_file, "codec", CodecSection)
        plan, key = ended.plan, codec_key(_seed(created), ended.round)
        assert plan.secure, "it is a secure round"
        n_values = _layout(created).update.n_values
        privacy, rounds = _privacy_of(created)
        if plan.task.follows_its_round:
            self._check_secure_evaluation(plan, section, codec, codec_key(_seed(created), ended.round + 1))
            return
        if privacy is not None:
            try:
                step, clip, signed = codec.step_asked, codec.clip_norm, plan.secure.noise
                numbers = private_numbers(privacy, step, clip, plan, n_values, rounds, signed)
            except (AccountantMissing, ValueError) as error:
                raise AuditFailed(f"the noise of its rounds cannot be computed: {error}") from error
            following, secure = again(numbers, key)
            numbers = following, replace(secure, minimum_work=section.work_floor(has_noise=True))
        elif self._summed is None:
            following, secure = section.first(codec, plan, n_values, key)
            numbers = following, replace(secure, is_normalised=ended.training.is_normalised)
        else:
            numbers = section.after(codec, self._summed[0], plan, self._summed[1], key)
        expected = replace(plan, codec=numbers[0], secure=numbers[1])
        expected = expected if ended.attempt == 1 else plan.numbered_as(expected)
        _require(
            plan == expected, "its plan for masked updates does not follow from the run file and the round before it"
        )
        if privacy is not None:
            counts, before = counted(plan.n_released, "revealed sum"), self._n_revealed
            were = agreeing(before, "was", "were")
            _require(plan.n_released >= before, f"it counts {counts}, but {before} {were} revealed before it")
            self._noise, self._n_revealed = plan.secure.noise, plan.n_released + (ended.sum is not None)
        if ended.sum is not None:
            if ended.sum.shown is None:
                raise AuditFailed("its sum has no `shown`, from which the next round's plan is made")
            self._summed = (plan.codec, plan.secure), ended.sum.shown

    def _check_secure_evaluation(
        self, plan: RoundPlan, section: SecureAggregationSection, codec: CodecSection, key: int
    ) -> None:
        """Check that an evaluation under masks has the numbers of the training after it. `key`: of that training.

        It has no update, so the bits of levels tell nothing, and any are accepted.
        """
        _require(self._summed is not None, "it is a secure evaluation, but no sum of updates came before it")
        assert plan.secure is not None
        assert self._summed is not None
        codec_plan, secure = section.after(
            codec, self._summed[0], replace(plan, number=plan.number + 1), self._summed[1], key
        )
        expected = replace(plan, codec=codec_plan, secure=replace(secure, bits=plan.secure.bits))
        _require(plan == expected, "its plan for masked metrics does not follow from the run file")

    def _check_report(self, one: Participant, ended: RoundEnded) -> None:
        report = one.report
        _require(
            (report is None) is (one.weight is None),
            f"{one.client} has a report without a weight, or a weight without a report",
        )
        if report is None:
            return
        is_masked = ended.plan.is_secure  # so the report does not say its weight
        expected = 1 if is_masked else weight_of(ended.plan.weighting, one.draws, sample_count_of(one))
        _require(one.weight == expected, f"the weight of {one.client} is {one.weight}; its report gives {expected}")
        if not report.signature:
            self.n_reports_unsigned += 1
            return
        self.n_reports_signed += 1
        assignment = assignment_id(RunId(self.run), ended.round, ended.attempt, ClientId(one.client), ended.plan.task)
        check_report(report, one, report_target(assignment, has_upload=ended.plan.has_uploads))
        _require(
            ended.opened_at - CLOCK_SKEW_S <= report.created <= ended.closed_at + CLOCK_SKEW_S,
            f"the report of {one.client} was signed outside the time of the round",
        )


def section_of(run_file: Mapping[str, Any], name: str, section: Callable[..., Section]) -> Section:
    """A section of a run file; its defaults if the run file lacks it. Raises `AuditFailed`."""
    try:
        said = run_file.get(name) or {}
        return section(**{key: tuple(value) if isinstance(value, list) else value for key, value in said.items()})
    except (TypeError, ValueError, AttributeError) as error:
        raise AuditFailed(f"the run file's section [{name}] is invalid: {error}") from error


def _privacy_of(created: RunCreated) -> tuple[PrivacySection | None, int]:
    """The run file's section [privacy], None without one, and the most sums that the run may reveal."""
    if created.run_file.get("privacy") is None:
        return None, 0
    return section_of(created.run_file, "privacy", PrivacySection), int(created.run_file["rounds"]["count"])


def _layout(created: RunCreated) -> Layout:
    try:
        return Layout.from_json(created.layout)
    except LayoutError as error:
        raise AuditFailed(f"the model's layout cannot be read: {error}") from error


def _seed(created: RunCreated) -> int:
    try:
        return int(created.run_file.get("seed", 0))
    except (TypeError, ValueError) as error:
        raise AuditFailed("the run file's seed is not a number") from error


def update_sha256_of(one: Participant) -> str:
    """The hash of the update that a report names. Raises `AuditFailed`."""
    return str(_work(one).get("update_sha256", ""))


def _shown(ended: RoundEnded, n_values: int) -> RoundShown:
    """What a round has shown of its updates, for the next codec plan. Raises `AuditFailed`."""
    rates = [_work(one).get("upload_bytes_per_s") for one in ended.accepted]
    return RoundShown(
        ended.plan.window_s,
        n_values,
        None if ended.sum is None else ended.sum.update_rms,
        [one.bytes_up for one in ended.accepted],
        [float(rate) for rate in rates if isinstance(rate, int | float) and LINE_RATE_MIN <= rate <= LINE_RATE_MAX],
    )


def sample_count_of(one: Participant) -> int:
    """The samples that a report names. Raises `AuditFailed`."""
    return _number_of(one, "sample_count", "sample count")


def steps_done_of(one: Participant) -> int:
    """The steps that a report of training names. Raises `AuditFailed`."""
    return _number_of(one, "steps_done", "number of steps")


def fair_report_of(one: Participant) -> FairReport:
    """What a report says for q-FedAvg, read as the coordinator read it, which takes "2" as 2. Raises `AuditFailed`."""
    try:
        loss, norm = (float(_work(one)["metrics"][name]) for name in (START_LOSS, CHANGE_NORM))
        is_valid = one.weight is not None and 0 <= loss < math.inf and 0 <= norm < math.inf
    except (KeyError, TypeError, ValueError, OverflowError):
        is_valid, loss, norm = False, 0.0, 0.0
    if not is_valid:
        raise AuditFailed(f"the report of {one.client} does not say its {START_LOSS} and its {CHANGE_NORM}")
    return FairReport(one.weight or 0, loss, norm)


def _number_of(one: Participant, key: str, what: str) -> int:
    count = _work(one).get(key)
    if not isinstance(count, int):
        raise AuditFailed(f"the report of {one.client} has no {what}")
    return count


def report_target(assignment: AssignmentId, *, has_upload: bool) -> Target:
    """The request line of a report, in the one spelling that its signature may cover.

    `has_upload`: whether the client uploaded something before (`RoundPlan.has_uploads`).
    """
    what = "report" if has_upload else "evaluation"
    return Target("PUT", f"/v1/assignments/{assignment}/{what}")


def check_report(report: SignedReport, one: Participant, target: Target) -> None:
    """Raise `AuditFailed` unless the client's key has signed this report, for this address."""
    digest = content_digest(hashlib.sha256(report.body.encode()).digest())
    try:
        headers = signed_headers(one.client, digest, report.created, report.nonce, report.signature)
        parse(headers).verify(public_key_bytes(one.key), target, report.created)
    except (SignatureRefused, ValueError) as error:
        raise AuditFailed(f"the report of {one.client} was not signed with this client's key: {error}") from error


def _check_plan(ended: RoundEnded, bundle: Bundle, run_file: Any) -> None:
    plan = ended.plan
    _require(
        (plan.run, plan.number, plan.attempt) == (bundle.run, ended.round, ended.attempt),
        "its plan belongs to another round",
    )
    _require(ended.grid == plan.grid, "its `grid` is not the one that follows from its `plan`")
    training = section_of(run_file, "training", TrainingSection)
    for key in ("algorithm", "total_samples", "control_variate", "q", "loss_max", "lipschitz"):
        is_same = getattr(ended.training, key) == getattr(training, key)
        _require(is_same, f"its {key} in `training` is not that of the run file")
    aggregation = run_file.get("aggregation")
    if not isinstance(aggregation, dict):
        raise AuditFailed("the run file has no section [aggregation]")
    section = section_of(run_file, "aggregation", AggregationSection)
    try:
        n_rounds = int(run_file["rounds"]["count"])
        gives = section.gives(ended.server_learning_rate, plan.number, n_rounds, plan.target)
    except (KeyError, TypeError, ValueError) as error:
        raise AuditFailed(f"the server's learning rate does not follow from the run file: {error}") from error
    is_same = (plan.max_abs, plan.sample_count_max) == (section.max_abs, section.sample_count_max)
    _require(is_same and gives, "its max_abs, sample_count_max or server_learning_rate differs from the run file")


def _check_sum(ended: RoundEnded) -> None:
    names = [one.client for one in ended.clients]
    _require(names == sorted(set(names)), "its clients are not sorted by name, or one appears twice")
    if ended.sum is None:
        return
    accepted = ended.accepted
    n_summed, n_accepted = ended.sum.n_clients, len(accepted)
    _require(n_summed == n_accepted, f"its sum has {n_summed} reports, but the bundle has {n_accepted} accepted ones")
    total = sum(one.weight or 0 for one in accepted)
    summed = ended.sum.total_weight
    _require(summed == total, f"its sum has the weight {summed}, but its reports have {total} together")


def _work(one: Participant) -> dict[str, Any]:
    """What a client reported, read as the coordinator read it: the last of repeated keys counts."""
    try:
        work = json.loads(one.report.body if one.report else "")
    except (ValueError, RecursionError) as error:
        raise AuditFailed(f"the report of {one.client} is not JSON") from error
    if not isinstance(work, dict):
        raise AuditFailed(f"the report of {one.client} is not a JSON object")
    return work


def _name(raw: Json) -> str:
    facts = raw.get("facts") if isinstance(raw, dict) else None
    if not isinstance(facts, dict) or not isinstance(facts.get("round"), int):
        return ""
    attempt = facts.get("attempt")
    return f" (round {facts['round']}" + (f", attempt {attempt})" if attempt != 1 else ")")


def _require(fits: bool, otherwise: str) -> None:
    if not fits:
        raise AuditFailed(otherwise)
