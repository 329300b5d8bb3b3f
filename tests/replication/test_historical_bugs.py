"""Bugs that Kafka and others had, each as a scenario that this cluster must survive.

The ticket is in the docstring.  The world is driven by hand; the oracle of the simulation checks
its invariants at every step, so a test that only runs proves something too.
"""

from __future__ import annotations

from logstore.log.epochs import EpochEnd
from logstore.replication.machines import registration
from logstore.replication.machines.follower import Fetched, Offer
from logstore.replication.machines.image import (
    CONTROLLER,
    CONTROLLER_EPOCH,
    REASSIGN,
    Registration,
    as_json,
    broker_path,
    config_path,
    state_path,
    topic_path,
)
from logstore.replication.machines.leader_and_isr import NO_LEADER
from logstore.replication.metadata import (
    ANY,
    Check,
    Commit,
    Committed,
    Create,
    Delete,
    Refused,
    Set,
    Unknown,
)
from logstore.testing.simulation.network import CLIENT, Exchange
from tests.replication.kit import KEY, Cluster, Leading


def test_a_restarted_follower_keeps_what_is_beyond_its_high_watermark() -> None:
    """KAFKA-1211, KIP-101: it cut to its high watermark, led, and a committed record was lost."""
    cluster = Cluster()
    value = cluster.commit()
    follower = cluster.followers[0]
    cluster.log(follower).checkpointed = 0
    cluster.kill(follower)
    cluster.start(follower)
    cluster.until(lambda: cluster.node(follower).registered)
    assert cluster.hw(follower) == 0 or value in cluster.values(follower)
    assert value in cluster.values(follower)
    cluster.kill(cluster.state.leader)
    cluster.until(lambda: cluster.leader is not None)
    cluster.settle()
    assert value in cluster.truth


def test_the_tails_of_two_leaders_end_up_equal_after_both_crashed() -> None:
    """KAFKA-1211, KIP-101: one offset had two records for ever."""
    cluster = Cluster(replicas=2, min_isr=1)
    cluster.commit()
    first = cluster.state.leader
    (second,) = cluster.followers
    cluster.cut(first, second)
    one = cluster.append(first)
    cluster.elect(second)
    other = cluster.append(second)
    for node in (first, second):
        cluster.cut_power(node)
    cluster.mend()
    for node in (first, second):
        cluster.start(node)
    cluster.settle()
    assert cluster.values(first) == cluster.values(second)
    assert not {one, other} <= set(cluster.truth)


def test_an_epoch_that_the_leader_never_had_is_cut_in_rounds() -> None:
    """KAFKA-6361, KIP-279: fast elections; the leader's answer is about an older epoch."""
    cluster = Cluster()
    cluster.commit()
    a, b, c = cluster.state.leader, *cluster.followers
    for node in (a, b, c):
        cluster.cut(node)
    tails = {}
    for turn, node in enumerate((b, a, b, a, b)):
        cluster.elect(node)
        tails[turn] = cluster.append(node)
    cluster.mend()
    cluster.run(3000)
    cluster.settle()
    for node in (a, b, c):
        assert cluster.values(node) == cluster.truth
    assert [tails[0], tails[2], tails[4]] == cluster.truth[1:]
    assert cluster.world.marks["truncation rounds"] >= 1


def test_a_new_epoch_of_the_same_leader_compares_again() -> None:
    """KAFKA-7164: the follower missed epochs and continued without a comparison."""
    cluster = Cluster()
    cluster.commit()
    a, b = cluster.state.leader, cluster.followers[0]
    for node in (a, *cluster.followers):
        cluster.cut(node)
    cluster.elect(b)
    lost = cluster.append(b)
    cluster.elect(a)
    cluster.append(a)
    cluster.elect(a)
    cluster.mend()
    cluster.run(2000)
    cluster.settle()
    assert lost not in cluster.truth
    assert cluster.values(b) == cluster.truth


def test_an_epoch_without_records_is_known_to_followers() -> None:
    """KAFKA-7415: the epoch was noted with its first record, too late for a comparison."""
    cluster = Cluster()
    cluster.commit()
    a, b, c = cluster.state.leader, *cluster.followers
    for node in (a, b, c):
        cluster.cut(node)
    one = cluster.append(a)  # in the first epoch, at an offset that b fills in another one
    cluster.elect(b)
    epoch = cluster.state.leader_epoch
    assert cluster.log(b).epochs.latest == epoch
    cluster.mend()
    cluster.run(2000)
    other = cluster.commit()
    cluster.settle()
    assert other in cluster.truth
    assert one not in cluster.truth


