"""What the verbs that need a model do and print: `join`, `run create`, `model init`. They bring torch, which takes a
second or more to import; the other verbs are elsewhere, and do without.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.plans.round import TrainingPlan
from umbel.aggregation.run.bound_list import AnotherList, named_list, require_named
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.trust.members import MembersRefused, SignedMembers, TooFewSignatures, check_first, members_bytes
from umbel.client.cli.console import labels_of
from umbel.client.cli.loading import load_app, load_initial_model
from umbel.client.cli.output import log_to_stderr, one_sentence_errors, print_json, tell_run
from umbel.client.loop import run_client
from umbel.client.operator.model_files import layout_in, write_model
from umbel.client.operator.operator import Operator
from umbel.client.operator.run_files import read_run_file
from umbel.client.policy.members_store import read_members_file
from umbel.client.policy.policy_file import read_policy


def join(
    server: str,
    app: str,
    run: str,
    token: str | None,
    name: str | None,
    labels: Sequence[str],
    state: Path,
    policy: Path | None,
    as_json: bool,
) -> None:
    log_to_stderr()
    with one_sentence_errors():
        facts, limits = labels_of(labels), None if policy is None else read_policy(policy.expanduser())
        with _blaming(policy):
            end = run_client(
                load_app(app), server, state.expanduser(), run, token=token, name=name, labels=facts, policy=limits
            )
    if as_json:
        print_json(end)
    else:
        typer.echo(f"{end.run} {end.status}: {end.reason} ({end.reports_in_words})")
    if end.status == RunStatus.FAILED:
        raise typer.Exit(1)


@contextmanager
def _blaming(policy: Path | None) -> Generator[None]:
    """What is wrong with the member list of a policy is said with the policy's file, where it is put right."""
    try:
        yield
    except MembersRefused as error:
        raise MembersRefused(f"{policy}: {error}") from error  # without a policy no list is read


def create_run(operator: Operator, file: Path, model: Path, members: Path | None, as_json: bool) -> None:
    """All files are checked here first, so that mistakes are named before anything is sent."""
    text, run_file = read_run_file(file)
    signed = None if members is None else _list_for(run_file, members)
    list_text = None if signed is None else members_bytes(signed).decode()
    unsigned = "" if signed is None or members is None else careful_of_signatures(signed, members)
    layout_in(model)
    tell_run(operator.create_run(run_file.name, text, operator.upload_model(model), list_text), as_json)
    if signed is None and named_list(run_file):
        typer.echo(
            "careful: without --members FILE the coordinator does not know who is on the member list that the run file "
            "names; should it draw a client that is not, every site declines that round. The same command with "
            "--members tells it",
            err=True,
        )
    for careful in (unsigned, careful_of_absence(run_file), careful_of_overrides(run_file)):
        if careful:
            typer.echo(careful, err=True)


def careful_of_signatures(signed: SignedMembers, path: Path) -> str:
    """What to say of a member list that sites refuse, because too few of its officers have signed it; empty if enough
    have. Raises `MembersRefused` for a signature that does not fit.
    """
    try:
        check_first(signed)
    except TooFewSignatures as error:
        return f"careful: {path}: {error} (umbel members sign). Sites refuse this list until enough have signed it"
    except MembersRefused as error:
        raise MembersRefused(f"{path}: {error}") from error
    return ""


def careful_of_absence(run_file: RunFile) -> str:
    """What to say of a run whose sums may lack a few of the clients that it asks; empty if they cannot.

    Sites that name a member list refuse such sums by default (`SitePolicy.cohort_change`), unless there is noise.
    """
    plan = run_file.round_plan(1, 1)
    if not named_list(run_file) or run_file.privacy is not None or plan.minimum == plan.n_wanted:
        return ""
    return (
        f"careful: of {plan.n_wanted} clients that a round asks, {plan.minimum} are enough (minimum). Sites whose "
        "policies name a member list refuse a sum that lacks one or two clients of an earlier one, or has one or two "
        "more (cohort_change), so a site that misses one round may be kept out of the others. To have the same sites "
        "each time, set target and minimum to their number, and over_selection = 1.0"
    )


def careful_of_overrides(run_file: RunFile) -> str:
    """What to say of a run whose training changes from round to round; empty if it does not.

    Sites that name a member list refuse such rounds by default (`SitePolicy.terms_change`), unless there is noise.
    """
    changes = [one.first_round for one in run_file.override if set(one.of(TrainingPlan)) - {"evaluate"}]
    if not changes or not named_list(run_file) or run_file.privacy is not None:
        return ""
    return (
        f"careful: the training changes in round {min(changes)} ([[override]]). Sites whose policies name a member "
        "list refuse rounds of a run under different training (terms_change), so the run would stop there. Leave the "
        'override out, or have the sites write terms_change = "warn"'
    )


def _list_for(run_file: RunFile, path: Path) -> SignedMembers:
    """A member list's file, to be given with this run file, which must name it."""
    signed = read_members_file(path)
    try:
        require_named(run_file, signed.list)
    except AnotherList as error:
        raise AnotherList(f"{path}: {error}") from error
    return signed


def init_model(app: str, out: Path, seed: int, as_json: bool) -> None:
    with one_sentence_errors():
        layout = write_model(out, load_initial_model(app, seed).state_dict())
    size_bytes = out.stat().st_size
    facts = {"file": str(out), "size_bytes": size_bytes, "n_values": layout.n_values, "layout_digest": layout.digest}
    if as_json:
        print_json(facts)
    else:
        typer.echo(f"{out}: {layout.n_values} values, {size_bytes} bytes")
