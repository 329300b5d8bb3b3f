"""Moves of a Cluster with a throttle: they take their time, and appends do not wait for them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from logstore.config import ConfigError
from logstore.replication.config import NodeConfig
from logstore.replication.hosting.local_peers import LocalNetwork
from logstore.replication.machines.throttle import FOLLOWER, LEADER, LISTS, RATES
from tests.replication.cluster_kit import SETTINGS, eventually, raw_log, running

MIB = 1 << 20


def settings_of(cluster: Any) -> list[str]:
    """The settings of the throttle that the tree has."""
    names = {*RATES.values(), *LISTS.values()}
    rows = cluster.image.configs.items()
    return sorted(f"{kind}/{owner}/{name}={value}" for (kind, owner), (each, _) in rows
                  for name, value in each.items() if name in names)  # fmt: skip


def fill(cluster: Any, megabytes: int) -> Any:
    topic = cluster.create_topic("orders", assignment={0: [1, 2]})
    for _ in range(megabytes * 8):
        topic.append(bytes(MIB // 8))
    return topic


@pytest.mark.parametrize("direct", [True, False])
def test_a_move_takes_its_time_and_removes_its_throttle(tmp_path, direct):
    rate = 4 * MIB
    with running(tmp_path / "data", nodes=3, network=LocalNetwork(direct=direct)) as cluster:
        topic = fill(cluster, 10)
        begun = time.monotonic()
        moving = cluster.reassign({("orders", 0): [1, 3]}, throttle_bytes=rate)
        assert settings_of(cluster) == [
            *(f"brokers/{node}/{side}.replication.throttled.rate={rate}"
              for node in (1, 2, 3) for side in (FOLLOWER, LEADER)),
            "topics/orders/follower.replication.throttled.replicas=0:3",
            "topics/orders/leader.replication.throttled.replicas=0:1,0:2",
        ]  # fmt: skip
        moving.wait(timeout=60)
        least = (10 * MIB - MIB / 8) / rate - 1  # with the burst of a second, and one batch more
        assert time.monotonic() - begun >= least
        assert set(cluster.partition("orders", 0).isr) == {1, 3}
        assert raw_log(cluster, 1, "orders") == raw_log(cluster, 3, "orders")
        eventually(lambda: settings_of(cluster) == [], "the throttle is removed")
        topic.append(b"after", timeout=5)


def test_a_cancelled_move_removes_its_throttle_and_the_next_one_is_not_bound(tmp_path):
    with running(tmp_path / "data", nodes=3) as cluster:
        fill(cluster, 2)
        cluster.alter_topic("orders", {LISTS[LEADER]: "7:7", "retention.ms": 5_000_000})
        moving = cluster.reassign({("orders", 0): [1, 3]}, throttle_bytes=1000)
        eventually(lambda: cluster.image.assignment(("orders", 0)).moving)
        lists = cluster.image.configs["topics", "orders"][0]
        assert lists[LISTS[LEADER]] == "7:7,0:1,0:2", "a list that is there is kept"
        moving.cancel()
        moving.wait(timeout=20)
        eventually(lambda: settings_of(cluster) == [])
        assert cluster.image.configs["topics", "orders"][0] == {"retention.ms": "5000000"}
        with cluster.reassign({("orders", 0): [1, 3]}) as moving:
            moving.wait(timeout=20)


@pytest.mark.parametrize("direct", [True, False])
def test_appends_do_not_wait_for_a_slow_move_and_its_throttle_can_be_changed(tmp_path, direct):
    with running(tmp_path / "data", nodes=3, network=LocalNetwork(direct=direct)) as cluster:
        topic = fill(cluster, 3)
        target = {("orders", 0): [1, 3]}
        moving = cluster.reassign(target, throttle_bytes=1000)
        eventually(lambda: cluster.image.assignment(("orders", 0)).moving)
        partition = cluster.partition("orders", 0)
        eventually(lambda: partition.ends.get(3, 0) > 0, "the copy has begun")
        for _ in range(20):  # acks=all: the members in sync have them
            topic.append(bytes(10_000), timeout=10)
        assert moving.moving
        assert set(partition.isr) == {1, 2}
        assert partition.ends[3] < partition.ends[2] == partition.high_watermark
        cluster.reassign(target, throttle_bytes=100 * MIB)
        moving.wait(timeout=20)
        eventually(lambda: settings_of(cluster) == [])


def test_a_rate_of_the_config_binds_what_a_topic_lists(tmp_path):
    rates = {RATES[LEADER]: MIB}
    with running(tmp_path / "data", nodes=3, config={**SETTINGS, **rates}) as cluster:
        fill(cluster, 3)
        cluster.alter_topic("orders", {LISTS[LEADER]: "*"})
        begun = time.monotonic()
        with cluster.reassign({("orders", 0): [1, 3]}) as moving:
            moving.wait(timeout=60)
        assert time.monotonic() - begun >= (3 * MIB - MIB / 8) / MIB - 1
        assert settings_of(cluster) == [f"topics/orders/{LISTS[LEADER]}=*"], "it is the operator's"


def test_a_throttle_that_makes_no_sense_is_refused_and_nothing_is_written(tmp_path):
    with running(tmp_path / "data", nodes=2) as cluster:
        cluster.create_topic("orders", assignment={0: [1]})
        for bad in (0, -1, True, 1.5, "10MiB", 1 << 63):
            with pytest.raises(ConfigError, match=r"throttle_bytes must be .* leave it out"):
                cluster.reassign({("orders", 0): [2]}, throttle_bytes=bad)
        with pytest.raises(ConfigError, match="a cancelled move needs none"):
            cluster.reassign({("orders", 0): None}, throttle_bytes=1000)
        with pytest.raises(ConfigError, match="a list of PARTITION:NODE"):
            cluster.alter_topic("orders", {LISTS[LEADER]: "0-1"})
        with pytest.raises(ConfigError, match="must be from 1 to"):
            NodeConfig.of({RATES[LEADER]: 0})
        assert cluster.image.reassign is None
        assert settings_of(cluster) == []
