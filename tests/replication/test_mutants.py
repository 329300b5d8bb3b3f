"""Every mutant of the machines is killed: by the run of one seed, or by a scenario.

The same seed and the same scenario pass without the mutant: a killer that always kills proves
nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from logstore.testing.simulation import SimulationFailure, simulate
from tests.replication import test_controller as controller
from tests.replication import test_follower_rows as follower
from tests.replication import test_historical_bugs as bugs
from tests.replication import test_leader_rows as leader
from tests.replication.mutants import KILLERS, MUTANTS, planted

# Mutants that no seed of the first thousand kills, or only after many.
SCENARIOS: dict[str, Callable[[], None]] = {
    "m04_a_fetch_continues_in_a_new_epoch_of_the_same_leader": (
        follower.test_f1_a_new_epoch_of_the_same_leader_forgets_the_fetch_under_way
    ),
    "m05_an_epoch_without_records_is_not_noted": (
        bugs.test_an_epoch_without_records_is_known_to_followers
    ),
    "m08_a_follower_joins_without_its_registration": bugs.test_an_unwilling_node_cannot_join,
    "m09_a_follower_joins_by_a_fetch_of_an_earlier_life": (
        bugs.test_a_fetch_of_an_earlier_life_admits_no_node
    ),
    "m17_lossy_restarts_are_ignored": bugs.test_a_lossy_restart_leaves_every_set_first,
    "m22_the_controller_writes_without_its_epoch": (
        controller.test_every_write_checks_the_controller_epoch_first
    ),
    "m26_a_lost_answer_counts_as_a_refusal": (
        bugs.test_a_lost_answer_counts_as_applied_until_it_is_known
    ),
    "m44_a_lower_minimum_keeps_the_elr": bugs.test_a_lower_minimum_does_not_keep_the_elr,
    "m45_a_followers_high_watermark_goes_back": (
        follower.test_f6_the_high_watermark_of_the_leader_is_shown_up_to_our_end_and_never_goes_down
    ),
    "m55_lossy_is_cleared_for_another_life": (
        controller.test_the_lossy_mark_is_cleared_after_every_partition_and_only_of_this_life
    ),
    "m56_a_registration_is_changed_for_another_life": (
        bugs.test_a_registration_of_another_life_is_not_changed
    ),
    "m57_an_outcome_of_an_earlier_reign_counts": (
        controller.test_an_outcome_of_an_earlier_time_as_the_controller_does_not_end_this_one
    ),
    "m13_a_new_state_does_not_move_the_high_watermark": (
        bugs.test_a_confirmed_shrink_moves_the_high_watermark
    ),
    "m20_a_restarted_log_keeps_the_high_watermark": (
        follower.test_f8_a_restarted_log_moves_start_and_high_watermark
    ),
    "m28_a_follower_joins_without_the_check_of_the_assignment": (
        bugs.test_the_in_sync_set_stays_within_the_assignment
    ),
    "m29_a_move_is_done_with_one_target_in_sync": bugs.test_a_move_waits_for_every_target,
    "m31_answers_are_not_matched_with_their_question": (
        bugs.test_an_answer_of_an_earlier_epoch_changes_nothing
    ),
    "m32_a_fetch_of_a_later_epoch_is_served": bugs.test_a_zombie_leader_commits_nothing,
    "m33_only_the_end_of_the_log_counts_as_caught_up": (
        bugs.test_steady_small_appends_change_no_set
    ),
    "m51_the_checks_of_an_expansion_are_before_the_write": (
        bugs.test_a_lost_answer_counts_as_applied_until_it_is_known
    ),
    "m53_a_new_assignment_drops_members_of_the_set": (
        leader.test_l11_a_member_counts_although_its_assignment_is_gone_until_the_state_is_seen
    ),
    "m54_a_move_drops_a_replica_without_a_new_epoch": (
        bugs.test_a_late_fetch_from_before_a_changed_move_admits_no_node
    ),
    "m59_a_failed_log_leaves_without_a_new_epoch": (
        bugs.test_a_late_fetch_of_a_log_that_was_replaced_admits_no_node
    ),
    "m58_a_log_below_the_leaders_start_waits_for_ever": (
        follower.test_f11_a_log_that_ends_where_the_leaders_log_starts_inside_a_batch_begins_again
    ),
}


def test_every_mutant_has_a_killer() -> None:
    assert not set(MUTANTS) - set(KILLERS) - set(SCENARIOS)
    assert not (set(KILLERS) | set(SCENARIOS)) - set(MUTANTS)
    assert len(MUTANTS) >= 50


@pytest.mark.parametrize("name", sorted(KILLERS))
def test_a_seed_kills_the_mutant(name: str) -> None:
    with planted(name), pytest.raises(SimulationFailure):
        simulate(KILLERS[name])


@pytest.mark.parametrize("seed", sorted(set(KILLERS.values())))
def test_the_seed_passes_without_the_mutant(seed: int) -> None:
    simulate(seed)


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_a_scenario_kills_the_mutant(name: str) -> None:
    scenario = SCENARIOS[name]
    scenario()
    with planted(name), pytest.raises(Exception):  # noqa: B017 - by an assertion, or worse
        scenario()