def test_a_cut_at_the_end_still_drops_epochs() -> None:
    """KAFKA-10706: an epoch without records stayed after a cut, and cuts were repeated for ever."""
    cluster = Cluster()
    cluster.commit()
    a, b = cluster.state.leader, cluster.followers[0]
    cluster.cut(b)
    cluster.elect(b)  # notes an epoch at its end, and writes nothing
    noted = cluster.state.leader_epoch
    cluster.elect(a)
    cluster.mend()
    cluster.commit()
    cluster.settle()
    assert noted not in dict(cluster.log(b).epochs.entries)
    assert cluster.values(b) == cluster.truth


def test_epoch_zero_survives_a_restart_of_leader_and_follower() -> None:
    """KAFKA-10432: epoch 0 was taken for none."""
    cluster = Cluster()
    cluster.commit()
    for node in list(cluster.world.nodes):
        cluster.kill(node)
        cluster.start(node)
    cluster.until(lambda: cluster.leader is not None)
    assert all(cluster.log(node).epochs.entries[0] == (0, 0) for node in cluster.world.nodes)
    cluster.commit()
    cluster.settle()


def test_no_follower_joins_before_the_start_of_the_epoch() -> None:
    """KAFKA-7128: it joined at the high watermark, below the end of what was committed."""
    leading = Leading(end=10, hw=6, isr=(1,), min_isr=2)
    assert leading.fetch(2, 8)[1] == []
    assert leading.fetch(2, 10)[1] != []


def test_a_node_without_registration_cannot_join() -> None:
    """KAFKA-13916, KIP-841: a dead broker was put into the in-sync set."""
    leading = Leading(isr=(1, 2))
    del leading.nodes[3]
    assert leading.fetch(3, 10, broker_epoch=30)[1] == []


def test_an_unwilling_node_cannot_join() -> None:
    """KAFKA-14140: a broker that was shutting down was put into the in-sync set."""
    cluster = Cluster(lag_ms=400)
    leader, follower = cluster.state.leader, cluster.followers[0]
    cluster.cut(follower)
    cluster.append(leader)
    cluster.until(lambda: follower not in cluster.state.isr)
    cluster.node(follower).unwilling = True
    cluster.node(follower).write_registration()
    cluster.mend()
    cluster.run(3000)
    assert follower not in cluster.state.isr
    cluster.node(follower).unwilling = False
    cluster.node(follower).write_registration()
    cluster.until(lambda: follower in cluster.state.isr)


def test_a_fetch_of_an_earlier_life_admits_no_node() -> None:
    """KIP-903: a restart lost records, and a fetch from before it let the node join."""
    leading = Leading(isr=(1, 2))
    leading.fetch(2, 10)
    (commit,) = [a for a in leading.fetch(3, 10)[1] if isinstance(a, Commit)]
    paths = {op.path: op for op in commit.ops if isinstance(op, Check)}
    assert paths["/logstore/epochs/3"].version == 30
    leading = Leading(isr=(1, 2))
    leading.nodes[3] = leading.nodes[3]._replace(epoch=31)
    verdict, actions = leading.fetch(3, 10, broker_epoch=30)
    assert (verdict.code, actions) == (6, [])


def test_one_look_at_the_progress_decides() -> None:
    """KAFKA-15221: two fetches of two lives raced; one gave the offset, the other the epoch."""
    leading = Leading(isr=(1, 2))
    leading.fetch(2, 10)
    leading.nodes[3] = leading.nodes[3]._replace(epoch=31)
    leading.fetch(3, 4, broker_epoch=31)
    verdict, actions = leading.fetch(3, 10, broker_epoch=30)
    assert (verdict.code, actions) == (6, [])
    assert leading.machine.progress_of(3).end == 4  # type: ignore[union-attr]


