"""RequestLog: one line of JSON for each answered request, on the logger ``logstore.kafka.request``.

The logger is asked once a second whether DEBUG is enabled.  If it is not, a request costs one
comparison with None.  A line has sizes, times, errors and offsets; never a key, a value or a header
of a record.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from logstore.kafka.apis import APIS
from logstore.kafka.network.connection import FETCH, PRODUCE
from logstore.kafka.protocol.errors import ErrorCode

if TYPE_CHECKING:
    from logstore.kafka.calls import Call

__all__ = ["RequestLog"]

log = logging.getLogger("logstore.kafka.request")

PARTITIONS_MAX = 50  # of one line


class RequestLog:
    """Writes the lines."""

    @classmethod
    def if_wanted(cls) -> RequestLog | None:
        """Return the log if its logger is enabled for DEBUG."""
        return cls() if log.isEnabledFor(logging.DEBUG) else None

    def write(self, call: Call, result: object, codes: list[int], now: float) -> None:
        """Log a request whose answer was handed to its connection at `now`."""
        connection = call.connection
        handled = call.handled or now
        host, port = connection.peer
        line: dict[str, Any] = {
            "time_ms": time.time_ns() // 1_000_000,
            "peer": f"{host}:{port}",
            "listener": connection.listener,
            "client_id": call.client_id,
            "software": connection.software,
            "api": APIS[call.key].name,
            "version": call.version,
            "correlation_id": call.correlation_id,
            "request_bytes": call.received,
            "response_bytes": call.sent,
            "errors": [_error(code) for code in sorted(set(codes))],
            "queue_ms": _ms(call.started - call.began),
            "handler_ms": _ms(handled - call.started),
            "wait_ms": _ms(now - handled),
            "total_ms": _ms(now - call.began),
        }
        if call.dropped:
            line["dropped"] = True  # a fault: the connection was closed instead
        if isinstance(result, dict) and call.key in (PRODUCE, FETCH):
            rows = _produced(result) if call.key == PRODUCE else _fetched(call, result)
            line["partitions"] = list(islice(rows, PARTITIONS_MAX))
        log.debug("%s", json.dumps(line))


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _error(code: int) -> str | int:
    try:
        return ErrorCode(code).name
    except ValueError:
        return code


def _produced(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for topic in result.get("responses", ()):
        for row in topic["partition_responses"]:
            yield {
                "topic": topic["name"],
                "partition": row["index"],
                "offset": row["base_offset"],
            }


def _fetched(call: Call, result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    asked = {
        (topic["topic"] or bytes(topic["topic_id"]), row["partition"]): row["fetch_offset"]
        for topic in call.body["topics"]
        for row in topic["partitions"]
    }
    for topic in result.get("responses", ()):
        name = topic.get("topic", "")
        key = name or bytes(topic["topic_id"])
        if not name:
            found = call.broker.topic_by_id(key)
            name = "" if found is None else found.name
        for row in topic["partitions"]:
            yield {
                "topic": name,
                "partition": row["partition_index"],
                "offset": asked.get((key, row["partition_index"])),
                "bytes": getattr(row.get("records"), "size_bytes", 0),
            }
