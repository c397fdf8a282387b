"""Patterns of tensor names: each name has one kind, and patterns are bounded."""

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.plans.tensors import PATTERN_CHARS_MAX, PATTERNS_MAX, ListedKind, TensorRules

KINDS: tuple[ListedKind, ...] = ("global", "private", "base")
WORDS = st.text("ab.*?", min_size=1, max_size=4)


def rules(**patterns: tuple[str, ...]) -> TensorRules:
    return TensorRules({kind: patterns[kind] for kind in KINDS if kind in patterns})


def test_a_name_has_the_kind_whose_pattern_matches_it() -> None:
    found = rules(**{"global": ("positions.*",), "private": ("bn?.*", "head.[ab]")})
    names = ("positions.weight", "bn1.bias", "bn10.bias", "head.a", "head.c", "Head.a")
    assert [found.kind_of(name) for name in names] == ["global", "private", None, "private", None, None]


@given(st.dictionaries(st.sampled_from(KINDS), st.lists(WORDS, max_size=3).map(tuple)), st.text("ab.", max_size=4))
def test_a_name_has_no_kind_one_kind_or_is_refused(patterns: dict[ListedKind, tuple[str, ...]], name: str) -> None:
    matching = [kind for kind, listed in patterns.items() if any(fnmatchcase(name, one) for one in listed)]
    found = TensorRules(patterns)
    if len(matching) > 1:
        with pytest.raises(ValueError, match="is in two lists"):
            found.kind_of(name)
    else:
        assert found.kind_of(name) == next(iter(matching), None)


def test_a_name_in_two_lists_is_refused_with_both_patterns() -> None:
    with pytest.raises(
        ValueError, match=r"tensor 'head.bias' is in two lists .*'head.\*' of global and '\*bias' of pri"
    ):
        rules(**{"global": ("head.*",), "private": ("*bias",)}).kind_of("head.bias")


def test_a_pattern_that_matches_nothing_is_found() -> None:
    found = rules(**{"global": ("a.*",), "private": ("bn.wieght",)})
    assert found.unmatched({"a.x", "bn.weight"}) == "bn.wieght"
    assert found.unmatched({"a.x", "bn.weight"}, "global") == ""
    assert found.unmatched({"a.x", "bn.wieght"}) == ""


@pytest.mark.parametrize(
    ("patterns", "base", "words"),
    [
        ({"private": ("x",) * (PATTERNS_MAX + 1)}, "", "at most 64 are allowed"),
        ({"private": ("x" * (PATTERN_CHARS_MAX + 1),)}, "", "must have 1 to 128 printable characters"),
        ({"private": ("",)}, "", "must have 1 to 128 printable characters"),
        ({"private": ("a\nb",)}, "", "must have 1 to 128 printable characters"),
        ({"base": ("x",)}, "AB" * 32, "base_sha256 must be 64 lower-case hex digits"),
    ],
)
def test_rules_out_of_bounds_are_refused(patterns: dict[ListedKind, tuple[str, ...]], base: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TensorRules(patterns, base)
