"""`umbel run create`: check all files here first, so that a mistake is named before anything is sent."""

from pathlib import Path
from typing import Annotated

import typer

from umbel.aggregation.plans.training import TrainingPlan
from umbel.aggregation.run.file import AnotherList, RunFile, require_named
from umbel.aggregation.trust.members import MembersRefused, SignedMembers, TooFewSignatures, check_first, members_bytes
from umbel.client.cli.options import AsJson
from umbel.client.cli.output import print_run
from umbel.client.operator.operator import Operator
from umbel.client.operator.run_files import only_simulated, read_run_file
from umbel.client.policy.members_store import read_members_file


def create_run(
    operator: Operator,
    file: Annotated[Path, typer.Argument(help="The run file, in TOML. An experiment's file serves too.")],
    model: Annotated[Path, typer.Option("--model", help="The first model, in safetensors.")],
    members: Annotated[
        Path | None,
        typer.Option(
            "--members",
            metavar="FILE",
            help="The member list that the run file names. With it, the coordinator asks members only.",
        ),
    ] = None,
    same_first_model: Annotated[
        bool,
        typer.Option(
            "--same-first-model",
            help="Allow a secure run from a model that another secure run trains. Sites decline its rounds unless the "
            "clients of both runs are exactly the same, or share hardly a client.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create a run from a run file and its first model. The same command again changes nothing, with one exception: it
    can add --members to a run that was created without it."""
    from umbel.client.operator.first_model import fitted_model  # it imports torch

    text, run_file = read_run_file(file)
    signed = None if members is None else _list_for(run_file, members)
    list_text = None if signed is None else members_bytes(signed).decode()
    unsigned = "" if signed is None or members is None else careful_of_signatures(signed, members)
    with fitted_model(model, run_file) as first:
        sha256 = operator.upload_model(first.path)
        run = operator.create_run(run_file.name, text, sha256, list_text, same_first_model=same_first_model)
    print_run(run, as_json)
    if signed is None and run_file.members_sha256:
        typer.echo(
            "careful: without --members FILE the coordinator does not have the member list that the run file names. If "
            "it asks a client that is not on the list, every site declines that round. Run the same command again with "
            "--members FILE to send the list",
            err=True,
        )
    terms = note_on_no_list(run_file), careful_of_absence(run_file), careful_of_overrides(run_file)
    for careful in (*first.remarks, unsigned, *terms, careful_of_simulation(text)):
        if careful:
            typer.echo(careful, err=True)


def careful_of_signatures(signed: SignedMembers, path: Path) -> str:
    """A warning if too few officers have signed the list, so that sites refuse it; else empty. Raises `MembersRefused`
    for a signature that does not verify.
    """
    try:
        check_first(signed)
    except TooFewSignatures as error:
        return (
            f"careful: {path}: {error} (umbel members sign). "
            "Sites refuse this list until enough officers have signed it"
        )
    except MembersRefused as error:
        raise MembersRefused(f"{path}: {error}") from error
    return ""


def note_on_no_list(run_file: RunFile) -> str:
    """A note on the sites that decline a secure run without a member list; else empty."""
    if run_file.secure is None or run_file.members_sha256:
        return ""
    return (
        "note: this run is bound to no member list. A site that has a policy, or trusts a member list, declines its "
        "rounds, because updates are masked. To bind a run to a list: members_sha256 in [secure_aggregation] of its "
        "run file, and --members FILE"
    )


def careful_of_absence(run_file: RunFile) -> str:
    """A warning of sums that sites with a member list refuse by default (`SitePolicy.cohort_change`); else empty."""
    plan = run_file.round_plan(1, 1)
    if not run_file.members_sha256 or run_file.privacy is not None or plan.minimum == plan.n_wanted:
        return ""
    return (
        f"careful: a round asks {plan.n_wanted} clients, and {plan.minimum} of them are enough (minimum). Sites whose "
        "policies name a member list refuse a sum whose clients differ from those of an earlier sum by only one or two "
        "(cohort_change). So a site that misses one round may be kept out of the later ones. To have the same sites in "
        "every round, set target and minimum to the number of sites, and over_selection = 1.0"
    )


def careful_of_overrides(run_file: RunFile) -> str:
    """A warning of rounds that sites with a member list refuse by default (`SitePolicy.terms_change`); else empty."""
    changes = [
        one.first_round for one in run_file.override if set(one.of(TrainingPlan)) - {"evaluate", "evaluate_after"}
    ]
    if not changes or not run_file.members_sha256 or run_file.privacy is not None:
        return ""
    return (
        f"careful: the training changes in round {min(changes)} ([[override]]). Sites whose policies name a member "
        "list refuse such a change during a run (terms_change), so the run would stop at that round. Leave the "
        'override out, or ask the sites to set terms_change = "warn" in their policies'
    )


def careful_of_simulation(text: str) -> str:
    """A note of what a run does not read of an experiment's file; else empty."""
    left_out = only_simulated(text)
    return f"careful: the run does not use {', '.join(left_out)}: only umbel simulate does" if left_out else ""


def _list_for(run_file: RunFile, path: Path) -> SignedMembers:
    signed = read_members_file(path)
    try:
        require_named(run_file, signed.list)
    except AnotherList as error:
        raise AnotherList(f"{path}: {error}") from error
    return signed