def test_the_high_watermark_waits_for_the_maximal_in_sync_set() -> None:
    """KAFKA-8836, KIP-497: it moved over a smaller set than the controller's."""
    leading = Leading(isr=(1, 2), hw=10)
    leading.fetch(2, 10)
    assert any(isinstance(action, Commit) for action in leading.fetch(3, 10)[1])
    leading.machine.appended("a", 11, -1, now=0)
    leading.fetch(2, 11)
    assert leading.machine.hw == 10
    leading.fetch(3, 11)
    assert leading.machine.hw == 11


def test_a_shrink_counts_only_when_it_is_committed() -> None:
    """KAFKA-8836: the leader did without a member that the tree still had."""
    cluster = Cluster(lag_ms=400, min_isr=1)
    leader, follower = cluster.state.leader, cluster.followers[0]
    cluster.cut(follower)
    cluster.node(leader).session.cut()  # type: ignore[union-attr]
    value = cluster.append(leader)
    cluster.run(1500)
    assert value not in cluster.truth
    assert follower in cluster.state.isr


def test_a_confirmed_shrink_moves_the_high_watermark() -> None:
    """KAFKA-13091: it moved with the next fetch only."""
    leading = Leading()
    leading.machine.appended("a", 11, -1, now=0)
    leading.fetch(2, 11, now=5000)
    leading.machine.tick(5000)
    view = leading.machine.view.without([3])._replace(version=6)
    leading.machine.seen(view, leading.machine.assignment, 7, 5000)
    assert leading.machine.hw == 11


def test_nothing_is_committed_below_the_minimum() -> None:
    """KAFKA-15583: the high watermark moved while the in-sync set was too small."""
    cluster = Cluster(lag_ms=400)
    leader = cluster.state.leader
    cluster.cut(leader)
    value = cluster.append(leader)
    cluster.until(lambda: len(cluster.state.isr) < 2)
    cluster.run(500)
    assert value not in cluster.truth
    assert set(cluster.state.elr) == set(cluster.followers)


def test_the_last_replica_loses_its_cache_and_no_committed_record_is_lost() -> None:
    """KAFKA-15332, KIP-966: the last one standing was elected, and the others cut their logs."""
    cluster = Cluster(fsync=False, lag_ms=400)
    value = cluster.commit()
    last, *others = cluster.state.leader, *cluster.followers
    for node in others:
        cluster.kill(node)
    cluster.until(lambda: cluster.state.isr == (last,))
    assert len(cluster.state.elr) == 1  # the one that left when the set became too small
    cluster.cut_power(last)
    cluster.log(last).batches.clear()
    cluster.log(last)._ends.clear()
    cluster.start(last)
    cluster.run(4000)
    assert cluster.state.leader == NO_LEADER
    for node in others:
        cluster.start(node)
    cluster.settle()
    assert value in cluster.truth
    assert value in cluster.values(last)


def test_a_lossy_restart_leaves_every_set_first() -> None:
    """KAFKA-18106: an unclean restart changed no state, and the node led without its records."""
    cluster = Cluster(fsync=False, replicas=2)
    value = cluster.commit()
    other, node = cluster.state.leader, cluster.followers[0]
    cluster.cut_power(node)
    cluster.log(node).batches.clear()
    cluster.log(node)._ends.clear()
    cluster.until(lambda: cluster.state.elr == (node,))
    cluster.kill(other)
    cluster.start(node)
    cluster.until(lambda: node not in (*cluster.state.isr, *cluster.state.elr))
    cluster.run(3000)
    assert cluster.state.leader == NO_LEADER
    cluster.start(other)
    cluster.settle()
    assert value in cluster.values(node)


def test_a_diverging_answer_moves_no_watermark() -> None:
    """KAFKA-14704: the follower took the high watermark before it cut its log."""
    cluster = Cluster()
    cluster.commit()
    a, b = cluster.state.leader, cluster.followers[0]
    cluster.cut(b)
    cluster.elect(b)
    cluster.append(b)
    shell = cluster.node(b).shells[KEY]
    before = shell.machine.high_watermark
    cluster.elect(a)
    follower = shell.machine.follower
    cluster.until(lambda: shell.machine.follower is not None)
    follower = shell.machine.follower
    assert follower is not None
    cluster.until(lambda: follower.phase == "fetching")
    follower.fetched(follower._offer.token, Fetched(0, 99, 0, EpochEnd(0, before)))  # type: ignore
    assert follower.hw == before


