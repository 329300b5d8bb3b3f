"""The reference codec against the format's golden vectors and against two other Python clients."""

from __future__ import annotations

import importlib
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from logstore.testing import FormatViolation, ReferenceRecord, decode_batch, encode_batch, read_log
from logstore.testing.reference import _Reader, crc32c, encode_varint
from logstore.testing.strategies import batches, reference_records
from tests.kit import peer_encode, with_crc

CODEC_NAMES = ["none", "gzip", "snappy", "lz4", "zstd"]
EXAMPLES = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)

TWO_RECORDS = bytes.fromhex(
    "0000000000000000000000480000000002fb5b268f00000000000100000000000003e800000000000003e9"
    "ffffffffffffffffffffffffffff0000000210000000026b0276001a00020201010402680278026e01"
)
ABORT_MARKER = bytes.fromhex(
    "000000000000000a00000042000000030212e67bf0003000000000000000000000138800000000000013880000"
    "0000000000070002ffffffff000000012000000008000000000c00000000000900"
)
EMPTY_BATCH = bytes.fromhex(
    "00000000000000140000003100000003024f3074bf001000000004ffffffffffffffff0000000000001e61"
    "000000000000000700020000006400000000"
)


# --------------------------------------------------------------------------------- golden vectors


def test_crc32c_of_the_check_string() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0


@pytest.mark.parametrize(
    ("value", "bits", "encoded"),
    [
        (0, 32, "00"), (-1, 32, "01"), (1, 32, "02"), (-2, 32, "03"),
        (63, 32, "7e"), (-64, 32, "7f"), (64, 32, "8001"), (300, 32, "d804"),
        (2**31 - 1, 32, "feffffff0f"), (-(2**31), 32, "ffffffff0f"),
        (2**63 - 1, 64, "feffffffffffffffff01"), (-(2**63), 64, "ffffffffffffffffff01"),
    ],
)  # fmt: skip
def test_varints_of_the_specification(value: int, bits: int, encoded: str) -> None:
    assert encode_varint(value, bits).hex() == encoded
    assert _Reader(bytes.fromhex(encoded)).varint(bits) == value


@pytest.mark.parametrize(
    ("encoded", "bits"),
    [("", 32), ("80", 32), ("ffffffff8f00", 32), ("ffffffff10", 32), ("ff" * 10 + "00", 64),
     ("ffffffffffffffffff02", 64)],
)  # fmt: skip
def test_varints_that_are_cut_too_long_or_too_large_are_refused(encoded: str, bits: int) -> None:
    with pytest.raises(FormatViolation):
        _Reader(bytes.fromhex(encoded)).varint(bits)


@given(st.integers(-(2**63), 2**63 - 1))
def test_varints_round_trip(value: int) -> None:
    assert _Reader(encode_varint(value, 64)).varint(64) == value
    if -(2**31) <= value < 2**31:
        assert _Reader(encode_varint(value)).varint() == value


def test_golden_two_records() -> None:
    records = (
        ReferenceRecord(b"v", b"k", (), 1000, 0),
        ReferenceRecord(None, None, (("h", b"x"), ("n", None)), 1001, 1),
    )
    assert encode_batch(records) == TWO_RECORDS
    batch = decode_batch(TWO_RECORDS)
    assert batch.records == records
    assert (batch.base_offset, batch.last_offset, batch.next_offset) == (0, 1, 2)
    assert (batch.leader_epoch, batch.producer_id, batch.producer_epoch) == (0, -1, -1)
    assert (batch.base_timestamp, batch.max_timestamp) == (1000, 1001)
    assert batch.last_sequence == -1
    assert batch.size == 84


def test_golden_abort_marker() -> None:
    marker = ReferenceRecord(
        struct.pack(">hi", 0, 9), struct.pack(">hh", 0, 0), timestamp=5000, offset=10
    )
    encoded = encode_batch(
        [marker],
        base_offset=10,
        leader_epoch=3,
        transactional=True,
        control=True,
        producer_id=7,
        producer_epoch=2,
    )
    assert encoded == ABORT_MARKER
    batch = decode_batch(ABORT_MARKER)
    assert batch.control
    assert batch.transactional
    assert batch.records == (marker,)


def test_golden_empty_batch() -> None:
    encoded = encode_batch(
        [],
        base_offset=20,
        last_offset=24,
        leader_epoch=3,
        transactional=True,
        max_timestamp=7777,
        producer_id=7,
        producer_epoch=2,
        base_sequence=100,
    )
    assert encoded == EMPTY_BATCH
    batch = decode_batch(EMPTY_BATCH)
    assert batch.records == ()
    assert batch.next_offset == 25
    assert batch.last_sequence == 104


