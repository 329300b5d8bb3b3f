"""WriteTxnMarkers of another node's coordinator: answered when every marker is committed here."""

from __future__ import annotations

import functools
from typing import Any

from logstore.coordinators.quorum.quorum import Coordination
from logstore.errors import NotCoordinatorError, UnknownTopicError
from logstore.kafka.calls import Call, Pending
from logstore.kafka.clustering.replicated_quorum import ReplicatedQuorum
from logstore.kafka.protocol.errors import ErrorCode, KafkaError, error_code
from logstore.replication.machines.image import Key

__all__ = ["write_markers"]


def write_markers(call: Call) -> Pending:
    """Write markers into partitions that this node leads.  No thread waits for the replicas."""
    quorum = Coordination.of(call.broker.store).quorum
    assert isinstance(quorum, ReplicatedQuorum)
    pending = Pending(call)
    asked = [
        (number, (topic["name"], each))
        for number, marker in enumerate(call.body["markers"])
        for topic in marker["topics"]
        for each in topic["partition_indexes"]
    ]
    codes: dict[tuple[int, Key], ErrorCode] = {}

    def settle(number: int, key: Key, error: BaseException | None) -> None:
        codes[number, key] = _code(error)
        if len(codes) == len(set(asked)):
            pending.answer(_answer(call, codes))

    def done(number: int, key: Key, error: BaseException | None) -> None:
        # The counting is done by the loop's thread: the answers come from several.
        call.broker.calls.put(lambda: settle(number, key, error))

    if not asked:
        pending.answer(_answer(call, codes))
    for number, key in dict.fromkeys(asked):
        missing = call.broker.topology.missing(*key)
        if missing is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            done(number, key, UnknownTopicError(key[0]))
        else:
            marker = call.body["markers"][number]
            quorum.mark_here(key, marker, functools.partial(done, number))
    return pending


def _code(error: BaseException | None) -> ErrorCode:
    if error is None:
        return ErrorCode.NONE
    if isinstance(error, NotCoordinatorError):
        return ErrorCode.TRANSACTION_COORDINATOR_FENCED
    return error.code if isinstance(error, KafkaError) else error_code(error)


def _answer(call: Call, codes: dict[tuple[int, Key], ErrorCode]) -> dict[str, Any]:
    return {
        "markers": [
            {
                "producer_id": marker["producer_id"],
                "topics": [
                    {
                        "name": topic["name"],
                        "partitions": [
                            {
                                "partition_index": each,
                                "error_code": codes[number, (topic["name"], each)],
                            }
                            for each in topic["partition_indexes"]
                        ],
                    }
                    for topic in marker["topics"]
                ],
            }
            for number, marker in enumerate(call.body["markers"])
        ]
    }
