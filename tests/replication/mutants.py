"""Mutants: the machines of replication with one rule left out or turned around.

Each must be noticed.  KILLERS has the seed whose run fails with the mutant; the tests in
`test_mutants` run it with and without.  A mutant without a seed is killed by a scenario test, which
names it.

Run this file to look for seeds: ``python -m tests.replication.mutants [name ...]``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from logstore.replication.machines import controller as controller_module
from logstore.replication.machines import decisions, registration
from logstore.replication.machines import leader as leader_module
from logstore.replication.machines.actions import Answer, SetHighWatermark, Sync, Truncate
from logstore.replication.machines.controller import Controller
from logstore.replication.machines.follower import FollowerReplica
from logstore.replication.machines.in_sync import Progress
from logstore.replication.machines.leader import SERVE, LeaderReplica
from logstore.replication.machines.leader_and_isr import LeaderAndIsr
from logstore.replication.machines.replica import Replica
from logstore.replication.metadata import ANY, Check, Commit, Refused, Set, Unknown
from logstore.testing.simulation import SimulationFailure, simulate
from logstore.testing.simulation import node as node_module
from logstore.testing.simulation.disk import Batch, SimulatedLog
from logstore.testing.simulation.node import SimulatedNode

Patch = tuple[Any, str, Any]
MUTANTS: dict[str, Callable[[], list[Patch]]] = {}


def mutant(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    """Register a mutant under the name of its function."""
    MUTANTS[make.__name__] = make
    return make


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Run the block with a mutant in place of the product."""
    with contextlib.ExitStack() as stack:
        for owner, attribute, replacement in MUTANTS[name]():
            stack.enter_context(mock.patch.object(owner, attribute, replacement))
        yield


# ---- the follower ----


@mutant
def m01_a_follower_cuts_to_its_high_watermark() -> list[Patch]:
    follow = FollowerReplica.follow

    def mutated(self: FollowerReplica, view: LeaderAndIsr) -> Any:
        new = self.view is None or self.view.leader_epoch != view.leader_epoch
        actions = follow(self, view)
        if new and self.hw < self.end and self.phase in ("ready", "working"):
            self.phase = "working"
            return [Truncate(self.hw)]
        return actions

    return [(FollowerReplica, "follow", mutated)]


@mutant
def m03_a_follower_cuts_to_the_leaders_end_alone() -> list[Patch]:
    fetched = FollowerReplica.fetched

    def mutated(self: FollowerReplica, token: int, answer: Any) -> Any:
        ends = answer.diverging
        actions = fetched(self, token, answer)
        if ends is not None and actions and isinstance(actions[0], Truncate):
            return [Truncate(min(self.end, ends.end_offset))]
        return actions

    return [(FollowerReplica, "fetched", mutated)]


@mutant
def m04_a_fetch_continues_in_a_new_epoch_of_the_same_leader() -> list[Patch]:
    follow = FollowerReplica.follow

    def mutated(self: FollowerReplica, view: LeaderAndIsr) -> Any:
        if self.view is not None and self.view.leader == view.leader and self.phase == "fetching":
            self.view = view
            return []
        return follow(self, view)

    return [(FollowerReplica, "follow", mutated)]


@mutant
def m18_a_follower_takes_the_high_watermark_of_a_diverging_answer() -> list[Patch]:
    fetched = FollowerReplica.fetched

    def mutated(self: FollowerReplica, token: int, answer: Any) -> Any:
        actions = fetched(self, token, answer)
        if answer.diverging is not None and actions:
            hw = min(answer.hw, self.end)
            if hw > self.hw:
                self.hw = hw
                return [SetHighWatermark(hw), *actions]
        return actions

    return [(FollowerReplica, "fetched", mutated)]


@mutant
def m20_a_restarted_log_keeps_the_high_watermark() -> list[Patch]:
    restarted = FollowerReplica.restarted

    def mutated(self: FollowerReplica, offset: int) -> Any:
        before = self.hw
        actions = restarted(self, offset)
        self.hw = before
        return actions[1:]

    return [(FollowerReplica, "restarted", mutated)]


@mutant
def m31_answers_are_not_matched_with_their_question() -> list[Patch]:
    fetched = FollowerReplica.fetched

    def mutated(self: FollowerReplica, token: int, answer: Any) -> Any:
        offer = self._offer
        return fetched(self, token if offer is None else offer.token, answer)

    return [(FollowerReplica, "fetched", mutated)]


