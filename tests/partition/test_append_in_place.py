"""append_batch of one batch, plain or packed by lz4: no copy, the same refusals, no waiting."""

from __future__ import annotations

import contextlib
import errno
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from logstore import InvalidRecordError, LogStoreError, Partition, _native
from logstore.config import ConfigError, PartitionConfig
from logstore.errors import DiskFullError, IndeterminateAppendError, TransactionStateError
from logstore.format import codecs, validation
from logstore.format.batch import BatchHeader, with_header
from logstore.store.store import Store
from logstore.testing import (
    Fault,
    ReferenceRecord,
    check_invariants,
    encode_batch,
    inject_io,
    record_io,
)
from tests.campaign import sized
from tests.conftest import MakeLog
from tests.kit import values, with_crc

NOW = 1_700_000_000_000


def batch(*values: bytes, timestamp: int = NOW, **options: Any) -> bytes:
    return encode_batch(
        [ReferenceRecord(value, timestamp=timestamp) for value in values], **options
    )


def copying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave every batch to the path that copies it."""
    monkeypatch.setattr(validation, "check_in_place", lambda *_: None)


def outcome(raw: bytes, config: PartitionConfig, *, in_place: bool) -> object:
    """Return what an append of `raw` is refused with, or the fields that are appended."""
    try:
        if in_place:
            found = validation.check_in_place(raw, config, NOW)
            if found is not None:
                return found[0], raw
        return validation.check_produced(raw, config, NOW)[0]
    except (LogStoreError, ValueError) as error:
        return type(error), getattr(error, "reason", None), str(error)


@pytest.mark.parametrize("size", [1, 500, 5000])
def test_both_paths_write_the_same_file(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    batches = [batch(*[b"x" * size] * count, timestamp=NOW + count) for count in range(1, 30)]
    logs = [make_log(f"{name}-0", index_interval_bytes=1000) for name in ("placed", "copied")]
    for raw in batches:
        logs[0].parts.appender.append_batch(memoryview(bytearray(b"--" + raw))[2:])
    copying(monkeypatch)
    for raw in batches:
        logs[1].append_batch(raw)
    first, second = (log.segments[0] for log in logs)
    assert first.path.read_bytes() == second.path.read_bytes()
    assert first.offset_index.entries == second.offset_index.entries
    assert first.time_index.entries == second.time_index.entries
    assert first.min_timestamp == second.min_timestamp == NOW + 1
    for log in logs:
        check_invariants(log)


def test_the_buffer_is_not_changed(make_log: MakeLog) -> None:
    log = make_log()
    log.append(b"before")
    raw = bytearray(batch(b"a" * 5000))
    before = bytes(raw)
    assert log.parts.appender.append_batch(raw).offsets == range(1, 2)
    assert raw == before
    assert values(log) == [b"before", b"a" * 5000]


def test_a_batch_is_one_write(make_log: MakeLog) -> None:
    log = make_log()
    log.append(b"before")
    raw = batch(b"a" * 5000)
    with record_io(log.path) as recording:
        log.append_batch(raw, durability="os")
    writes = [call for call in recording.operations if call.kind == "pwrite"]
    assert [call.size for call in writes] == [len(raw)]
    assert writes[0].data == log.read_batches(1)[0]


def test_every_changed_byte_has_the_outcome_of_the_copying_path() -> None:
    """Offsets, lengths, attributes and records, with the checksum as it is and made right again."""
    config = PartitionConfig()
    raw = encode_batch(
        [ReferenceRecord(b"value", b"k", (("h", b"v"),), NOW + n, n) for n in range(3)],
        producer_id=5, producer_epoch=0, base_sequence=3,
    )  # fmt: skip
    rng = random.Random(3)
    for at in range(len(raw)):
        for changed in {0, 1, 0xFF, raw[at] ^ 0x10, rng.randrange(256)}:
            spoiled = bytearray(raw)
            spoiled[at] = changed
            for candidate in (bytes(spoiled), with_crc(spoiled)):
                assert outcome(candidate, config, in_place=True) == outcome(
                    candidate, config, in_place=False
                )
    for size in range(len(raw)):
        for candidate in (raw[:size], raw + raw[:size]):
            assert outcome(candidate, config, in_place=True) == outcome(
                candidate, config, in_place=False
            )


@pytest.mark.parametrize(
    ("settings", "raw"),
    [
        ({"max_message_bytes": 200}, batch(b"x" * 300)),
        ({"cleanup_policy": "compact"}, batch(b"no key")),
        ({"message_timestamp_before_max_ms": 10}, batch(b"old", timestamp=NOW - 11)),
        ({"message_timestamp_after_max_ms": 10}, batch(b"new", timestamp=NOW + 11)),
        ({"compression_type": "gzip"}, batch(b"x" * 300)),
        ({"message_timestamp_type": "LogAppendTime"}, batch(b"x")),
        ({}, batch(b"x", codec=1)),
        ({}, batch(b"no producer", transactional=True)),
        ({}, batch(b"no sequence", producer_id=4)),
        ({}, b""),
        ({}, batch(b"two") * 2),
        ({}, with_header(BatchHeader.parse(batch(b"x"))._replace(max_timestamp=NOW + 7),
                         batch(b"x")[61:])),
    ],
)  # fmt: skip
def test_the_settings_of_the_topic_decide_in_both_paths(
    settings: dict[str, Any], raw: bytes
) -> None:
    config = PartitionConfig(**settings)
    assert outcome(raw, config, in_place=True) == outcome(raw, config, in_place=False)


def lz4_batch(*values: bytes, **options: Any) -> bytes:
    """A batch as Kafka's producer packs it: the records of `batch`, in one lz4 frame."""
    plain = batch(*values, **options)
    header = BatchHeader.parse(plain)
    packed = codecs.compress(codecs.CODECS["lz4"], plain[61:])
    return with_header(header._replace(attributes=header.attributes | 3), packed)