def test_a_log_that_begins_again_moves_its_start_and_its_high_watermark() -> None:
    """KAFKA-9491, KAFKA-3978: the high watermark was below the start, or -1."""
    cluster = Cluster(lag_ms=400)
    leader, follower = cluster.state.leader, cluster.followers[0]
    cluster.cut(follower)
    for _ in range(3):
        cluster.append(leader)
    cluster.until(lambda: follower not in cluster.state.isr)
    cluster.until(lambda: cluster.hw(leader) == 3)
    cluster.world.network.request(
        CLIENT, leader, "delete_records", (KEY, 2), lambda code: None, lambda: None
    )
    cluster.run(50)
    cluster.mend()
    cluster.until(lambda: cluster.log(follower).start_offset == 2)
    assert cluster.hw(follower) >= 2
    cluster.settle()


def test_a_close_writes_the_high_watermark_that_it_has() -> None:
    """KAFKA-858, 851, 681: the checkpoint was the end of the log."""
    cluster = Cluster()
    cluster.commit()
    a, b = cluster.state.leader, cluster.followers[0]
    cluster.cut(b)
    cluster.elect(b)
    cluster.append(b)
    hw = cluster.hw(b)
    cluster.elect(a)
    cluster.node(b).shut_down()
    assert cluster.log(b).checkpointed == hw
    cluster.mend()
    cluster.start(b)
    cluster.settle()


def test_the_write_of_a_deposed_controller_fails_whole() -> None:
    """KAFKA-6082: a zombie controller changed the assignment."""
    cluster = Cluster()
    tree = cluster.world.tree
    found = tree.nodes[CONTROLLER_EPOCH]
    before = cluster.state
    tree.apply([Delete(CONTROLLER)])
    cluster.until(lambda: tree.nodes[CONTROLLER_EPOCH][1] > found[1])
    forged = before.leaderless()
    ops = [
        Check(CONTROLLER_EPOCH, found[1]),
        Check(topic_path("t"), ANY),
        Set(state_path(KEY), forged.encode(), before.version),
    ]
    assert tree.apply(ops) == Refused(0, "version")
    cluster.until(lambda: sum(n.controller.active for n in cluster.world.nodes.values()) == 1)
    (active,) = [node for node in cluster.world.nodes.values() if node.controller.active]
    active.controller.touched(None, active.image)
    for commit in active.controller.step(active.image):
        assert commit.ops[0] == Check(CONTROLLER_EPOCH, tree.nodes[CONTROLLER_EPOCH][1])
    # Its own writes have the check too.
    leader = cluster.state.leader
    cluster.kill(leader)
    cluster.until(lambda: cluster.state.leader != leader)
    cluster.settle()


def test_a_restarted_leader_waits_for_a_new_epoch() -> None:
    """KAFKA-7235, KIP-380: it continued in its old epoch after it had lost its tail."""
    cluster = Cluster()
    cluster.commit()
    leader, epoch = cluster.state.leader, cluster.state.leader_epoch
    cluster.kill(leader)
    cluster.start(leader)
    cluster.until(lambda: cluster.node(leader).registered)
    assert cluster.node(leader).shells[KEY].machine.leader is None
    cluster.until(lambda: cluster.leader is not None)
    assert cluster.state.leader_epoch > epoch


def test_a_lost_answer_to_a_change_of_the_set_is_settled() -> None:
    """KAFKA-1382: "cached version not equal", for ever."""
    cluster = Cluster(lag_ms=400)
    leader, follower = cluster.state.leader, cluster.followers[0]
    session = cluster.node(leader).session
    assert session is not None
    cluster.world.tree.faults = cluster.world.tree.faults._replace(lost=1.0)
    cluster.cut(follower)
    cluster.append(leader)
    cluster.until(lambda: follower not in cluster.state.isr, 60_000)
    cluster.mend()
    cluster.until(lambda: follower in cluster.state.isr, 60_000)
    cluster.settle()