@mutant
def m38_out_of_range_cuts_without_asking() -> list[Patch]:
    refused = FollowerReplica._refused

    def mutated(self: FollowerReplica, offer: Any, code: int) -> Any:
        if code == 1:
            self._offer = None
            self.phase = "working"
            return [Truncate(self.start)]
        return refused(self, offer, code)

    return [(FollowerReplica, "_refused", mutated)]


@mutant
def m45_a_followers_high_watermark_goes_back() -> list[Patch]:
    def mutated(self: FollowerReplica) -> Any:
        self.hw = min(self._leader_hw, self.end)
        return [SetHighWatermark(self.hw)]

    return [(FollowerReplica, "_take_leaders_offsets", mutated)]


@mutant
def m48_a_follower_fetches_before_its_sync() -> list[Patch]:
    def mutated(self: FollowerReplica, actions: Any) -> Any:
        if self.ack < self.end:
            actions.append(Sync(self.end))
        self.phase = "ready"
        return actions

    return [(FollowerReplica, "_settle", mutated)]


@mutant
def m49_a_cut_takes_one_record_too_many() -> list[Patch]:
    fetched = FollowerReplica.fetched

    def mutated(self: FollowerReplica, token: int, answer: Any) -> Any:
        actions = fetched(self, token, answer)
        if actions and isinstance(actions[0], Truncate):
            return [Truncate(max(0, actions[0].offset - 1))]
        return actions

    return [(FollowerReplica, "fetched", mutated)]


@mutant
def m58_a_log_below_the_leaders_start_waits_for_ever() -> list[Patch]:
    failed = FollowerReplica.append_failed

    def mutated(self: FollowerReplica, reason: str, **flags: bool) -> Any:
        start, self._leader_start = self._leader_start, -1
        try:
            return failed(self, reason, **flags)
        finally:
            self._leader_start = start

    return [(FollowerReplica, "append_failed", mutated)]


# ---- the leader ----


@mutant
def m02_a_leader_never_answers_diverging() -> list[Patch]:
    judge = LeaderReplica.judge_fetch

    def mutated(self: LeaderReplica, *asked: Any) -> Any:
        verdict = judge(self, *asked)
        if verdict.diverging is not None:
            return SERVE if asked[3] <= self.end else leader_module.FetchVerdict(1)
        return verdict

    return [(LeaderReplica, "judge_fetch", mutated)]


def _expand_with(**changed: int) -> list[Patch]:
    expand = LeaderReplica._expand

    def mutated(self: LeaderReplica, progress: Progress, actions: Any) -> None:
        before = {name: getattr(self, name) for name in changed}
        for name, value in changed.items():
            setattr(self, name, value)
        expand(self, progress, actions)
        for name, value in before.items():
            setattr(self, name, value)

    return [(LeaderReplica, "_expand", mutated)]


@mutant
def m07_a_follower_joins_below_the_start_of_the_epoch() -> list[Patch]:
    return _expand_with(epoch_start=0)


@mutant
def m10_a_follower_joins_below_the_high_watermark() -> list[Patch]:
    return _expand_with(hw=0, epoch_start=0)


def _checks_of_expansion(kept: Callable[[Check], bool]) -> list[Patch]:
    propose = LeaderReplica._propose

    def mutated(self: LeaderReplica, state: Any, checks: Any, actions: Any) -> None:
        propose(self, state, tuple(check for check in checks if kept(check)), actions)

    return [(LeaderReplica, "_propose", mutated)]


@mutant
def m08_a_follower_joins_without_its_registration() -> list[Patch]:
    return [
        *_checks_of_expansion(lambda check: not check.path.startswith("/brokers/ids")),
        (leader_module, "is_eligible", lambda nodes, progress, key: progress.node in nodes),
    ]


@mutant
def m09_a_follower_joins_by_a_fetch_of_an_earlier_life() -> list[Patch]:
    return [
        *_checks_of_expansion(lambda check: check.path.startswith("/brokers/topics")),
        (leader_module, "is_eligible", lambda nodes, progress, key: progress.node in nodes),
    ]


@mutant
def m28_a_follower_joins_without_the_check_of_the_assignment() -> list[Patch]:
    return _checks_of_expansion(lambda check: not check.path.startswith("/brokers/topics"))


@mutant
def m11_the_high_watermark_ignores_a_member_that_is_being_added() -> list[Patch]:
    return [
        (
            LeaderReplica,
            "_counts",
            lambda self, progress, now: progress.node in self.view.isr,
        )
    ]


