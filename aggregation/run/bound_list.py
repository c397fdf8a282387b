"""The member list that a run file names by its hash, and whether a list that is given with the file is that one."""

from umbel.aggregation.run.file import RunFile
from umbel.aggregation.trust.fingerprint import short_groups
from umbel.aggregation.trust.members import MemberList, MembersRefused


class AnotherList(MembersRefused):
    """A list that is not the run's; `str(error)` has the line that the run file needs for it."""


def named_list(file: RunFile) -> str:
    """The SHA-256 of the member list that a run's rounds are bound to; empty where they are bound to none."""
    return file.secure.members_sha256 if file.secure else ""


def require_named(file: RunFile, members: MemberList) -> None:
    """Raise `AnotherList` unless this is the list that the run file names."""
    if (named := named_list(file)) == members.sha256:
        return
    given, line = members.words, f'members_sha256 = "{members.sha256}"'
    if not file.secure:
        raise AnotherList(
            f"a member list is for secure rounds, and the run file asks for none: for {given} write {line} into a "
            "section [secure_aggregation], or give no list"
        )
    if not named:
        raise AnotherList(f"the run file names no member list: for {given} write {line} into its [secure_aggregation]")
    raise AnotherList(
        f"the run file names another member list ({short_groups(named)}) than {given}: give the one that it names, or "
        f"write {line} into its [secure_aggregation]"
    )
