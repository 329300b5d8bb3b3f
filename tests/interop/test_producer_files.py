"""Kafka's dumper reads our snapshots and indexes of aborted transactions, and sees what we mean."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from logstore import Partition
from logstore.clock import ManualClock
from logstore.log.producer_state import ProducerState
from logstore.testing import ReferenceRecord, encode_batch

from .kafka import dump_log, require_kafka

pytestmark = pytest.mark.interop

NOW = 1_700_000_000_000


@pytest.fixture(autouse=True)
def kafka() -> None:
    require_kafka()


def test_the_dumper_sees_our_producers_and_aborted_transactions(tmp_path: Path) -> None:
    sequences = {7: 0, 8: 0, 1000: 2**31 - 2}
    with Partition.open(tmp_path / "orders-0", clock=ManualClock(NOW), durability="os") as log:

        def send(producer_id: int, count: int, *, transactional: bool = True) -> None:
            records = [ReferenceRecord(b"v", timestamp=NOW + i) for i in range(count)]
            sequence = sequences[producer_id]
            raw = encode_batch(
                records,
                producer_id=producer_id,
                producer_epoch=2,
                base_sequence=sequence,
                transactional=transactional,
            )
            log.append_batch(raw)
            sequences[producer_id] = (sequence + count) % 2**31

        send(1000, 5, transactional=False)
        for number in range(4):
            send(7, 3)
            send(8, 2)
            log.end_transaction(8, 2, commit=number % 2 == 0, coordinator_epoch=number)
            log.roll()
            log.end_transaction(7, 2, commit=False, coordinator_epoch=number)
        send(8, 1)
        aborted = log.aborted_transactions()
    files = sorted([*log.path.glob("*.snapshot"), *log.path.glob("*.txnindex")])
    assert len(files) > 6
    dumped = _by_file(dump_log(files))
    listed = []
    for path in files:
        rows = dumped[path]
        if path.suffix == ".txnindex":
            listed += [tuple(int(row[name]) for name in INDEX) for row in rows]
            continue
        wanted = []
        for entry in ProducerState.decode(path.read_bytes()):
            (span,) = entry.batches
            start = entry.transaction_start
            wanted.append(
                {
                    "producerId": str(entry.producer_id),
                    "producerEpoch": str(entry.epoch),
                    "coordinatorEpoch": str(entry.coordinator_epoch),
                    "currentTxnFirstOffset": f"OptionalLong[{start}]"
                    if start >= 0
                    else "OptionalLong.empty",
                    "lastTimestamp": str(entry.timestamp),
                    "firstSequence": str(span.first_sequence),
                    "lastSequence": str(span.last_sequence),
                    "lastOffset": str(span.last_offset),
                    "offsetDelta": str(span.offset_delta),
                    "timestamp": str(span.timestamp),
                }
            )
        assert rows == wanted
    assert listed == [tuple(entry) for entry in aborted]
    dump_log([log.path], index_sanity=True)


INDEX = ("producerId", "firstOffset", "lastOffset", "lastStableOffset")


def _by_file(text: str) -> dict[Path, list[dict[str, str]]]:
    files: dict[Path, list[dict[str, str]]] = {}
    rows: list[dict[str, str]] = []
    for line in text.splitlines():
        if line.startswith("Dumping "):
            rows = files.setdefault(Path(line.removeprefix("Dumping ")), [])
        elif "producerId: " in line:
            rows.append(dict(re.findall(r"(\w+): (\S+)", line)))
    return files
