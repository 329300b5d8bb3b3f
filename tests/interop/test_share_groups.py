"""The state of a queue's group, as Kafka's dumper decodes it with --share-group-state-decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore import Queue
from logstore.queues.share_state import SHARE_GROUP_STATE

from .kafka import dump_log, require_kafka
from .test_groups import records_of

pytestmark = pytest.mark.interop


def test_the_dumper_decodes_snapshots_and_updates(tmp_path: Path) -> None:
    require_kafka()
    with logstore.open(tmp_path / "store") as store:
        jobs = Queue(store, "jobs", group="workers", nack_delay=0, ack_linger=600)
        jobs.put_many([b"%d" % number for number in range(6)])
        held = jobs.get_many(6)
        for number in (0, 2, 3):
            held[number].ack()
        held[5].nack()
        jobs.flush()
        held[4].reject("bad input")
        (log,) = store[SHARE_GROUP_STATE]
        path = log.path
    found: list[tuple[Any, Any]] = records_of(dump_log([path], decode_share_groups=True))
    kinds = [str(key["type"]) for key, _ in found]
    assert kinds[0] == "0" and set(kinds[1:]) == {"1"}
    assert {(key["data"]["groupId"], key["data"]["partition"]) for key, _ in found} == {
        ("workers", 0)
    }
    first = found[0][1]["data"]
    assert (first["snapshotEpoch"], first["startOffset"], first["stateBatches"]) == (1, 0, [])
    update = found[1][1]["data"]
    assert (update["snapshotEpoch"], update["startOffset"]) == (1, 1)
    assert update["deliveryCompleteCount"] == 2
    assert [tuple(batch.values()) for batch in update["stateBatches"]] == [
        (2, 3, 2, 1),
        (5, 5, 0, 1),
    ]
    letter = found[2][1]["data"]
    assert (letter["startOffset"], letter["stateBatches"][0]["deliveryState"]) == (-1, 4)