def test_a_batch_that_lz4_packed_is_checked_in_place() -> None:
    for sent in ([b"x"], [b"a" * 300, b"b" * 5000], [random.Random(1).randbytes(90_000)] * 3):
        raw = lz4_batch(*sent)
        found = validation.check_in_place(raw, PartitionConfig(), NOW)
        assert found == (BatchHeader.parse(raw), NOW)
        assert outcome(raw, PartitionConfig(), in_place=False) == (found[0], raw)


def test_lz4_batches_are_refused_alike_in_both_paths() -> None:
    """Bytes of frame, blocks and header are changed; the checksum is made right again."""
    dice = random.Random(3)
    whole = lz4_batch(b"some text " * 40, b"more text " * 40, dice.randbytes(200))
    configs = [
        PartitionConfig(),
        PartitionConfig(max_message_bytes=200),
        PartitionConfig(max_decompressed_message_bytes=1024),
        PartitionConfig(cleanup_policy="compact"),
        PartitionConfig(message_timestamp_before_max_ms=10),
        PartitionConfig(compression_type="gzip"),
    ]
    found = set()
    for _ in range(sized(1500, 15_000, 500_000)):
        changed = bytearray(whole)
        for _ in range(dice.randint(0, 2)):
            changed[dice.randrange(21, len(changed))] = dice.randrange(256)
        raw = with_crc(changed)
        config = dice.choice(configs)
        result = outcome(raw, config, in_place=True)
        assert result == outcome(raw, config, in_place=False), raw.hex()
        found.add(result[0] if isinstance(result, tuple) and isinstance(result[0], type) else None)
    assert len(found) > 2


def test_a_packed_batch_that_would_take_too_much_memory_is_not_unpacked() -> None:
    raw = lz4_batch(b"x" * 900_000)
    assert len(raw) < 10_000
    limit = {"max_decompressed_message_bytes": 1 << 17}
    assert validation.check_in_place(raw, PartitionConfig(**limit), NOW) is None
    assert validation.check_in_place(raw, PartitionConfig(), NOW) is not None
    assert _native.check_batch(raw) is None, "without a limit nothing is unpacked"


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("count", [0, 5, 16, 17, 300])
def test_a_write_that_is_cut_short_is_finished_or_taken_back(
    make_log: MakeLog, count: int, call: int
) -> None:
    log = make_log()
    log.append(b"before")
    size = log.segments[0].size_bytes
    raw = batch(b"a" * 500)
    faults = [Fault.short(count, "pwrite", "*.log")]
    if call == 2:
        faults.append(Fault.fail(errno.ENOSPC, "pwrite", "*.log", call=2, forever=True))
    refused = call == 2 or count == 0
    expected = pytest.raises(DiskFullError) if refused else contextlib.nullcontext()
    with inject_io(*faults), expected:
        log.append_batch(raw, durability="os")
    assert log.segments[0].size_bytes == size + (0 if refused else len(raw))
    assert log.segments[0].path.stat().st_size == log.segments[0].size_bytes
    log.append_batch(raw)
    check_invariants(log)