@mutant
def m12_a_shrink_counts_before_it_is_committed() -> list[Patch]:
    def mutated(self: LeaderReplica, progress: Progress, now: int) -> bool:
        state = self.view if self._pending is None else self._pending.state
        return progress.node in state.isr

    return [(LeaderReplica, "_counts", mutated)]


@mutant
def m13_a_new_state_does_not_move_the_high_watermark() -> list[Patch]:
    seen = LeaderReplica.seen

    def mutated(self: LeaderReplica, *new: Any) -> Any:
        with mock.patch.object(LeaderReplica, "_advance"):
            return seen(self, *new)

    return [(LeaderReplica, "seen", mutated)]


@mutant
def m14_the_high_watermark_moves_below_the_minimum() -> list[Patch]:
    advance = LeaderReplica._advance

    def mutated(self: LeaderReplica, now: int, actions: Any) -> None:
        view = self.view
        self.view = view._replace(min_isr=1)
        advance(self, now, actions)
        self.view = view

    return [(LeaderReplica, "_advance", mutated)]


@mutant
def m26_a_lost_answer_counts_as_a_refusal() -> list[Patch]:
    altered = LeaderReplica.altered

    def mutated(self: LeaderReplica, tag: object, outcome: Any, now: int) -> Any:
        if isinstance(outcome, Unknown):
            outcome = Refused(1, "version")
        return altered(self, tag, outcome, now)

    return [(LeaderReplica, "altered", mutated)]


@mutant
def m27_a_proposal_never_ends() -> list[Patch]:
    seen = LeaderReplica.seen

    def mutated(self: LeaderReplica, *new: Any) -> Any:
        pending = self._pending
        actions = seen(self, *new)
        self._pending = pending
        return actions

    return [(LeaderReplica, "seen", mutated)]


@mutant
def m32_a_fetch_of_a_later_epoch_is_served() -> list[Patch]:
    fence = LeaderReplica.fence

    def mutated(self: LeaderReplica, epoch: int) -> int:
        return 0 if epoch > self.view.leader_epoch else fence(self, epoch)

    return [(LeaderReplica, "fence", mutated)]


@mutant
def m33_only_the_end_of_the_log_counts_as_caught_up() -> list[Patch]:
    fetched = Progress.fetched

    def mutated(self: Progress, offset: int, **at: int) -> None:
        before = self.caught_up_ms
        fetched(self, offset, **at)
        if offset < at["leader_end"]:
            self.caught_up_ms = before

    return [(Progress, "fetched", mutated)]


@mutant
def m35_waits_outlive_the_epoch() -> list[Patch]:
    return [(LeaderReplica, "resign", lambda self: [])]


@mutant
def m39_a_duplicate_is_answered_at_once() -> list[Patch]:
    appended = LeaderReplica.appended

    def mutated(self: LeaderReplica, token: object, end: int, acks: int, now: int) -> Any:
        if end <= self.end:
            return [Answer(token, 0)]
        return appended(self, token, end, acks, now)

    return [(LeaderReplica, "appended", mutated)]


@mutant
def m41_the_leader_writes_without_a_condition() -> list[Patch]:
    propose = LeaderReplica._propose

    def mutated(self: LeaderReplica, state: Any, checks: Any, actions: Any) -> None:
        propose(self, state, checks, actions)
        pending = self._pending
        assert pending is not None
        first = pending.ops[0]
        assert isinstance(first, Set)
        self._pending = pending._replace(ops=(first._replace(version=ANY), *pending.ops[1:]))
        actions[-1] = Commit(self._pending.ops, self._pending)

    return [(LeaderReplica, "_propose", mutated)]


@mutant
def m42_progress_of_a_new_epoch_is_assumed() -> list[Patch]:
    begin = LeaderReplica.begin

    def mutated(self: LeaderReplica, now: int) -> Any:
        actions = begin(self, now)
        for progress in self._progress.values():
            progress.end = self.end
        self._advance(now, actions)
        return actions

    return [(LeaderReplica, "begin", mutated)]


@mutant
def m46_acks_all_is_answered_at_the_append() -> list[Patch]:
    appended = LeaderReplica.appended

    def mutated(self: LeaderReplica, token: object, end: int, acks: int, now: int) -> Any:
        return appended(self, token, end, 0, now)

    return [(LeaderReplica, "appended", mutated)]


