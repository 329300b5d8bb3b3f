"""kill -9 of `logstore serve` under load: clients continue, and nothing is lost, doubled or torn.

Real clients produce, copy in transactions with the offsets, and read in groups, while the server is
killed and started again on the same port and directory.  They record what they did and saw;
`logstore.testing.history` checks it, together with the records that are in the store at the end.

A seed gives the moments of the kills.  One kill in five hits a server that is just starting.
LOGSTORE_CAMPAIGN sets how many there are.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import logstore
from logstore.testing import Copy
from logstore.testing.history import assert_clean
from logstore.testing.node_process import NodeProcess, free_ports
from tests.campaign import sized
from tests.kafka.recorded_clients import Clients, JavaCopier, Work, java_copier

pytestmark = pytest.mark.campaign

SEEDS = range(sized(1, 1, 5))
KILLS = sized(3, 20, 40)  # for each seed
BETWEEN_SECONDS = (0.1, 1.5)  # the time that the clients have between two kills
STARTING_SECONDS = 0.5  # a server that is starting is killed before that
PARTITIONS = 2
TIMEOUT = 180.0
IN = frozenset(("in", number) for number in range(PARTITIONS))


def server(directory: Path, address: str, durability: str) -> NodeProcess:
    """Return `logstore serve`, on the same port and directory after every kill."""
    command = [sys.executable, "-m", "logstore", "-s", str(directory), "serve"]
    command += ["--listen", address, "--durability", durability]
    for topic in ("in", "out", "java"):
        command += ["--create-topic", f"{topic}:{PARTITIONS}"]
    return NodeProcess(1, command, directory.parent / "serve.log")


def kill_and_start(served: NodeProcess, chance: random.Random) -> int:
    """Kill the server and start it again; return the number of kills."""
    served.kill()
    kills = 1
    if chance.random() < 0.2:
        served.begin()
        time.sleep(chance.uniform(0, STARTING_SECONDS))
        served.kill()
        kills += 1
    served.start()
    return kills


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_doubled_or_torn(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    served = server(tmp_path / "store", address, ("os", "fsync")[seed % 2])
    served.start()
    clients = Clients(address, PARTITIONS)
    acts = [clients.copy, clients.watch, clients.watch, clients.ask, clients.produce]
    work = [Work(f"{act.__name__} {number}", act) for number, act in enumerate(acts)]
    try:
        with java_copier(tmp_path, address) as java:
            for each in work:
                each.start()
            kills = 0
            while kills < KILLS:
                time.sleep(chance.uniform(*BETWEEN_SECONDS))
                kills += kill_and_start(served, chance)
            work.pop().stop()  # the producer: the others read what is left
            await_end(clients, java, work)
            for each in work:
                each.stop()
            if java is not None:
                java.stop()
        assert served.running, "the server ended by itself"
        print(f"seed {seed}, {kills} kills: {clients}; {java}")
    finally:
        for each in work:
            each.ended.set()
        served.close()
    check(clients, java, tmp_path / "store")


def await_end(clients: Clients, java: JavaCopier | None, work: list[Work]) -> None:
    """Wait until everything is copied and read."""
    deadline = time.monotonic() + TIMEOUT
    while not (
        sum(clients.committed.values()) == len(clients.read.get("out", ())) == clients.acked
        and (java is None or sum(java.committed.values()) == clients.acked)
    ):
        for each in work:
            if each.error is not None:
                raise each.error
        if java is not None:
            java.check()
        assert time.monotonic() < deadline, f"the clients do not continue: {clients}; {java}"
        time.sleep(0.05)


def check(clients: Clients, java: JavaCopier | None, directory: Path) -> None:
    """Compare what the clients did and saw with the store."""
    assert clients.unacked == []
    copies = []
    with logstore.open(directory, durability="os") as store:
        for partition in store["in"]:
            clients.recorder.snapshot(("in", partition.number), partition)
        for topic, ended in (("out", clients), ("java", java)):
            if ended is None:
                continue
            assert ended.committed and ended.aborted
            found: Counter[int] = Counter()
            for partition in store[topic]:
                rows = list(partition.scan(isolation="read_committed"))
                where = (topic, partition.number)
                clients.recorder.snapshot(where, rows, isolation="read_committed")
                for row in rows:
                    assert row.key is not None
                    number, size = map(int, row.key.split())
                    assert ended.committed[number] == size, "a transaction that was not committed"
                    found[number] += 1
            assert found == ended.committed, "a transaction is torn"
            target = frozenset((topic, number) for number in range(PARTITIONS))
            copies.append(Copy(IN, target))
    assert_clean(clients.recorder.history(), caught_up=True, copies=copies)
