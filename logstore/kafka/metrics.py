"""metrics: the counters of a server, as numbers by name.

The names are Prometheus': ``requests_total{api="Fetch"}``.  The thread of the loop counts with
plain numbers; `metrics` reads them from any thread, so two numbers of one call may be a request
apart.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from logstore.errors import LogStoreError
from logstore.kafka.apis import APIS
from logstore.kafka.protocol.errors import ErrorCode

if TYPE_CHECKING:
    from logstore.kafka.broker import Broker
    from logstore.kafka.calls import Call

__all__ = ["MEANINGS", "ApiCounts", "TopicCounts", "metrics", "metrics_text"]

PREFIX = "logstore_kafka_"  # of the names in the text for Prometheus
REPLICATION = "replication_"  # of the names of a node's replication, after that
CLIENTS_MAX = 50  # names of software; the others are one number
TOPICS_MAX = 200  # names of topics; the others are one number
OTHER = "other"
# The upper ends of a histogram's buckets, in seconds.
BOUNDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

MEANINGS = {
    "up_seconds": "time since the start",
    "connections": "connections now",
    "connections_accepted_total": "connections that were accepted",
    "connections_closed_total": "connections that ended, by reason",
    "connections_held": "connections that wait because of max.connection.creation.rate",
    "clients": "connections now, by the client's software and version",
    "requests_total": "requests, by API",
    "worker_requests_total": "requests that ran in a worker's thread, by API",
    "errors_total": "errors in answers, by API and error",
    "request_bytes_total": "bytes received",
    "response_bytes_total": "bytes sent",
    "api_request_bytes_total": "bytes of answered requests, by API",
    "api_response_bytes_total": "bytes of answers, by API",
    "request_seconds": "from the whole request to its answer, by API",
    "handler_seconds": "the listener's own work on a request, by API",
    "queue_seconds_total": "requests waited for a thread, by API",
    "wait_seconds_total": "requests waited for records, an fsync or members, by API",
    "slow_requests_total": "requests with more than 1 s of own work",
    "bytes_in_total": "bytes of appended batches, by topic",
    "records_in_total": "appended records, by topic",
    "bytes_out_total": "bytes of fetched batches, by topic",
    "fetch_sessions": "fetch sessions (KIP-227)",
    "syncs_total": "fsyncs for produced records",
    "sync_seconds_total": "time of these fsyncs",
    "appends_synced_total": "appends that they made durable",
    "purgatory_size": "fetches that wait for records now",
    "purgatory_expired_total": "fetches that waited until their time was up",
    "memory_in_use_bytes": "memory of large requests now",
    "memory_peak_bytes": "the most since the start",
    "memory_waiting": "connections that wait for memory",
    "memory_unsent_bytes": "bytes of answers that peers have not read yet",
    "worker_busy": "worker threads that work",
    "worker_queue": "requests that wait for a worker thread",
    "loop_lag_seconds": "how late the last timer of the event loop was",
    "groups": "groups in memory, by state",
    "transactions_open": "open transactions",
}


class ApiCounts:
    """What the requests of one API took.  Counted in the loop's thread."""

    __slots__ = (
        *("direct", "direct_seconds", "handler", "handler_seconds", "queue_seconds", "received"),
        *("requests", "sent", "total", "total_seconds", "wait_seconds", "worker"),
    )

    def __init__(self) -> None:
        self.requests = 0  # that began
        self.worker = 0  # that were answered by a worker
        self.received = self.sent = 0  # bytes
        # Requests that were answered by the loop at once: all of their time is own work.
        self.direct = [0] * (len(BOUNDS) + 1)
        self.direct_seconds = 0.0
        # The others: in all, and the own work of it.
        self.total = [0] * (len(BOUNDS) + 1)
        self.handler = [0] * (len(BOUNDS) + 1)
        self.total_seconds = self.handler_seconds = 0.0
        self.queue_seconds = self.wait_seconds = 0.0

    def add_direct(self, received: int, sent: int, own: float) -> None:
        """Count a request that the loop answered at once, with its bytes and its time."""
        self.received += received
        self.sent += sent
        self.direct[bisect_left(BOUNDS, own)] += 1
        self.direct_seconds += own

    def add(self, call: Call, now: float) -> float:
        """Count a request that is answered; return the seconds of own work."""
        own = now - call.started
        if not call.handled and call.started == call.began:
            self.add_direct(call.received, call.sent, own)
            return own
        self.received += call.received
        self.sent += call.sent
        handled = call.handled or now
        total, own = now - call.began, handled - call.started
        self.worker += call.may_wait
        self.total[bisect_left(BOUNDS, total)] += 1
        self.handler[bisect_left(BOUNDS, own)] += 1
        self.total_seconds += total
        self.handler_seconds += own
        self.queue_seconds += call.started - call.began
        self.wait_seconds += now - handled
        return own


