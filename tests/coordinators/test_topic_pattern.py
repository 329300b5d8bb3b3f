"""TopicPattern: the same answers as `re`, in linear time."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logstore.coordinators.consumer_group.topic_pattern import (
    InvalidPatternError,
    TopicPattern,
    matching,
)

ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\.", r"\d", "-", "[a-c]", r"[\d.]"])


def patterns() -> st.SearchStrategy[str]:
    return st.recursive(
        ATOMS,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map("|".join),
            st.tuples(
                inner, st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{0,2}", "*?", ""])
            ).map(lambda made: f"(?:{made[0]}){made[1]}"),
            inner.map(lambda made: f"({made})"),
        ),
        max_leaves=6,
    )


@given(patterns(), st.lists(st.text("ab.-1", max_size=6), max_size=8))
def test_a_name_matches_as_with_re(pattern: str, names: list[str]) -> None:
    compiled = TopicPattern(pattern)
    for name in names:
        assert compiled.matches(name) == bool(re.fullmatch(pattern, name)), (pattern, name)


@pytest.mark.parametrize(
    ("pattern", "topics"),
    [
        ("(?i)ORD.*", ("orders", "orders.eu")),
        ("^orders$|x", ("orders", "x")),
        ("[[:alpha:]]+", ("orders", "x")),
        ("(?P<name>o)rders", ("orders",)),
        ("ord", ()),
        ("a^b", ()),
        ("", ()),
        ("orders.[^.]+", ("orders.eu",)),
    ],
)
def test_topics_are_matched_whole(pattern: str, topics: tuple[str, ...]) -> None:
    assert matching(pattern, ["x", "orders.eu", "orders"]) == topics


@pytest.mark.parametrize(
    "pattern",
    ["(", ")", "[a", "a(?=b)", "(?<!a)b", r"(a)\1", "a**", "a*+", "*", r"\b", r"\pL", "a{1001}"]
    + ["a{3,2}", "(" * 100, "((a{50}){50}){50}", "[[:nope:]]", "[z-a]", "a|*", "\\", "()" * 5001],
)
def test_what_re2_refuses_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidPatternError):
        TopicPattern(pattern)
    assert matching(pattern, ["a"]) == ()


@pytest.mark.parametrize("pattern", ["(a*)*b", "(a|a)*b", "(a?){30}a{30}b", ".*.*.*.*.*.*b"])
def test_a_hostile_pattern_takes_linear_time(pattern: str) -> None:
    assert matching(pattern, ["a" * 249]) == ()  # with backtracking it would not end