@mutant
def m47_the_high_watermark_ignores_the_leaders_sync() -> list[Patch]:
    advance = LeaderReplica._advance

    def mutated(self: LeaderReplica, now: int, actions: Any) -> None:
        ack, self.ack = self.ack, self.end
        advance(self, now, actions)
        self.ack = ack

    return [(LeaderReplica, "_advance", mutated)]


@mutant
def m51_the_checks_of_an_expansion_are_before_the_write() -> list[Patch]:
    propose, altered = LeaderReplica._propose, LeaderReplica.altered

    def proposed(self: LeaderReplica, state: Any, checks: Any, actions: Any) -> None:
        propose(self, state, checks, actions)
        pending = self._pending
        assert pending is not None
        self._pending = pending._replace(ops=(*pending.ops[1:], pending.ops[0]))
        actions[-1] = Commit(self._pending.ops, self._pending)

    def mutated(self: LeaderReplica, tag: object, outcome: Any, now: int) -> Any:
        if isinstance(outcome, Refused) and self._pending is not None:
            last = outcome.op == len(self._pending.ops) - 1
            outcome = Refused(0 if last else 1, "version")
        return altered(self, tag, outcome, now)

    return [(LeaderReplica, "_propose", proposed), (LeaderReplica, "altered", mutated)]


@mutant
def m53_a_new_assignment_drops_members_of_the_set() -> list[Patch]:
    seen = LeaderReplica.seen

    def mutated(self: LeaderReplica, view: Any, assignment: Any, *rest: Any) -> Any:
        for node in [node for node in self._progress if node not in assignment.replicas]:
            del self._progress[node]
        return seen(self, view, assignment, *rest)

    return [(LeaderReplica, "seen", mutated)]


# ---- the role ----


@mutant
def m23_a_restarted_leader_continues_in_its_epoch() -> list[Patch]:
    seen = Replica.seen

    def mutated(self: Replica, view: LeaderAndIsr, *rest: Any) -> Any:
        if view.leader == self.me and self.broker_epoch >= 0:
            view = view._replace(leader_broker_epoch=self.broker_epoch)
        return seen(self, view, *rest)

    return [
        (Replica, "seen", mutated),
        *m24_the_controller_keeps_a_restarted_leader(),
    ]


@mutant
def m24_the_controller_keeps_a_restarted_leader() -> list[Patch]:
    def mutated(partition: Any, state: LeaderAndIsr) -> bool:
        return partition.live(state.leader) and state.leader in state.isr

    return [(decisions, "_leads", mutated)]


# ---- the state ----


@mutant
def m15_there_is_no_elr() -> list[Patch]:
    without = LeaderAndIsr.without
    return [
        (
            LeaderAndIsr,
            "without",
            lambda self, gone, lossy=(): without(self, gone, lossy)._replace(elr=()),
        )
    ]


@mutant
def m16_the_elr_is_not_emptied() -> list[Patch]:
    return [
        (
            LeaderAndIsr,
            "_elr_beside",
            lambda self, isr: tuple(node for node in self.elr if node not in isr),
        )
    ]


@mutant
def m40_an_election_keeps_the_epoch() -> list[Patch]:
    led_by = LeaderAndIsr.led_by
    return [
        (
            LeaderAndIsr,
            "led_by",
            lambda self, node, epoch: led_by(self, node, epoch)._replace(
                leader_epoch=self.leader_epoch
            ),
        )
    ]


@mutant
def m44_a_lower_minimum_keeps_the_elr() -> list[Patch]:
    return [
        (LeaderAndIsr, "with_minimum", lambda self, minimum: self._replace(min_isr=minimum)),
        (LeaderAndIsr, "check", lambda self, replicas: None),
    ]


# ---- the controller ----


@mutant
def m17_lossy_restarts_are_ignored() -> list[Patch]:
    def damaged(self: Any, node: int) -> bool:
        found = self.image.nodes.get(node)
        return found is not None and self.key in found.offline

    return [(decisions._Partition, "damaged", damaged)]


@mutant
def m22_the_controller_writes_without_its_epoch() -> list[Patch]:
    step = Controller.step

    def mutated(self: Controller, image: Any) -> Any:
        commits = step(self, image)
        return [
            Commit((Check(commit.ops[0].path, ANY), *commit.ops[1:]), commit.tag)
            for commit in commits
        ]

    return [(Controller, "step", mutated)]