class _TopicCount:
    __slots__ = ("bytes_in", "bytes_out", "records_in")

    def __init__(self) -> None:
        self.bytes_in = self.records_in = self.bytes_out = 0


class TopicCounts:
    """Bytes and records by topic.  Counted in the loop's thread."""

    def __init__(self) -> None:
        self.by_name: dict[str, _TopicCount] = {}

    def appended(self, rows: Iterable[tuple[str, int, int]]) -> None:
        """Count batches: topic, bytes, records."""
        for topic, size, records in rows:
            self.appended_one(topic, size, records)

    def appended_one(self, topic: str, size: int, records: int) -> None:
        """Count one batch."""
        count = self.by_name.get(topic) or self._new(topic)
        count.bytes_in += size
        count.records_in += records

    def fetched(self, broker: Broker, answer: Mapping[str, Any]) -> None:
        """Count the records of an answer to Fetch."""
        for topic in answer.get("responses", ()):
            size = 0
            for row in topic["partitions"]:
                if records := row.get("records"):
                    size += records.size_bytes
            if size:
                name = topic.get("topic")
                if not name:
                    found = broker.topic_by_id(topic["topic_id"])
                    name = OTHER if found is None else found.name
                self.fetched_one(name, size)

    def fetched_one(self, topic: str, size: int) -> None:
        """Count the bytes of fetched batches of one topic."""
        (self.by_name.get(topic) or self._new(topic)).bytes_out += size

    def _new(self, topic: str) -> _TopicCount:
        name = topic if len(self.by_name) < TOPICS_MAX else OTHER
        return self.by_name.setdefault(name, _TopicCount())


def metrics(broker: Broker) -> dict[str, float]:
    """Return what a server has counted since its start."""
    connections = list(broker.connections)
    found: dict[str, float] = {
        "up_seconds": broker.loop.time() - broker.began,
        "connections": len(connections),
        "connections_accepted_total": broker.accepted,
        "request_bytes_total": broker.received + sum(each.received for each in connections),
        "response_bytes_total": broker.sent + sum(each.sent for each in connections),
        'purgatory_size{kind="fetch"}': broker.waiting.count,
        "fetch_sessions": len(broker.sessions),
        'purgatory_expired_total{kind="fetch"}': broker.waiting.expired,
        "syncs_total": broker.syncs.count,
        "sync_seconds_total": broker.syncs.seconds,
        "appends_synced_total": broker.syncs.appends,
        "memory_in_use_bytes": broker.memory.in_use_bytes,
        "memory_peak_bytes": broker.memory.peak_bytes,
        "memory_waiting": broker.memory.waiting,
        "memory_unsent_bytes": broker.unsent_bytes,
        "worker_busy": broker.workers.busy,
        "worker_queue": broker.workers.queued,
        "loop_lag_seconds": broker.lag_seconds,
        "slow_requests_total": broker.slow,
    }
    for key, counts in broker.counts.items():
        if counts.requests:
            found |= _of_api(APIS[key].name, counts)
    for (key, code), count in list(broker.errors.items()):
        name = ErrorCode(code).name if code in list(ErrorCode) else str(code)
        found[_name("errors_total", api=APIS[key].name, error=name)] = count
    for reason, count in list(broker.closed_for.items()):
        found[_name("connections_closed_total", reason=reason)] = count
    by_topic = list(broker.topics.by_name.items())
    for kind in ("bytes_in", "records_in", "bytes_out"):
        for topic, counts_of_topic in by_topic:
            found[_name(f"{kind}_total", topic=topic)] = getattr(counts_of_topic, kind)
    clients = Counter(each.software or "unknown" for each in connections)
    for software, count in clients.most_common(CLIENTS_MAX):
        found[_name("clients", software=software)] = count
    others = sum(clients.values()) - sum(n for _, n in clients.most_common(CLIENTS_MAX))
    if others:
        found[_name("clients", software=OTHER)] = others
    if broker.node is not None:
        rows = broker.node.metrics().items()
        found |= {f"{REPLICATION}{name}": value for name, value in rows}
    return found | _of_coordinators(broker)


