"""Whether a member list is the one that a run file names; where not, which line the file needs is said."""

from dataclasses import replace

import pytest

from tests.federations.consortium import first_list, without
from umbel.aggregation.codec.section import CodecSection
from umbel.aggregation.run.bound_list import AnotherList, named_list, require_named
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.sections import RoundsSection
from umbel.aggregation.secagg.section import SecureAggregationSection
from umbel.aggregation.trust.fingerprint import grouped
from umbel.aggregation.trust.members import MemberList

FIRST = first_list()
SECOND = without(FIRST, "south")
PLAIN = RunFile("ward", RoundsSection(1, target=4, minimum=3, over_selection=1.0), codec=CodecSection("integer"))
UNBOUND = replace(PLAIN, secure_aggregation=SecureAggregationSection())
BOUND = replace(PLAIN, secure_aggregation=SecureAggregationSection(members_sha256=FIRST.sha256))


def test_the_list_that_the_file_names_is_its_own() -> None:
    require_named(BOUND, FIRST)
    assert named_list(BOUND) == FIRST.sha256
    assert named_list(UNBOUND) == named_list(PLAIN) == ""


def test_masked_updates_that_are_switched_off_are_bound_to_no_list() -> None:
    off = replace(PLAIN, secure_aggregation=SecureAggregationSection(enabled=False, members_sha256=FIRST.sha256))
    assert named_list(off) == ""
    with pytest.raises(AnotherList, match="asks for none"):
        require_named(off, FIRST)


REFUSED = {
    "of a plain run": (PLAIN, FIRST, "the run file asks for none"),
    "of a run that names none": (UNBOUND, FIRST, "the run file names no member list"),
    "of another epoch": (BOUND, SECOND, "the run file names another member list"),
}


@pytest.mark.parametrize(("file", "members", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_a_list_that_is_not_named_is_refused_with_the_line_for_it(
    file: RunFile, members: MemberList, sentence: str
) -> None:
    with pytest.raises(AnotherList, match=sentence) as refused:
        require_named(file, members)
    assert f'write members_sha256 = "{members.sha256}" into' in str(refused.value)
    assert members.words in str(refused.value)


def test_of_two_lists_both_hashes_are_told() -> None:
    with pytest.raises(AnotherList) as refused:
        require_named(BOUND, SECOND)
    for one in (FIRST, SECOND):
        assert f"({grouped(one.sha256[:16])})" in str(refused.value)