@mutant
def m29_a_move_is_done_with_one_target_in_sync() -> list[Patch]:
    moved = decisions._moved

    def mutated(partition: Any, state: LeaderAndIsr) -> Any:
        assignment = partition.assignment
        ready = set(assignment.target) & set(state.isr)
        if assignment.moving and ready and len(assignment.target) >= state.min_isr:
            kept = decisions._kept(partition, state, assignment.target)
            return partition.write_both(assignment.completed(), kept, "the move is complete")
        return moved(partition, state)

    return [(decisions, "_moved", mutated)]


@mutant
def m37_an_election_makes_every_live_replica_a_member() -> list[Patch]:
    elected = decisions._elected

    def mutated(partition: Any, state: LeaderAndIsr, *rest: Any) -> Any:
        changed, reason = elected(partition, state, *rest)
        if changed.leader >= 0:
            live = [node for node in partition.assignment.replicas if partition.live(node)]
            changed = changed._replace(isr=tuple(live), elr=())
        return changed, reason

    return [(decisions, "_elected", mutated)]


@mutant
def m43_any_live_replica_may_lead() -> list[Patch]:
    elected = decisions._elected

    def mutated(partition: Any, state: LeaderAndIsr, unclean: Any, reason: str) -> Any:
        leader = partition.first(partition.assignment.replicas)
        if leader is None:
            return elected(partition, state, unclean, reason)
        live = {node for node in state.isr if partition.live(node)} | {leader}
        changed = partition.lead(state, leader)._replace(isr=tuple(sorted(live)))
        return changed._replace(elr=(), recovering=False), "any"

    return [(decisions, "_elected", mutated)]


@mutant
def m52_the_lossy_flag_is_never_cleared() -> list[Patch]:
    return [(controller_module, "holds_damaged", lambda image, key, node: True)]


@mutant
def m54_a_move_drops_a_replica_without_a_new_epoch() -> list[Patch]:
    moved = decisions._moved

    def mutated(partition: Any, state: LeaderAndIsr) -> Any:
        decision = moved(partition, state)
        if decision is not None and decision.reason.startswith("replicas move to"):
            return decision._replace(ops=decision.ops[:1])
        return decision

    return [(decisions, "_moved", mutated)]


@mutant
def m59_a_failed_log_leaves_without_a_new_epoch() -> list[Patch]:
    repaired = decisions._repaired

    def mutated(partition: Any, state: LeaderAndIsr, unclean: Any) -> Any:
        changed, reason = repaired(partition, state, unclean)
        if changed.leader == state.leader:
            changed = changed._replace(leader_epoch=state.leader_epoch)
        return changed, reason

    return [(decisions, "_repaired", mutated)]


@mutant
def m55_lossy_is_cleared_for_another_life() -> list[Patch]:
    cleared = Controller._cleared

    def mutated(self: Controller, image: Any) -> Any:
        for subject, decision in cleared(self, image):
            ops = tuple(op for op in decision.ops if not isinstance(op, Check))
            yield subject, decision._replace(ops=ops)

    return [(Controller, "_cleared", mutated)]


@mutant
def m56_a_registration_is_changed_for_another_life() -> list[Patch]:
    changed = registration.changed_registration

    def mutated(*given: Any, **flags: Any) -> Any:
        return changed(*given, **flags)[1:]

    return [
        (node_module, "changed_registration", mutated),
        (registration, "changed_registration", mutated),
    ]


@mutant
def m57_an_outcome_of_an_earlier_reign_counts() -> list[Patch]:
    decided = Controller.decided

    def mutated(self: Controller, tag: Any, *rest: Any) -> None:
        decided(self, tag._replace(epoch=self.epoch), *rest)

    return [(Controller, "decided", mutated)]


# ---- what the machines ask of a log and of a shell ----


@mutant
def m05_an_epoch_without_records_is_not_noted() -> list[Patch]:
    def mutated(self: SimulatedLog, epoch: int) -> None:
        self.promised_epoch = epoch

    return [(SimulatedLog, "begin_epoch", mutated)]


@mutant
def m21_a_close_raises_the_high_watermark() -> list[Patch]:
    shut_down = SimulatedNode.shut_down

    def mutated(self: SimulatedNode) -> None:
        logs = [shell.log for shell in self.shells.values()]
        shut_down(self)
        for log in logs:
            log.checkpointed = log.end_offset

    return [(SimulatedNode, "shut_down", mutated)]


