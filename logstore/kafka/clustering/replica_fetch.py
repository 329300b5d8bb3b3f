"""Fetches of followers, and offsets that they ask for: a request of the wire as a value and back.

A follower is told by its replica id.  It gets all records, also those above the high watermark, so
its id must be that of a registered node.
"""

from __future__ import annotations

import uuid
from typing import Any

from logstore.kafka.calls import Call, Pending
from logstore.kafka.clustering.topology import replica_id
from logstore.kafka.protocol.errors import ErrorCode, KafkaError
from logstore.log.epochs import EpochEnd
from logstore.log.topic_id import parse_uuid, uuid_text
from logstore.replication.machines.follower import Fetched, Offer
from logstore.replication.machines.image import Key
from logstore.replication.peers import Fetches, FetchRequest, FetchRow

__all__ = ["fetch_answers", "fetch_body", "serve_replica"]

FETCH_VERSION = 16  # topics by id, and the broker epoch of the follower


def serve_replica(call: Call) -> Pending:
    """Serve the fetch of a follower; answered when there are records, or its time is up."""
    node, body = call.broker.node, call.body
    follower = replica_id(body)
    if node is None or follower not in node.image.nodes or call.version < FETCH_VERSION:
        raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER)
    names = {each["topic_id"]: call.broker.topic_name(each["topic_id"]) for each in body["topics"]}
    rows = []
    unknown = []
    for topic in body["topics"]:
        name, id_text = (
            names[topic["topic_id"]],
            uuid_text(uuid.UUID(bytes=bytes(topic["topic_id"]))),
        )
        for each in topic["partitions"]:
            if name is None:
                unknown.append((topic["topic_id"], each["partition"]))
                continue
            offer = Offer(
                0,
                node.id,
                each["current_leader_epoch"],
                each["fetch_offset"],
                each["last_fetched_epoch"],
                each["log_start_offset"],
            )
            key = name, each["partition"]
            rows.append(FetchRow(key, id_text, offer, each["partition_max_bytes"]))
    request = FetchRequest(
        follower,
        body["replica_state"]["replica_epoch"],
        0 if unknown else body["max_wait_ms"],
        body["max_bytes"],
        tuple(rows),
    )
    pending = Pending(call)
    ids = {name: id_bytes for id_bytes, name in names.items() if name is not None}

    def done(answers: Fetches) -> None:
        pending.answer(_answer(answers, ids, unknown))

    node.serve_fetch(request, done, pending.when_lost)
    return pending


def _answer(
    answers: Fetches, ids: dict[str, bytes], unknown: list[tuple[bytes, int]]
) -> dict[str, Any]:
    topics: dict[bytes, list[dict[str, Any]]] = {}
    for (name, number), found in answers.items():
        row: dict[str, Any] = {
            "partition_index": number,
            "error_code": found.code,
            "high_watermark": found.hw,
            "last_stable_offset": -1,
            "log_start_offset": found.start,
            "aborted_transactions": None,
            "records": found.raw,
        }
        if found.diverging is not None:
            row["diverging_epoch"] = {
                "epoch": found.diverging.epoch,
                "end_offset": found.diverging.end_offset,
            }
        topics.setdefault(ids[name], []).append(row)
    for id_bytes, number in unknown:
        code = ErrorCode.UNKNOWN_TOPIC_ID
        row = {"partition_index": number, "error_code": code, "high_watermark": -1, "records": b""}
        topics.setdefault(id_bytes, []).append(row)
    return {
        "responses": [{"topic_id": key, "partitions": rows} for key, rows in topics.items()],
        "session_id": 0,
    }


# ---- the follower's half ----


def fetch_body(request: FetchRequest) -> dict[str, Any]:
    """Return the Fetch of a follower, version 16."""
    topics: dict[str, list[dict[str, Any]]] = {}
    for row in request.rows:
        topics.setdefault(row.topic_id, []).append(
            {
                "partition": row.key[1],
                "current_leader_epoch": row.offer.leader_epoch,
                "fetch_offset": row.offer.offset,
                "last_fetched_epoch": row.offer.last_epoch,
                "log_start_offset": row.offer.start,
                "partition_max_bytes": row.max_bytes,
            }
        )
    return {
        "replica_state": {"replica_id": request.node, "replica_epoch": request.broker_epoch},
        "max_wait_ms": request.max_wait_ms,
        "min_bytes": 1,
        "max_bytes": request.max_bytes,
        "isolation_level": 0,
        "session_id": 0,
        "session_epoch": -1,
        "topics": [
            {"topic_id": parse_uuid(topic_id).bytes, "partitions": rows}
            for topic_id, rows in topics.items()
        ],
        "forgotten_topics_data": [],
        "rack_id": "",
    }


def fetch_answers(request: FetchRequest, answer: dict[str, Any]) -> Fetches:
    """Return the rows of the answer to a follower's fetch."""
    keys = {(parse_uuid(row.topic_id).bytes, row.key[1]): row.key for row in request.rows}
    found: dict[Key, Fetched] = {}
    if answer["error_code"]:
        return {key: Fetched(answer["error_code"]) for key in keys.values()}
    for topic in answer["responses"]:
        for row in topic["partitions"]:
            key = keys.get((bytes(topic["topic_id"]), row["partition_index"]))
            if key is None:
                continue
            diverging = row["diverging_epoch"]
            ends = None
            if diverging["end_offset"] >= 0:
                ends = EpochEnd(diverging["epoch"], diverging["end_offset"])
            raw = row["records"]
            found[key] = Fetched(
                row["error_code"],
                row["high_watermark"],
                row["log_start_offset"],
                ends,
                b"" if raw is None else bytes(raw),
            )
    return found