def test_a_write_that_cannot_be_taken_back_is_indeterminate(make_log: MakeLog) -> None:
    log = make_log()
    log.append(b"before")
    faults = (
        Fault.fail(errno.EIO, "pwrite", "*.log", late=True),
        Fault.fail(errno.EIO, "truncate", "*.log"),
    )
    with inject_io(*faults), pytest.raises(IndeterminateAppendError) as caught:
        log.append_batch(batch(b"a", b"b"), durability="os")
    assert caught.value.offsets == range(1, 3)


# ---- without waiting ----


def now(log: Partition, raw: bytes, **options: Any) -> range:
    return log.parts.appender.append_batch(raw, durability="os", wait=False, **options).offsets


def test_an_append_that_need_not_wait(make_log: MakeLog) -> None:
    log = make_log()
    log.append(b"before")
    assert now(log, batch(b"a", b"b")) == range(1, 3)
    with pytest.raises(InvalidRecordError):
        now(log, b"x" * 100)
    with pytest.raises(ConfigError, match="fsync"):
        log.parts.appender.append_batch(batch(b"a"), durability="fsync", wait=False)
    with pytest.raises(ConfigError, match="copies"):
        now(log, batch(b"a", base_offset=9), origin="follower")


def test_a_lock_that_is_held_is_not_waited_for(make_log: MakeLog) -> None:
    log = make_log()
    log.append(b"before")
    held, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with log.parts.view.lock:
            held.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        with pytest.raises(BlockingIOError):
            now(log, batch(b"a"))
    finally:
        leave.set()
        thread.join()
    assert log.end_offset == 1
    assert now(log, batch(b"a")) == range(1, 2)


def test_a_roll_is_left_to_a_caller_that_waits(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=2000)
    producer = {"producer_id": 3, "producer_epoch": 0}
    for sequence in range(10):
        raw = batch(b"x" * 600, base_sequence=sequence, **producer)
        try:
            now(log, raw)
        except BlockingIOError:
            assert not log.append_batch(raw).duplicate
    assert log.end_offset == 10
    assert len(log.segments) > 3
    check_invariants(log)


def test_a_sleeping_log_is_woken_by_a_caller_that_waits(make_store: Callable[..., Store]) -> None:
    store = make_store()
    store.create_topic("t")
    store["t"][0].append(b"before")
    store.close()
    log = make_store()["t"][0]
    with pytest.raises(BlockingIOError):
        now(log, batch(b"a"))
    assert log.append_batch(batch(b"a")).offsets == range(1, 2)
    assert now(log, batch(b"b")) == range(2, 3)


# ---- a transaction that ends between its check and the append ----


def test_a_batch_is_verified_again_after_a_marker(make_log: MakeLog) -> None:
    log = make_log()
    producer = {"producer_id": 7, "producer_epoch": 0, "transactional": True}
    verified: list[int] = []
    open_transaction = True

    def check(producer_id: int, _epoch: int) -> None:
        nonlocal open_transaction
        verified.append(producer_id)
        if not open_transaction:
            raise TransactionStateError("no open transaction")
        if len(verified) == 2:  # it is right now, and wrong before the append
            open_transaction = False
            log.end_transaction(7, 0, commit=True)

    log.parts.appender.transaction_check = check
    log.append_batch(batch(b"a", base_sequence=0, **producer))
    late = batch(b"b", base_sequence=1, **producer)
    with pytest.raises(TransactionStateError):
        log.append_batch(late)
    assert verified == [7, 7, 7]
    assert log.end_offset == log.last_stable_offset == 2
    assert not log.ongoing_transactions
    # The client begins its next transaction, with the same epoch.
    open_transaction = True
    assert log.append_batch(late).offsets == range(2, 3)
    assert log.last_stable_offset == 2


def test_the_marker_of_another_producer_costs_one_check(make_log: MakeLog) -> None:
    log = make_log()
    verified: list[int] = []

    def check(producer_id: int, _epoch: int) -> None:
        verified.append(producer_id)
        if len(verified) == 1:
            log.end_transaction(8, 0, commit=False)

    log.parts.appender.transaction_check = check
    raw = batch(b"a", producer_id=7, producer_epoch=0, base_sequence=0, transactional=True)
    assert log.append_batch(raw).offsets == range(1, 2)
    assert verified == [7, 7]
    with pytest.raises(BlockingIOError):
        now(log, raw)