@pytest.mark.parametrize(("first", "last"), [(5, 7), (2**31 - 3, 2**31 - 1), (2**31 - 1, 1)])
def test_sequences_wrap_to_zero(first: int, last: int) -> None:
    batch = encode_batch(
        [ReferenceRecord(b"")] * 3, producer_id=1, producer_epoch=0, base_sequence=first
    )
    assert decode_batch(batch).last_sequence == last


# ------------------------------------------------------------------------------------ strictness


def patched(batch: bytes, at: int, layout: str, value: int) -> bytes:
    out = bytearray(batch)
    struct.pack_into(layout, out, at, value)
    return with_crc(bytes(out))


@pytest.mark.parametrize(
    ("at", "layout", "value", "reason"),
    [
        (0, ">q", -1, "baseOffset"),
        (8, ">i", 71, "batchLength"),
        (8, ">i", 73, "batchLength"),
        (12, ">i", -2, "partitionLeaderEpoch"),
        (16, ">b", 1, "magic"),
        (21, ">h", 5, "codec 5"),
        (21, ">h", 0x80, "attributes"),
        (21, ">h", 0x100, "attributes"),
        (21, ">h", -0x8000, "attributes"),
        (21, ">h", 0x10, "without a producer id"),
        (21, ">h", 0x20, "control record"),
        (21, ">h", 3, "lz4"),
        (23, ">i", -1, "lastOffsetDelta"),
        (23, ">i", 0, "2 records in 1 offsets"),
        (35, ">q", 1000, "maxTimestamp"),
        (35, ">q", -2, "maxTimestamp"),
        (43, ">q", -2, "producerId"),
        (51, ">h", -2, "producerEpoch"),
        (53, ">i", -2, "baseSequence"),
        (57, ">i", -1, "-1 records"),
        (57, ">i", 0, "no records"),
        (57, ">i", 1, "bytes follow the last of 1 records"),
        (27, ">q", -1002, "timestamp"),
    ],
)
def test_a_field_out_of_range_is_refused(at: int, layout: str, value: int, reason: str) -> None:
    with pytest.raises(FormatViolation, match=reason):
        decode_batch(patched(TWO_RECORDS, at, layout, value))


def test_more_records_than_bytes_is_refused() -> None:
    batch = patched(patched(TWO_RECORDS, 23, ">i", 2), 57, ">i", 3)
    with pytest.raises(FormatViolation, match="1 bytes wanted, 0 are left"):
        decode_batch(batch)


def with_payload(payload: bytes, count: int = 1, last_delta: int = 0) -> bytes:
    header = bytearray(encode_batch([ReferenceRecord(b"")])[:61])
    struct.pack_into(">i", header, 8, 49 + len(payload))
    struct.pack_into(">i", header, 23, last_delta)
    struct.pack_into(">i", header, 57, count)
    return with_crc(bytes(header) + payload)


def test_the_helper_makes_sound_batches() -> None:
    # length, attributes, timestamp delta, offset delta, key, value, no headers
    assert decode_batch(with_payload(bytes.fromhex("0c 00 00 00 01 00 00"))).records == (
        ReferenceRecord(b"", offset=0),
    )


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ("0e 00 00 00 01 00 00", "a record of 7 bytes where 6"),
        ("01", "a record of -1 bytes"),
        ("0a 00 00 00 01 00", "1 bytes wanted, 0 are left"),
        ("0e 00 00 00 01 00 00 00", "1 bytes follow the last field"),
        ("0c 00 00 00 01 00 00 00", "1 bytes follow the last of 1 records"),
        ("0c 00 00 00 01 08 00", "4 bytes wanted, 1 are left"),
        ("0c 00 00 00 01 00 01", "-1 headers"),
        ("0c 00 00 00 01 00 02", "1 headers in 0 bytes"),
        ("10 00 00 00 01 00 02 01 00", "without a name"),
        ("12 00 00 00 01 00 02 02 ff 00", "UTF-8"),
        ("0c 00 00 01 01 00 00", "offset delta -1"),
        ("0c 00 00 02 01 00 00", "past the last"),
        ("0c 00 03 00 01 00 00", "timestamp -3"),
    ],
)
def test_a_record_that_breaks_a_rule_is_refused(payload: str, reason: str) -> None:
    with pytest.raises(FormatViolation, match=reason):
        decode_batch(with_payload(bytes.fromhex(payload)))