@mutant
def m34_the_producer_state_is_not_cut() -> list[Patch]:
    truncate = SimulatedLog.truncate

    def mutated(self: SimulatedLog, offset: int) -> int:
        producers = self.producers
        end = truncate(self, offset)
        self.producers = producers
        return end

    return [(SimulatedLog, "truncate", mutated)]


@mutant
def m36_a_batch_that_straddles_the_start_is_refused() -> list[Patch]:
    append = SimulatedLog.append_copy

    def mutated(self: SimulatedLog, batches: Any, expect_end: int) -> int:
        from logstore.testing.simulation.disk import InvalidAnswerError

        if batches and batches[0].base_offset < self.end_offset:
            raise InvalidAnswerError("it straddles")
        return append(self, batches, expect_end)

    return [(SimulatedLog, "append_copy", mutated)]


@mutant
def m50_sequences_are_not_checked() -> list[Patch]:
    def mutated(
        self: SimulatedLog, epoch: int, values: Any, pid: int, pe: int, seq: int
    ) -> tuple[int, int]:
        batch = Batch(self.end_offset, epoch, values, pid, pe, seq)
        self._add(batch)
        return batch.base_offset, batch.next_offset

    return [(SimulatedLog, "append", mutated)]


# The first seed whose run fails with the mutant.
KILLERS: dict[str, int] = {
    "m01_a_follower_cuts_to_its_high_watermark": 1,  # I4
    "m02_a_leader_never_answers_diverging": 1,  # I18
    "m03_a_follower_cuts_to_the_leaders_end_alone": 6,  # I18
    "m07_a_follower_joins_below_the_start_of_the_epoch": 33,  # I4
    "m10_a_follower_joins_below_the_high_watermark": 0,  # I4
    "m11_the_high_watermark_ignores_a_member_that_is_being_added": 3,  # I4
    "m12_a_shrink_counts_before_it_is_committed": 1,  # I7
    "m14_the_high_watermark_moves_below_the_minimum": 4,  # I4
    "m15_there_is_no_elr": 1,  # I18
    "m16_the_elr_is_not_emptied": 3,  # AssertionError
    "m17_lossy_restarts_are_ignored": 171,  # I3
    "m18_a_follower_takes_the_high_watermark_of_a_diverging_answer": 1,  # I13
    "m21_a_close_raises_the_high_watermark": 19,  # I13
    "m23_a_restarted_leader_continues_in_its_epoch": 1,  # I1
    "m24_the_controller_keeps_a_restarted_leader": 1,  # I18
    "m26_a_lost_answer_counts_as_a_refusal": 74,  # I6
    "m27_a_proposal_never_ends": 0,  # I18
    "m34_the_producer_state_is_not_cut": 9,  # I10
    "m35_waits_outlive_the_epoch": 1,  # I18
    "m36_a_batch_that_straddles_the_start_is_refused": 7,  # I18
    "m37_an_election_makes_every_live_replica_a_member": 1,  # I4
    "m38_out_of_range_cuts_without_asking": 7,  # I18
    "m39_a_duplicate_is_answered_at_once": 0,  # I10
    "m40_an_election_keeps_the_epoch": 0,  # I1
    "m41_the_leader_writes_without_a_condition": 52,  # I2
    "m42_progress_of_a_new_epoch_is_assumed": 4,  # I4
    "m43_any_live_replica_may_lead": 1,  # I4
    "m44_a_lower_minimum_keeps_the_elr": 86,  # I4
    "m45_a_followers_high_watermark_goes_back": 16,  # I8
    "m46_acks_all_is_answered_at_the_append": 0,  # I10
    "m47_the_high_watermark_ignores_the_leaders_sync": 1,  # I4
    "m48_a_follower_fetches_before_its_sync": 1,  # I4
    "m49_a_cut_takes_one_record_too_many": 1,  # I13
    "m50_sequences_are_not_checked": 0,  # I10
    "m52_the_lossy_flag_is_never_cleared": 4,  # I18
}


def main(names: list[str], limit: int = 1000) -> None:
    """Look for the first seed that kills each mutant."""
    for name in names or MUTANTS:
        with planted(name):
            for seed in range(limit):
                try:
                    simulate(seed)
                except SimulationFailure as failure:
                    print(f'    "{name}": {seed},  # {failure.name}', flush=True)
                    break
            else:
                print(f"    # {name} survives {limit} seeds", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