def _of_api(api: str, counts: ApiCounts) -> dict[str, float]:
    found: dict[str, float] = {
        _name("requests_total", api=api): counts.requests,
        _name("worker_requests_total", api=api): counts.worker,
        _name("api_request_bytes_total", api=api): counts.received,
        _name("api_response_bytes_total", api=api): counts.sent,
        _name("queue_seconds_total", api=api): counts.queue_seconds,
        _name("wait_seconds_total", api=api): counts.wait_seconds,
    }
    for kind, others, seconds in (
        ("request_seconds", counts.total, counts.total_seconds),
        ("handler_seconds", counts.handler, counts.handler_seconds),
    ):
        buckets = [one + other for one, other in zip(counts.direct, others, strict=True)]
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), accumulate(buckets), strict=True):
            found[_name(f"{kind}_bucket", api=api, le=bound)] = count
        found[_name(f"{kind}_sum", api=api)] = counts.direct_seconds + seconds
        found[_name(f"{kind}_count", api=api)] = sum(buckets)
    return found


def _of_coordinators(broker: Broker) -> dict[str, float]:
    """Return the groups and transactions in memory.  Makes no coordinator."""
    from logstore.coordinators.group_coordinator import GroupCoordinator
    from logstore.coordinators.transaction_coordinator import Transactions

    found: dict[str, float] = {}
    groups = broker.store.companions.made(GroupCoordinator)
    if groups is not None:
        for state, count in groups.states().items():
            found[_name("groups", state=state)] = count
    transactions = broker.store.companions.made(Transactions)
    if transactions is not None:
        with contextlib.suppress(LogStoreError, OSError):  # their topic cannot be read
            found["transactions_open"] = len(transactions.list(open_only=True))
    return found


def _name(name: str, **labels: str) -> str:
    return name + "{" + ",".join(f'{key}="{_quoted(text)}"' for key, text in labels.items()) + "}"


def _quoted(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def metrics_text(found: Mapping[str, float]) -> str:
    """Return metrics in Prometheus' text format.  Every name gets the prefix `PREFIX`."""
    return "".join(_lines(found))


def _lines(found: Mapping[str, float]) -> Iterator[str]:
    families: dict[str, list[str]] = {}
    for name, value in found.items():
        bare = name.partition("{")[0]
        family = next(
            (each for end in ("_bucket", "_sum", "_count")
             if (each := bare.removesuffix(end)) != bare and each in MEANINGS),
            bare,
        )  # fmt: skip
        families.setdefault(family, []).append(f"{PREFIX}{name} {value:.10g}\n")
    for family, lines in families.items():
        histogram = "{" in lines[0] and "_bucket" in lines[0].partition("{")[0]
        kind = "histogram" if histogram else "counter" if family.endswith("_total") else "gauge"
        yield f"# HELP {PREFIX}{family} {_meaning(family)}\n# TYPE {PREFIX}{family} {kind}\n"
        yield from lines


def _meaning(family: str) -> str:
    if family in MEANINGS:
        return MEANINGS[family]
    from logstore.replication.hosting.metrics import MEANINGS as OF_REPLICATION

    return OF_REPLICATION[family.removeprefix(REPLICATION)]