def test_a_lost_answer_counts_as_applied_until_it_is_known() -> None:
    """KAFKA-1382, and the reason why the write is the first op of an expansion."""
    leading = Leading(isr=(1, 2))
    leading.fetch(2, 10)
    (commit,) = [a for a in leading.fetch(3, 10)[1] if isinstance(a, Commit)]
    assert isinstance(commit.ops[0], Set)
    leading.machine.altered(commit.tag, Unknown(), 0)
    leading.machine.appended("a", 11, -1, now=0)
    leading.nodes[3] = leading.nodes[3]._replace(unwilling=True)
    leading.fetch(2, 11)
    assert leading.machine.hw == 10
    leading.machine.altered(commit.tag, Refused(0, "version"), 0)
    assert leading.machine.hw == 10
    leading.machine.altered(commit.tag, Refused(3, "version"), 0)
    assert leading.machine.hw == 11


def test_the_in_sync_set_stays_within_the_assignment() -> None:
    """KAFKA-9672, 1097, 1170: a replica that was moved away joined the set."""
    leading = Leading(isr=(1, 2))
    leading.fetch(2, 10)
    (commit,) = [a for a in leading.fetch(3, 10)[1] if isinstance(a, Commit)]
    cluster = Cluster()
    topic = cluster.world.oracle.assignments
    assert topic is not None
    assert Check(topic_path("t"), 7) in commit.ops
    cluster.world.tree.apply([Set(topic_path("t"), topic.encode(), ANY)])
    stale = Check(topic_path("t"), topic.version)
    state = cluster.state
    ops = [Set(state_path(KEY), state.encode(), state.version), stale]
    assert cluster.world.tree.apply(ops) == Refused(1, "version")


def test_a_move_waits_for_every_target() -> None:
    """KAFKA-15665: it was complete when one target was in sync."""
    cluster = Cluster(nodes=5)
    cluster.commit()
    moved = [node for node in cluster.world.nodes if node not in cluster.state.isr]
    kept = cluster.state.isr[0]
    cluster.cut(moved[0])
    row = {"topic": "t", "partition": 0, "replicas": [*moved, kept]}
    data = as_json({"version": 1, "partitions": [row]})
    cluster.world.tree.apply([Create(REASSIGN, data)])
    cluster.until(lambda: moved[1] in cluster.state.isr)
    cluster.run(3000)
    assert REASSIGN in cluster.world.tree.nodes
    assert len(cluster.state.isr) == 4
    cluster.mend()
    cluster.until(lambda: set(cluster.state.isr) == {*moved, kept})
    cluster.settle()


def test_an_answer_of_an_earlier_epoch_changes_nothing() -> None:
    """KAFKA-13207, KAFKA-8012: an answer to a fetch of the last role cut the log."""
    cluster = Cluster()
    cluster.commit()
    follower = cluster.followers[0]
    shell = cluster.node(follower).shells[KEY]
    machine = shell.machine.follower
    assert machine is not None
    cluster.until(lambda: machine.phase == "fetching")
    offer = machine._offer
    assert offer is not None
    cluster.elect(cluster.state.leader)
    cluster.until(lambda: machine.phase == "fetching" and machine._offer != offer)
    assert machine.fetched(offer.token, Fetched(0, 9, 0, EpochEnd(0, 0))) == []
    assert cluster.log(follower).end_offset == 1


def test_a_zombie_leader_commits_nothing() -> None:
    """KAFKA-9338, 6880, KIP-320: a deposed leader was believed."""
    cluster = Cluster()
    cluster.commit()
    zombie = cluster.state.leader
    cluster.world.nemesis.apart.add(zombie)
    cluster.node(zombie).session.cut()  # type: ignore[union-attr]
    cluster.until(lambda: cluster.state.leader != zombie)
    cluster.until(lambda: cluster.leader is not None)
    pending = cluster.send(to=zombie)
    cluster.run(700)
    assert pending.attempts
    assert cluster.hw(zombie) == 1
    later = cluster.world.nodes[zombie].shells[KEY].machine.leader
    assert later is not None
    assert later.fence(cluster.state.leader_epoch) == 75
    cluster.settle()


def test_a_stranger_is_told_so() -> None:
    """KAFKA-13837: the fetch of a node that has no replica was answered."""
    leading = Leading()
    assert leading.fetch(4, 10, broker_epoch=40)[0].code == 75


def test_steady_small_appends_change_no_set() -> None:
    """KAFKA-4485: followers that never reached the end left and joined the set."""
    leading = Leading()
    for turn in range(1, 100):
        end = leading.machine.end
        leading.machine.appended(turn, end + 1, -1, now=turn * 300)
        for node in (2, 3):
            leading.fetch(node, end, now=turn * 300 + 1)  # never the end of the log
        assert leading.machine.tick(turn * 300 + 2) == []