def test_offset_deltas_must_increase() -> None:
    one = bytes.fromhex("0c 00 00 00 01 00 00")
    with pytest.raises(FormatViolation, match="offset delta 0 follows 0"):
        decode_batch(with_payload(one + one, count=2, last_delta=1))


@pytest.mark.parametrize("negative", ["03", "05", "ffffffff0f"])
def test_any_negative_length_is_null_and_record_attributes_are_ignored(negative: str) -> None:
    body = bytes.fromhex("ff 00 00" + negative + negative + "00")
    batch = with_payload(encode_varint(len(body)) + body)
    assert decode_batch(batch).records == (ReferenceRecord(None, offset=0),)


@pytest.mark.parametrize("batch", [TWO_RECORDS, ABORT_MARKER, EMPTY_BATCH])
def test_every_changed_bit_under_the_crc_and_every_cut_is_refused(batch: bytes) -> None:
    for position in [8, 9, 10, 11, *range(16, len(batch))]:
        for bit in range(8):
            damaged = bytearray(batch)
            damaged[position] ^= 1 << bit
            with pytest.raises(FormatViolation):
                decode_batch(damaged)
    for size in range(len(batch)):
        with pytest.raises(FormatViolation):
            decode_batch(batch[:size])
    with pytest.raises(FormatViolation):
        decode_batch(batch + b"\0")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (None, bytes(6), "key None"),
        (b"\0\0\0", bytes(6), "key"),
        (b"\xff\xff\0\0", bytes(6), "version -1"),
        (bytes(4), bytes(5), "value"),
        (bytes(4), None, "value"),
    ],
)
def test_malformed_markers_are_refused(key: bytes | None, value: bytes | None, reason: str) -> None:
    options: dict[str, Any] = {"transactional": True, "control": True, "producer_id": 1}
    with pytest.raises(FormatViolation, match=reason):
        decode_batch(encode_batch([ReferenceRecord(value, key)], **options))
    good = ReferenceRecord(bytes(6), bytes(4))
    with pytest.raises(FormatViolation, match="2 records"):
        decode_batch(encode_batch([good, good], **options))
    with pytest.raises(FormatViolation, match="sequence"):
        decode_batch(encode_batch([good], base_sequence=0, **options))


def test_the_encoder_refuses_negative_timestamps_but_minus_one() -> None:
    assert decode_batch(encode_batch([ReferenceRecord(b"")])).max_timestamp == -1
    with pytest.raises(FormatViolation, match="timestamp -2"):
        encode_batch([ReferenceRecord(b"", timestamp=-2)])


# ---------------------------------------------------------------------------------- whole files


def test_read_log_returns_positions_and_refuses_disorder(tmp_path: Path) -> None:
    path = tmp_path / f"{5:020d}.log"
    first = encode_batch([ReferenceRecord(b"a")] * 3, base_offset=5)
    second = encode_batch([ReferenceRecord(b"b")], base_offset=9)
    path.write_bytes(first + second)
    batches = read_log(path)
    assert [(batch.position, batch.base_offset) for batch in batches] == [(0, 5), (len(first), 9)]

    path.write_bytes(second + first)
    with pytest.raises(FormatViolation, match=f"byte {len(second)}: offset 5 where 10 is next"):
        read_log(path)
    path.write_bytes(encode_batch([ReferenceRecord(b"")], base_offset=4))
    with pytest.raises(FormatViolation, match="offset 4 where 5 is next"):
        read_log(path)
    for cut in range(1, len(second)):
        path.write_bytes(first + second[:cut])
        with pytest.raises(FormatViolation, match=f"byte {len(first)}"):
            read_log(path)
    path.write_bytes(first + bytes(100))
    with pytest.raises(FormatViolation, match=f"byte {len(first)}: 12 bytes are less"):
        read_log(path)


# ------------------------------------------------------------------------------- random batches


@EXAMPLES
@given(batches())
def test_what_is_decoded_encodes_to_the_same_records(batch: bytes) -> None:
    decoded = decode_batch(batch)
    again = encode_batch(
        decoded.records,
        base_offset=decoded.base_offset,
        last_offset=decoded.last_offset,
        leader_epoch=decoded.leader_epoch,
        codec=decoded.codec,
        append_time=decoded.max_timestamp if decoded.log_append_time else None,
        transactional=decoded.transactional,
        delete_horizon=decoded.delete_horizon,
        max_timestamp=decoded.max_timestamp,
        producer_id=decoded.producer_id,
        producer_epoch=decoded.producer_epoch,
        base_sequence=decoded.base_sequence,
    )
    # deltas under an append time are the client's and are not seen by a reader
    if not decoded.log_append_time:
        assert again == batch
    assert decode_batch(again).records == decoded.records


