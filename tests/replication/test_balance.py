"""Plans of `cluster plan` and `decommission`: even, on different racks, with few moves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logstore.replication.machines.assignment import PlacementError
from logstore.replication.machines.balance import balanced, moved_replicas, without_node

NODES = range(1, 7)
replicas = st.lists(st.sampled_from(NODES), min_size=2, max_size=2, unique=True).map(tuple)
assignments = st.lists(replicas, min_size=1, max_size=30).map(
    lambda rows: {("t", number): row for number, row in enumerate(rows)}
)
Assignments = dict[tuple[str, int], tuple[int, ...]]


@given(assignments, st.sets(st.sampled_from(NODES), min_size=2))
def test_replicas_and_leaders_are_spread_evenly(current: Assignments, nodes: set[int]) -> None:
    after = balanced(current, dict.fromkeys(nodes))
    assert after.keys() == current.keys()
    for row in after.values():
        assert len(set(row)) == 2
        assert set(row) <= nodes
    for counted in (
        Counter(node for row in after.values() for node in row),
        Counter(row[0] for row in after.values()),
    ):
        counts = [counted[node] for node in nodes]
        assert max(counts) - min(counts) <= 1
    assert balanced(after, dict.fromkeys(nodes)) == after


@given(assignments, st.sets(st.sampled_from(NODES), min_size=2))
def test_no_more_is_moved_than_evenness_needs(current: Assignments, nodes: set[int]) -> None:
    after = balanced(current, dict.fromkeys(nodes))
    before = Counter(node for row in current.values() for node in row)
    least = 2 * len(current) // len(nodes)
    gone = sum(count for node, count in before.items() if node not in nodes)
    excess = sum(max(0, before[node] - least) for node in nodes)
    assert moved_replicas(current, after) <= gone + excess


@given(assignments, st.sets(st.sampled_from(NODES), min_size=1), st.integers(1, 6))
def test_another_number_of_replicas(current: Assignments, nodes: set[int], factor: int) -> None:
    if factor > len(nodes):
        with pytest.raises(PlacementError, match=f"{factor} replicas need {factor} nodes"):
            balanced(current, dict.fromkeys(nodes), factor)
        return
    after = balanced(current, dict.fromkeys(nodes), factor)
    assert {len(set(row)) for row in after.values()} == {factor}
    assert {node for row in after.values() for node in row} <= nodes
    # A replica is copied only where there was none.
    if factor == len(nodes):
        wanted = sum(len(nodes - set(row)) for row in current.values())
        assert moved_replicas(current, after) == wanted


@given(assignments)
def test_racks_are_not_shared_where_it_can_be_avoided(current: Assignments) -> None:
    racks: dict[int, str | None] = {node: "ab"[node % 2] for node in NODES}
    for key, row in balanced(dict.fromkeys(current, (1, 99)), racks).items():
        assert racks[row[0]] != racks[row[1]], key


@given(assignments, st.sampled_from(NODES))
def test_only_partitions_of_the_node_change(current: Assignments, node: int) -> None:
    after = without_node(current, node, dict.fromkeys(NODES))
    assert after.keys() == {key for key, row in current.items() if node in row}
    for key, row in after.items():
        assert node not in row
        assert len(set(row)) == 2
        assert sum(a != b for a, b in zip(row, current[key], strict=True)) == 1


def test_too_few_nodes_are_refused() -> None:
    with pytest.raises(PlacementError, match="t-0: 2 replicas need 2 nodes; there are 1: start"):
        balanced({("t", 0): (1, 2)}, {1: None})
