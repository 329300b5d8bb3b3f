"""W14, W15: consumer groups, commits and transactions."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

from benchmarks.bench import Bench
from benchmarks.figure import OURS, Figure, at_least, at_most
from benchmarks.wire import librdkafka
from benchmarks.wire.servers import (
    FLUSHED,
    KAFKA,
    Server,
    Servers,
    column,
    compared,
    durable,
    topic_of_each,
    wire_bar,
)

MEMBERS = 8
RECORDS = 10  # of a transaction
MEMBER_ID_REQUIRED, REBALANCE_IN_PROGRESS, NOT_YET = 79, 27, (14, 15, 16, 22, 27)


def gathered(server: Server, group: str) -> tuple[float, ...]:
    """Return the seconds until members that join at once are in one generation."""
    barrier = threading.Barrier(MEMBERS + 1)

    def member() -> None:
        with server.connect() as link:
            barrier.wait()
            member_id = ""
            while True:
                joined, member_id = join(link, group, member_id)
                size = sync(link, group, joined)
                if size == MEMBERS:
                    return
                if size:
                    await_rebalance(link, group, joined)

    with ThreadPoolExecutor(MEMBERS) as pool:
        members = [pool.submit(member) for _ in range(MEMBERS)]
        barrier.wait()
        began = perf_counter()
        for each in members:
            each.result(60)
        return (perf_counter() - began,)


def join(link: Any, group: str, member_id: str) -> tuple[dict[str, Any], str]:
    while True:
        answer = link.ask(
            11,
            5,
            {
                "group_id": group,
                "session_timeout_ms": 10_000,
                "rebalance_timeout_ms": 30_000,
                "member_id": member_id,
                "group_instance_id": None,
                "protocol_type": "consumer",
                "protocols": [{"name": "range", "metadata": b""}],
            },
        )
        member_id = answer["member_id"] or member_id
        if answer["error_code"] == 0:
            return answer, member_id
        if answer["error_code"] != MEMBER_ID_REQUIRED:
            assert answer["error_code"] in NOT_YET, answer
            time.sleep(0.001)


def sync(link: Any, group: str, joined: dict[str, Any]) -> int:
    """Return how many members the generation has; 0 if it is over.  The leader assigns it."""
    everybody = joined["members"]
    size = bytes([len(everybody)])
    answer = link.ask(
        14,
        3,
        {
            "group_id": group,
            "generation_id": joined["generation_id"],
            "member_id": joined["member_id"],
            "group_instance_id": None,
            "assignments": [
                {"member_id": each["member_id"], "assignment": size} for each in everybody
            ],
        },
    )
    if answer["error_code"]:
        assert answer["error_code"] in NOT_YET, answer
        return 0
    return int(answer["assignment"][0])


def await_rebalance(link: Any, group: str, joined: dict[str, Any]) -> None:
    body = {
        "group_id": group,
        "generation_id": joined["generation_id"],
        "member_id": joined["member_id"],
        "group_instance_id": None,
    }
    while not link.ask(12, 3, body)["error_code"]:
        time.sleep(0.001)


@wire_bar("W14", "groups and commits")
def groups(bench: Bench, both: Servers) -> Iterator[Figure]:
    count = bench.sizes.wire_transactions * 10

    def gathering(server: Server) -> Callable[[], tuple[float, ...]]:
        return lambda: gathered(server, f"gathered-{time.time_ns()}")

    def committing(server: Server) -> Callable[[], tuple[float, ...]]:
        return lambda: (librdkafka.commits(server, topic, count),)

    with topic_of_each(both, "grouped", MEMBERS) as topic:
        results = bench.medians({name: gathering(server) for name, server in both.items()})
        name = f"{MEMBERS} members from nothing to one generation, raw"
        yield compared(name, column(results), at_most(1.0), "ms", 1e-3)
        results = bench.medians({name: committing(server) for name, server in both.items()})
        yield compared(
            "commit, one at a time, librdkafka", column(results), at_least(1.0), "commits/s"
        )


@wire_bar("W15", "transactions of ten records and offsets")
def transactions(bench: Bench, both: Servers) -> Iterator[Figure]:
    count = bench.sizes.wire_transactions

    def running(server: Server, topic: str, count: int) -> Callable[[], tuple[float, ...]]:
        return lambda: (librdkafka.transactions(server, topic, count, RECORDS),)

    with topic_of_each(both, "transactional") as topic:
        entrants = {name: running(server, topic, count) for name, server in both.items()}
        results = bench.medians(entrants, writes=True, rounds=3)
        yield compared("transactions", column(results), at_least(1.0), "a second")
    ours, kafka = durable(bench), both[KAFKA]
    with ours.topic("synced-txn") as topic, kafka.topic(topic, settings=FLUSHED):
        with flushed_coordinators(kafka):
            entrants = {
                OURS: running(ours, topic, count // 2),
                KAFKA: running(kafka, topic, count // 2),
            }
            results = bench.medians(entrants, writes=True, rounds=3)
        yield compared("transactions with fsync", column(results), at_least(1.0), "a second")


@contextlib.contextmanager
def flushed_coordinators(kafka: Server) -> Iterator[None]:
    """Have Kafka sync its internal topics, too, inside the block."""
    names = ("__transaction_state", "__consumer_offsets")

    def alter(operation: int) -> None:
        configs = [{"name": "flush.messages", "config_operation": operation, "value": "1"}]
        rows = [{"resource_type": 2, "resource_name": name, "configs": configs} for name in names]
        with kafka.connect() as link:
            answer = link.ask(44, 1, {"resources": rows, "validate_only": False})
        assert not any(row["error_code"] for row in answer["responses"]), answer

    alter(0)
    try:
        yield
    finally:
        alter(1)