def test_an_idle_partition_changes_no_set() -> None:
    """KAFKA-7152: replicas left the set when nothing was appended."""
    cluster = Cluster(lag_ms=400, fetch_wait_ms=2000)
    cluster.commit()
    version = cluster.state.version
    cluster.run(10_000)
    assert cluster.state.version == version


def test_a_new_follower_starts_inside_a_batch() -> None:
    """KAFKA-6975: the leader's start was inside a batch, and a new follower refused it."""
    cluster = Cluster(lag_ms=400)
    leader, follower = cluster.state.leader, cluster.followers[0]
    cluster.cut(follower)
    producer = cluster.world.clients.producers[0]
    producer.send(KEY, target=leader, count=4)
    cluster.until(lambda: follower not in cluster.state.isr)
    cluster.until(lambda: cluster.hw(leader) == 4)
    cluster.world.network.request(
        CLIENT, leader, "delete_records", (KEY, 2), lambda code: None, lambda: None
    )
    cluster.run(50)
    cluster.mend()
    cluster.until(lambda: follower in cluster.state.isr)
    assert cluster.log(follower).start_offset == 2
    assert cluster.log(follower).batches[0].base_offset == 0


def test_decide_uses_only_the_tree() -> None:
    """KAFKA-708, 849, 948: a controller wrote what it remembered, and emptied a set."""
    cluster = Cluster()
    cluster.commit()
    leader = cluster.state.leader
    old = next(node for node in cluster.world.nodes.values() if node.controller.active)
    if old.id == leader:
        cluster.elect(cluster.followers[0])
    cluster.kill(old.id)
    cluster.until(lambda: any(n.controller.active for n in cluster.world.nodes.values()))
    assert cluster.state.isr
    cluster.start(old.id)
    cluster.settle()


def test_out_of_range_after_a_move_cuts_nothing_committed() -> None:
    """KAFKA-2143: a follower cut its log to nothing while leaders moved."""
    cluster = Cluster()
    for _ in range(3):
        cluster.commit()
    follower = cluster.followers[0]
    cluster.until(lambda: cluster.log(follower).end_offset == 3)
    machine = cluster.node(follower).shells[KEY].machine.follower
    assert machine is not None
    cluster.until(lambda: machine.phase == "fetching")
    offer = machine._offer
    assert offer is not None
    cluster.node(follower).shells[KEY].do(machine.fetched(offer.token, Fetched(1)))
    cluster.run(500)
    assert cluster.log(follower).end_offset == 3


def test_a_retry_at_the_new_leader_gets_its_first_offset() -> None:
    """Redpanda 3039, 3003: a retry after a fail-over was appended again."""
    cluster = Cluster()
    cluster.commit()
    first, second = cluster.state.leader, cluster.followers[0]
    pending = cluster.send()
    log = cluster.log(second)
    cluster.until(lambda: log.end_offset == 2)
    cluster.kill(first)
    cluster.until(lambda: cluster.leader is not None)
    cluster.until(lambda: cluster.world.clients.idle, 60_000)
    cluster.start(first)
    cluster.settle()
    assert cluster.truth.count(pending.values[0]) == 1


def test_a_cut_takes_back_what_producers_are_known_for() -> None:
    """KAFKA-12153: producer state outlived the records that were cut."""
    cluster = Cluster()
    cluster.commit()
    a, b, c = cluster.state.leader, *cluster.followers
    cluster.cut(a)
    pending = cluster.send(to=a)
    log = cluster.log(a)
    cluster.until(lambda: log.end_offset == 2)
    cluster.elect(b)
    cluster.mend()
    cluster.until(lambda: cluster.world.clients.idle, 60_000)
    cluster.elect(a if a in cluster.state.isr else c)
    cluster.commit()
    cluster.settle()
    assert cluster.truth.count(pending.values[0]) == 1