# ---------------------------------------------------------------------------------------- peers


def peer_modules() -> list[Any]:
    params = []
    for name in ("kafka.record.default_records", "aiokafka.record.default_records"):
        params.append(pytest.param(name, id=name.split(".")[0]))
    return params


def peer_class(module: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(pytest.importorskip(module), name)
    return found


def peer_has(module: str, codec: int) -> bool:
    codecs = pytest.importorskip(f"{module.split('.')[0]}.codec")
    return codec == 0 or bool(getattr(codecs, f"has_{CODEC_NAMES[codec]}")())


def need_peer(module: str, codec: int) -> None:
    if not peer_has(module, codec):
        pytest.skip("the peer lacks the codec")


def peer_decode(module: str, data: bytes) -> list[ReferenceRecord]:
    batch = peer_class(module, "DefaultRecordBatch")(data)
    assert batch.validate_crc()
    return [
        ReferenceRecord(
            record.value, record.key, tuple(record.headers), record.timestamp, record.offset
        )
        for record in batch
    ]


def numbered(records: Iterable[ReferenceRecord]) -> tuple[ReferenceRecord, ...]:
    return tuple(replace(record, offset=offset) for offset, record in enumerate(records))


def sent(max_size: int = 200) -> st.SearchStrategy[list[ReferenceRecord]]:
    """What a client can send: every record has a time."""
    timed = reference_records(max_size).map(
        lambda record: replace(record, timestamp=max(record.timestamp, 0))
    )
    return st.lists(timed, min_size=1, max_size=20)


@pytest.mark.parametrize("module", peer_modules())
@pytest.mark.parametrize("codec", range(5), ids=CODEC_NAMES)
@EXAMPLES
@given(data=st.data())
def test_we_decode_what_a_peer_encodes(module: str, codec: int, data: st.DataObject) -> None:
    need_peer(module, codec)
    records = data.draw(sent())
    encoded = peer_encode(module, records, codec)
    batch = decode_batch(encoded)
    assert batch.records == numbered(records)
    assert batch.codec in (codec, 0)  # peers leave it out when it does not pay
    if batch.codec == 0:
        # to the byte; the leader epoch is the broker's to set
        assert encode_batch(records, leader_epoch=batch.leader_epoch) == encoded


@pytest.mark.parametrize("module", peer_modules())
@pytest.mark.parametrize("codec", range(5), ids=CODEC_NAMES)
@EXAMPLES
@given(data=st.data())
def test_a_peer_decodes_what_we_encode(module: str, codec: int, data: st.DataObject) -> None:
    need_peer(module, codec)
    encoded = data.draw(batches(codec=codec))
    batch = decode_batch(encoded)
    assert tuple(peer_decode(module, encoded)) == batch.records
    peer = peer_class(module, "DefaultRecordBatch")(encoded)
    assert (peer.base_offset, peer.next_offset) == (batch.base_offset, batch.next_offset)
    assert peer.is_transactional == batch.transactional
    assert (peer.producer_id, peer.base_sequence) == (batch.producer_id, batch.base_sequence)


@pytest.mark.parametrize("module", peer_modules())
def test_peers_and_we_agree_on_producer_fields(module: str) -> None:
    records = [ReferenceRecord(b"v", timestamp=5)]
    encoded = peer_encode(
        module, records, 0, producer_id=7, producer_epoch=2, base_sequence=9, transactional=1
    )
    ours = encode_batch(
        records, producer_id=7, producer_epoch=2, base_sequence=9, transactional=True
    )
    leader_epoch = slice(12, 16)  # the broker's to set
    assert encoded[: leader_epoch.start] == ours[: leader_epoch.start]
    assert encoded[leader_epoch.stop :] == ours[leader_epoch.stop :]


@pytest.mark.parametrize("module", peer_modules())
def test_peers_know_a_control_batch_and_an_empty_one(module: str) -> None:
    peer = peer_class(module, "DefaultRecordBatch")
    assert peer(ABORT_MARKER).is_control_batch
    assert peer_decode(module, EMPTY_BATCH) == []


# -------------------------------------------------------------------------------------- the kit


def test_the_kit_needs_hypothesis_only_for_its_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("logstore.testing")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.split(".")[0] == "hypothesis"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    kit = importlib.import_module("logstore.testing")
    assert kit.decode_batch(TWO_RECORDS).size == 84
    with pytest.raises(ImportError, match=r'pip install "logstore-engine\[test\]"'):
        kit.records()
    with pytest.raises(AttributeError, match="recrods"):
        kit.recrods()