def test_a_lower_minimum_does_not_keep_the_elr() -> None:
    """KIP-966: a replica of the ELR could have been elected after others committed without it."""
    cluster = Cluster(lag_ms=400)
    leader, *others = cluster.state.leader, *cluster.followers
    cluster.cut(leader)
    cluster.append(leader)
    cluster.until(lambda: set(cluster.state.elr) == set(others))
    data = b'{"version":1,"config":{"min.insync.replicas":"1"}}'
    cluster.world.tree.apply([Set(config_path("topics", "t"), data, ANY)])
    cluster.until(lambda: cluster.state.min_isr == 1)
    assert cluster.state.elr == ()
    value = cluster.append(leader)
    cluster.until(lambda: value in cluster.truth)
    cluster.settle()


def test_a_registration_of_another_life_is_not_changed() -> None:
    """Found by the simulation: versions start again with each life, so two lives look the same."""
    cluster = Cluster()
    node = cluster.followers[0]
    tree = cluster.world.tree
    old = Registration.decode(node, *tree.nodes[broker_path(node)][:2])
    cluster.kill(node)
    cluster.start(node)
    cluster.until(lambda: cluster.node(node).registered)
    new = tree.nodes[broker_path(node)]
    assert new[1] == old.version
    ops = registration.changed_registration(old, 0, unwilling=True)
    assert tree.apply(ops) == Refused(0, "version")
    current = Registration.decode(node, *new[:2])
    ops = registration.changed_registration(current, 0, unwilling=True)
    assert isinstance(tree.apply(ops), Committed)


def test_a_late_fetch_of_a_log_that_was_replaced_admits_no_node() -> None:
    """As KIP-903, without a restart: broker epoch and leader epoch were those of the old log."""
    cluster = Cluster()
    cluster.commit()
    leader, node = cluster.state.leader, cluster.followers[0]
    follower = cluster.node(node).shells[KEY].machine.follower
    assert follower is not None
    cluster.until(lambda: follower.phase == "fetching" and follower.end == 1)
    late = follower._offer
    assert late is not None
    cluster.world.oracle.truths[KEY].lossy.add(node)
    cluster.node(node).shells[KEY].fail("its disk failed")
    cluster.world.network.cut.add((node, leader))
    cluster.until(lambda: cluster.world.marks.get("replaced", 0) == 1)
    registered = broker_path(node)
    cluster.until(lambda: b'"offline":[]' in cluster.world.tree.nodes[registered][0])
    cluster.run(100)
    epoch = cluster.node(node).broker_epoch
    exchange = Exchange(cluster.world.network, node, leader, lambda rows: None, lambda: None)
    cluster.node(leader).fetch(node, epoch, [(KEY, late)], exchange)
    cluster.run(100)
    assert node not in cluster.state.isr
    cluster.settle()


def test_a_late_fetch_from_before_a_changed_move_admits_no_node() -> None:
    """KAFKA-13972: a node that was dropped from a move and added again had an empty log."""
    cluster = Cluster(nodes=5)
    cluster.commit()
    leader = cluster.state.leader
    first, second = [node for node in cluster.world.nodes if node not in cluster.state.isr]
    kept = [node for node in cluster.state.isr if node != leader][:1]
    cluster.cut(second)  # so that the move does not end

    def move(*replicas: int) -> None:
        row = {"topic": "t", "partition": 0, "replicas": replicas}
        cluster.world.nemesis._put(REASSIGN, as_json({"version": 1, "partitions": [row]}))

    move(first, second, leader)
    cluster.until(lambda: first in cluster.state.isr)
    # It leaves the set again, as a member that is late.
    cluster.cut(first, leader)
    cluster.append(leader)
    cluster.until(lambda: first not in cluster.state.isr)
    follower = cluster.node(first).shells[KEY].machine.follower
    assert follower is not None
    epoch = cluster.state.leader_epoch
    offer = Offer(1, leader, epoch, cluster.log(leader).end_offset, 0, 0)
    move(*kept, second, leader)
    cluster.until(lambda: KEY not in cluster.node(first).disk.logs)
    move(first, second, leader)
    cluster.until(lambda: KEY in cluster.node(first).disk.logs)
    cluster.run(50)
    exchange = Exchange(cluster.world.network, first, leader, lambda rows: None, lambda: None)
    broker_epoch = cluster.node(first).broker_epoch
    cluster.node(leader).fetch(first, broker_epoch, [(KEY, offer)], exchange)
    cluster.run(100)
    assert first not in cluster.state.isr
