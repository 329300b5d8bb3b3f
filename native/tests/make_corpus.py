"""Writes the fuzz seeds in corpus/: sound inputs, and the ways in which a file lies.

    python native/tests/make_corpus.py

Deterministic, so that a run changes nothing unless this file changed.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def varint(value: int) -> bytes:
    zigzag = value << 1 if value >= 0 else (-value << 1) - 1
    out = bytearray()
    while zigzag >= 0x80:
        out.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    return bytes([*out, zigzag])


def sized(data: bytes | None) -> bytes:
    return varint(-1) if data is None else varint(len(data)) + data


def record(
    delta: int,
    value: bytes | None = b"v",
    key: bytes | None = None,
    headers: tuple[tuple[bytes, bytes | None], ...] = (),
    time: int = 0,
) -> bytes:
    body = b"\0" + varint(time) + varint(delta) + sized(key) + sized(value) + varint(len(headers))
    body += b"".join(sized(name) + sized(content) for name, content in headers)
    return varint(len(body)) + body


def batch(
    payload: bytes,
    count: int,
    *,
    base: int = 0,
    length: int | None = None,
    last: int | None = None,
    magic: int = 2,
    attributes: int = 0,
    crc: int | None = None,
) -> bytes:
    tail = struct.pack(
        ">hiqqqhii", attributes, count - 1 if last is None else last, 1000, 2000, -1, -1, -1, count
    )
    tail += payload
    crc = crc32c(tail) if crc is None else crc
    length = len(tail) + 9 if length is None else length
    return struct.pack(">qiibI", base, length, 0, magic, crc) + tail


THREE = record(0, b"a") + record(1, b"bb", b"k") + record(2, None, b"k")
HEADERS = record(0, b"x" * 40, b"key", ((b"h", b"1"), (b"", b""), (b"n", None)), time=5)
ONE = batch(record(0), 1)

BATCHES = {
    "one_record": ONE,
    "three_records": batch(THREE, 3),
    "headers": batch(HEADERS, 1),
    "no_records": batch(b"", 0, last=4),
    "gap_in_offsets": batch(record(0) + record(9), 2, last=20),
    "control": batch(record(0, b"\0\0\0\0\0\1", b"\0\0\0\1"), 1, attributes=0x30),
    "codec_zstd": batch(b"\x28\xb5\x2f\xfd\x20\x01", 1, attributes=4),
    "append_time": batch(THREE, 3, attributes=8),
    "length_too_large": batch(THREE, 3, length=0x7FFFFFFF),
    "length_one_more": batch(THREE, 3, length=len(batch(THREE, 3)) - 11),
    "length_too_small": batch(THREE, 3, length=48),
    "length_negative": batch(THREE, 3, length=-1),
    "count_negative": batch(THREE, -1, last=2),
    "count_beyond_offsets": batch(THREE, 3, last=1),
    "count_huge": batch(THREE, 0x7FFFFFFF),
    "offset_delta_negative": batch(THREE, 3, last=-1),
    "base_offset_negative": batch(THREE, 3, base=-1),
    "base_offset_largest": batch(THREE, 3, base=0x7FFFFFFFFFFFFFFF),
    "magic_0": batch(THREE, 3, magic=0),
    "magic_1": batch(THREE, 3, magic=1),
    "magic_3": batch(THREE, 3, magic=3),
    "checksum_wrong": batch(THREE, 3, crc=1),
    "header_cut": ONE[:60],
    "empty": b"",
}


def records_input(payload: bytes, count: int, last: int, flags: int = 0) -> bytes:
    return struct.pack(">BHi", flags, count, last) + payload


RECORDS = {
    "one": records_input(record(0), 1, 0),
    "three": records_input(THREE, 3, 2),
    "headers": records_input(HEADERS, 1, 0),
    "append_time": records_input(THREE, 3, 2, flags=1),
    "large_value": records_input(record(0, b"z" * 300), 1, 0),
    "times": records_input(record(0, time=-(1 << 40)) + record(1, time=1 << 62), 2, 1),
    "none_but_bytes": records_input(THREE, 0, 2),
    "more_than_claimed": records_input(THREE, 2, 2),
    "fewer_than_claimed": records_input(THREE, 9, 20),
    "offset_goes_back": records_input(record(1) + record(0), 2, 1),
    "offset_beyond_batch": records_input(record(5), 1, 4),
    "record_length_negative": records_input(varint(-5) + b"\0" * 8, 1, 0),
    "record_length_zero": records_input(varint(0) + b"\0" * 8, 1, 0),
    "record_length_too_large": records_input(varint(1 << 30) + record(0), 1, 0),
    "record_length_one_less": records_input(varint(6) + record(0)[1:], 1, 0),
    "key_length_lies": records_input(varint(8) + b"\0\0\0" + varint(1 << 30), 1, 0),
    "value_length_lies": records_input(varint(9) + b"\0\0\0\1" + varint(1 << 30), 1, 0),
    "header_count_negative": records_input(varint(6) + b"\0\0\0\1\1" + varint(-1), 1, 0),
    "header_count_huge": records_input(varint(10) + b"\0\0\0\1\1" + varint(1 << 30), 1, 0),
    "header_name_negative": records_input(varint(8) + b"\0\0\0\1\1\2\1\1", 1, 0),
    "varint_overlong": records_input(b"\x8e\x80\x80\x80\x80\x80\x00" + b"\0" * 9, 1, 0),
    "varint_five_bytes_too_big": records_input(b"\xff\xff\xff\xff\x7f" + b"\0" * 9, 1, 0),
    "varint_padded": records_input(b"\x8e\x80\x00" + record(0)[1:], 1, 0),
    "varint_unending": records_input(b"\xff" * 20, 1, 0),
    "time_eleven_bytes": records_input(varint(20) + b"\0" + b"\x80" * 11 + b"\0" * 8, 1, 0),
    "empty": records_input(b"", 1, 0),
}


def cleaner_input(records: bytes, attributes: int, rules: int) -> bytes:
    """A batch as the cleaner meets it, made of an input for the records' target."""
    return bytes([attributes]) + records[1:7] + bytes([rules]) + records[7:]


KEYED = records_input(
    record(0, key=b"k") + record(1, None, key=b"k", time=5) + record(3, key=b"other"), 3, 4
)
MARKER = records_input(record(0, b"\0" * 6, key=b"\0\0\0\0"), 1, 0)
CLEANERS = {
    "newest": cleaner_input(KEYED, 0x00, 0),
    "superseded": cleaner_input(KEYED, 0x00, 8),
    "horizon_passed": cleaner_input(KEYED, 0x40, 2),
    "horizon_ahead": cleaner_input(KEYED, 0x40, 8),
    "append_time": cleaner_input(KEYED, 0x08, 8),
    "purge": cleaner_input(KEYED, 0x00, 1),
    "aborted": cleaner_input(KEYED, 0x10, 16),
    "aborted_last_of_producer": cleaner_input(KEYED, 0x10, 16 + 64 + 128),
    "end_of_the_round": cleaner_input(RECORDS["one"], 0x00, 4),
    "marker": cleaner_input(MARKER, 0x30, 16 + 32),
    "marker_horizon_passed": cleaner_input(MARKER, 0x70, 2),
    **{f"records_{name}": cleaner_input(data, 0x00, 8) for name, data in RECORDS.items()},
}


def index_input(target: int, entries: list[tuple[int, int]], form: str = ">ii") -> bytes:
    return struct.pack(">q", target) + b"".join(struct.pack(form, *entry) for entry in entries)


SORTED = [(10, 100), (20, 300), (30, 700)]
INDEXES = {
    "empty": index_input(5, []),
    "before_all": index_input(5, SORTED),
    "on_an_entry": index_input(20, SORTED),
    "between": index_input(25, SORTED),
    "after_all": index_input(99, SORTED),
    "half_an_entry": index_input(25, SORTED)[:-3],
    "unsorted": index_input(25, [(30, 1), (10, 2), (20, 3), (-1, 4)]),
    "equal": index_input(20, [(20, 1), (20, 2), (20, 3)]),
    "zeroes": index_input(0, [(0, 0)] * 8),
    "negative": index_input(-5, [(-10, -1), (-5, -1), (0x7FFFFFFF, 0x7FFFFFFF)]),
    "times": index_input(1500, [(1000, 1), (1500, 2), (1 << 62, 3)], ">qi"),
}


def chain(*sizes: int, base: int = 0) -> bytes:
    return b"".join(
        batch(record(0, bytes([65 + i]) * size), 1, base=base + i) for i, size in enumerate(sizes)
    )


SEGMENTS = {
    "whole": b"\0" + chain(10, 200, 30),
    "short_reads": b"\7" + chain(10, 200, 30),
    "torn_header": b"\0" + chain(10, 20) + ONE[:40],
    "torn_body": b"\0" + chain(10, 200)[:-1],
    "zeroes_behind": b"\0" + chain(10, 20) + b"\0" * 200,
    "garbage_between": b"\0" + chain(10) + b"\xff" * 77 + chain(20, 30, base=1),
    "bad_checksum_between": b"\0"
    + chain(10)
    + batch(record(0), 1, base=1, crc=0xEE000000)
    + chain(20, 30, base=2),
    "offsets_go_back": b"\0" + chain(10, 20) + chain(10),
    "offset_far_from_base": b"\0" + chain(10) + chain(10, base=1 << 40),
    "gap": b"\0" + chain(10) + chain(20, base=50),
    "legacy_behind": b"\0" + chain(10) + batch(THREE, 3, magic=1, base=1),
    "length_lies": b"\0"
    + chain(10)
    + batch(THREE, 3, base=1, length=0x7FFFFFFF)
    + chain(9, base=4),
    "empty": b"\0",
}


VARINTS = {
    "small": varint(1) + varint(-1) + varint(63) + varint(-64),
    "two_and_three": varint(64) + varint(8191) + varint(8192) + varint(1 << 20) + b"\0" * 8,
    "widest": varint((1 << 31) - 1)
    + varint(-(1 << 31))
    + varint((1 << 63) - 1)
    + varint(-(1 << 63)),
    "too_wide_for_32": b"\xff\xff\xff\xff\x1f",
    "too_wide_for_64": b"\xff" * 9 + b"\x03",
    "padded": b"\x80\x80\x80\x00\x81\x00",
    "unending": b"\xff" * 24,
    "cut": b"\x80",
    "empty": b"",
}


def header_input(
    file: bytes, *, start: int = 0, reads: int = 0, find: int = 0, least: int = 0
) -> bytes:
    return struct.pack(">BBqq", reads, start, find, least) + file


def legacy(magic: int) -> bytes:
    """A whole message of format 0 or 1: CRC-32 of the other kind over all that follows it."""
    body = bytes([magic, 0]) + (b"\0" * 8 if magic else b"") + struct.pack(">ii", -1, 3) + b"old"
    return struct.pack(">qiI", 0, len(body) + 4, zlib.crc32(body)) + body


HEADERS_ALONE = {
    "whole": header_input(chain(10, 200, 30), find=1),
    "short_reads": header_input(chain(10, 200, 30), reads=7, find=2),
    "behind": header_input(chain(10, 20), find=99),
    "before": header_input(chain(10, 20, base=7), find=3, least=7),
    "least_not_kept": header_input(chain(10, 20), find=1, least=1),
    "inside_a_batch": header_input(chain(10, 20), start=5),
    "at_the_end": header_input(b"", start=0),
    "format_0": header_input(legacy(0) + b"\0" * 61),
    "format_1": header_input(legacy(1) + b"\0" * 61),
    "format_1_damaged": header_input(legacy(1)[:-1] + b"x" + b"\0" * 61),
    **{f"batch_{name}": header_input(data) for name, data in BATCHES.items()},
}


def resync_input(
    file: bytes,
    *,
    reads: int = 0,
    start: int = 0,
    least: int = 0,
    most: int = 255,
    budget: int = 255,
) -> bytes:
    return bytes([reads, start, least, most, budget]) + file


RESYNCS = {
    "next_batch": resync_input(chain(10, 20, 30)),
    "short_steps": resync_input(chain(10, 20, 30), budget=1, reads=3),
    "behind_garbage": resync_input(b"\x02" * 90 + chain(20)),
    "two_candidates": resync_input(
        b"\0" * 9 + batch(THREE, 3, base=4, crc=0xAA000000) + chain(5, base=9)
    ),
    "first_is_damaged": resync_input(
        b"\xff" + batch(THREE, 3, crc=1) + chain(9, base=3), budget=60
    ),
    "one_inside_another": resync_input(
        b"?" + batch(record(0, batch(record(0), 1, base=5)), 1, base=2, crc=1) + b"!"
    ),
    "below_the_least": resync_input(b"?" + chain(10, 20), least=1),
    "above_the_most": resync_input(b"?" + chain(10, 20, base=3), most=3),
    "length_lies": resync_input(b"?" + batch(THREE, 3, length=0x7FFFFFFF) + chain(9, base=3)),
    "damage_at_the_end": resync_input(chain(10) + b"\0" * 61, start=1),
    "none": resync_input(b"\0" * 200, budget=16),
    "empty": resync_input(b""),
}


def run_input(
    body: bytes, *, rows: int = 70, flags: int = 0xFC, last: int = 300, changes: bytes = b""
) -> bytes:
    return struct.pack(">BBBi", rows, len(changes) // 3, flags, last) + changes + body


def run_body(value: bytes | None, key: bytes | None = None, time: int = 0) -> bytes:
    """A record without its length and its offset delta, which the target makes."""
    return b"\0" + varint(time) + sized(key) + sized(value) + varint(0)


RUNS = {
    "alike": run_input(run_body(b"value")),
    "keyed": run_input(run_body(b"v" * 40, b"key")),
    "null_values": run_input(run_body(None, b"key")),
    "long": run_input(run_body(b"z" * 300, time=70), rows=255),
    "append_time": run_input(run_body(b"value", time=9), flags=0xFD),
    "offsets_skip": run_input(run_body(b"value"), flags=0xFE),
    "one_row_a_run": run_input(run_body(b"value"), flags=0),
    "ends_early": run_input(run_body(b"value"), last=9),
    "one_differs": run_input(run_body(b"value"), changes=b"\0\x50\x77"),
    "one_has_headers": run_input(run_body(b"value"), changes=b"\0\x17\x02"),
    "length_changes": run_input(run_body(b"value" * 9, b"k"), changes=b"\1\0\x02\1\1\x80"),
    "short": run_input(run_body(b""), rows=5),
}


def columns_input(
    first: tuple[bytes, int],
    second: tuple[bytes, int] = (b"", 0),
    *,
    fields: int = 31,
    rows: int = 256,
    size: int = 255,
    times: int = 0,
    start: int = 0,
    stop: int = 255,
) -> bytes:
    head = bytes([fields, rows - 1, size, times | start << 2, stop, first[1], second[1]])
    return head + struct.pack(">H", len(first[0])) + first[0] + second[0]


MANY = b"".join(record(i, b"value %03d" % i, b"k") for i in range(90)), 90
COLUMNS = {
    "three": columns_input((THREE, 3)),
    "two_batches": columns_input((THREE, 3), MANY),
    "headers": columns_input((HEADERS, 1), (HEADERS, 1)),
    "many": columns_input(MANY, MANY),
    "rows_of_seven": columns_input(MANY, MANY, rows=7),
    "few_bytes": columns_input(MANY, (HEADERS, 1), size=2),
    "no_bytes": columns_input(MANY, size=0),
    "from_and_to": columns_input(MANY, start=5, stop=40),
    "times_of_two_kinds": columns_input((THREE, 3), MANY, times=2),
    "values_only": columns_input(MANY, fields=8),
    "offsets_only": columns_input(MANY, fields=1),
    "nothing": columns_input(MANY, fields=0),
    "no_room_for_headers": columns_input((HEADERS, 1), (HEADERS, 1), size=1),
    "damaged": columns_input((THREE[:-2], 3), MANY),
    **{f"records_{name}": columns_input((data[7:], 3)) for name, data in RECORDS.items()},
}


def block(data: bytes, *, stored: bool = False, length: int | None = None) -> bytes:
    size = len(data) if length is None else length
    return struct.pack("<I", size | (0x80000000 if stored else 0)) + data


END_MARK = b"\0\0\0\0"
LZ4 = {
    "stored": b"\1" + block(b"as it is", stored=True) + END_MARK,
    "literals": b"\1" + block(b"\x50hello") + END_MARK,
    "match": b"\1" + block(b"\x15ab\x01\0\x50aaaaa"[:4] + b"\0\x10b") + END_MARK,
    "long_match": b"\1" + block(b"\x1fa\1\0\xff\xff\x09\x50aaaaa") + END_MARK,
    "two_blocks": b"\1" + block(b"\x20ab") + block(b"cd", stored=True) + END_MARK,
    "behind_the_end": b"\1" + block(b"\x20ab") + END_MARK + b"ignored",
    "no_end": b"\1" + block(b"\x20ab"),
    "length_lies": b"\1" + block(b"\x20ab", length=65536) + END_MARK,
    "length_too_large": b"\1" + block(b"\x20ab", length=65537) + END_MARK,
    "empty_block": b"\1" + block(b"", stored=True) + END_MARK,
    "distance_zero": b"\1" + block(b"\x10a\0\0\x10a") + END_MARK,
    "distance_before_the_start": b"\1" + block(b"\x10a\x09\0\x10a") + END_MARK,
    "literals_lie": b"\1" + block(b"\xf0\xffab") + END_MARK,
    "match_lies": b"\1" + block(b"\x1fa\1\0" + b"\xff" * 300) + END_MARK,
    "header_of_another": b"\0\x04\x22\x4d\x18\x64\x40\xa7" + END_MARK,
    "made": b"\2" + b"some bytes that do not pack",
    "made_and_packed": b"\2" + b"z" * 4000,
    "made_of_nothing": b"\2",
    "empty": b"",
}


def aborted(producer: int, first: int, last: int) -> bytes:
    return struct.pack(">hqqqq", 0, producer, first, last, 0)


def transactions_input(entries: bytes, *batches: tuple[int, int, int]) -> bytes:
    return bytes([len(entries) // 34]) + entries + b"".join(map(bytes, batches))


TRANSACTIONS = {
    "one": transactions_input(aborted(1, 0, 9), (1, 4, 0), (1, 1, 0)),
    "another_producer": transactions_input(aborted(1, 0, 9), (2, 4, 0), (2, 1, 1)),
    "two_of_one": transactions_input(
        aborted(1, 0, 3) + aborted(1, 8, 12), (1, 2, 0), (1, 1, 0), (1, 2, 0x30), (1, 1, 0)
    ),
    "out_of_order": transactions_input(aborted(1, 8, 12) + aborted(2, 0, 3), (2, 2, 0), (1, 9, 0)),
    "marker_alone": transactions_input(aborted(1, 0, 0), (1, 1, 0)),
    "committed": transactions_input(b"", (1, 2, 0), (1, 1, 1)),
    "end_before_its_start": transactions_input(aborted(1, 9, 0), (1, 40, 0)),
    "negative": transactions_input(aborted(-1, -5, -1), (255, 2, 0)),
    "largest": transactions_input(aborted(1, 0, (1 << 63) - 1), (1, 2, 0), (1, 2, 0)),
    "cut": b"\2" + aborted(1, 0, 9) + aborted(1, 0, 9)[:20],
    "empty": b"",
}


LZ4_HEADER = b"\x04\x22\x4d\x18\x60\x40\x82"
BATCH_CHECKS = {
    **{name: b"\0" + data for name, data in BATCHES.items()},
    "lz4": b"\0" + batch(LZ4_HEADER + block(THREE, stored=True) + END_MARK, 3, attributes=3),
    "lz4_two_blocks": b"\0"
    + batch(
        LZ4_HEADER + block(THREE[:9], stored=True) + block(THREE[9:]) + END_MARK, 3, attributes=3
    ),
    "lz4_damaged": b"\0" + batch(LZ4_HEADER + block(THREE, length=900), 3, attributes=3),
    "no_batch": b"\0",
}


def produce_frame(
    version: int,
    records: bytes = ONE,
    *,
    client: bytes = b"peer",
    topic: bytes = b"t",
    acks: int = -1,
    count: int = 1,
    tag: bytes = b"\0",
    rest: bytes = b"",
) -> bytes:
    """A Produce request without its size."""
    head = struct.pack(">hhih", 0, version, 7, len(client)) + client
    sent = struct.pack(">hi", acks, 1000)
    if version < 9:
        rows = struct.pack(">ihi", count, len(topic), 0)[:6] + topic
        rows += struct.pack(">iii", 1, 0, len(records)) + records
        return head + b"\xff\xff" + sent + rows + rest
    length = len(records) + 1
    sized_records = bytes([length & 0x7F | 0x80, length >> 7]) + records
    named = topic.ljust(16, b"i") if version >= 13 else bytes([len(topic) + 1]) + topic
    rows = bytes([count + 1]) + named + b"\2" + struct.pack(">i", 0) + sized_records
    return head + tag + b"\0" + sent + rows + b"\0\0\0" + rest


PRODUCE_FRAMES = {
    **{f"version_{version}": produce_frame(version) for version in range(2, 15)},
    "no_client": produce_frame(9, client=b""),
    "long_topic": produce_frame(9, topic=b"x" * 120),
    "topic_too_long": produce_frame(8, topic=b"x" * 250),
    "acks_0": produce_frame(9, acks=0),
    "two_topics": produce_frame(9, count=2),
    "no_topic": produce_frame(8, count=0),
    "tagged": produce_frame(9, tag=b"\1\0\1x"),
    "byte_left": produce_frame(9, rest=b"\0"),
    "compressed": produce_frame(9, batch(record(0), 1, attributes=2)),
    "transactional": produce_frame(9, batch(record(0), 1, attributes=16)),
    "old_magic": produce_frame(9, batch(record(0), 1, magic=1)),
    "length_lies": produce_frame(9, batch(record(0), 1, length=1000)),
    "short": produce_frame(3)[:20],
    "empty": b"",
}


def fetch_frame(
    version: int,
    *,
    client: bytes = b"peer",
    topic: bytes = b"t",
    isolation: int = 1,
    session: tuple[int, int] = (0, -1),
    rack: bytes = b"r",
    count: int = 1,
    rest: bytes = b"",
) -> bytes:
    """A Fetch request without its size."""
    flexible = version >= 12
    data = struct.pack(">hhih", 1, version, 7, len(client)) + client + b"\0" * flexible
    data += b"\xff" * 4 * (version <= 14) + struct.pack(">iiib", 500, 1, 1 << 20, isolation)
    if version >= 7:
        data += struct.pack(">ii", *session)
    data += bytes([count + 1]) if flexible else struct.pack(">i", count)
    if version >= 13:
        data += topic.ljust(16, b"i")
    else:
        data += (bytes([len(topic) + 1]) if flexible else struct.pack(">h", len(topic))) + topic
    data += b"\2" if flexible else struct.pack(">i", 1)
    data += struct.pack(">i", 0) + b"\xff" * 4 * (version >= 9) + struct.pack(">q", 5)
    data += b"\xff" * (4 * flexible + 8 * (version >= 5)) + struct.pack(">i", 1 << 20)
    data += b"\0\0" * flexible
    if version >= 7:
        data += b"\1" if flexible else bytes(4)
    if version >= 11:
        data += (bytes([len(rack) + 1]) if flexible else struct.pack(">h", len(rack))) + rack
    return data + b"\0" * flexible + rest


FETCH_FRAMES = {
    **{f"version_{version}": fetch_frame(version) for version in range(3, 20)},
    "no_client": fetch_frame(12, client=b""),
    "long_topic": fetch_frame(12, topic=b"x" * 120),
    "topic_too_long": fetch_frame(11, topic=b"x" * 250),
    "uncommitted": fetch_frame(12, isolation=0),
    "isolation_2": fetch_frame(12, isolation=2),
    "new_session": fetch_frame(12, session=(0, 0)),
    "session": fetch_frame(12, session=(9, 1)),
    "two_topics": fetch_frame(12, count=2),
    "no_topic": fetch_frame(4, count=0),
    "byte_left": fetch_frame(12, rest=b"\0"),
    "short": fetch_frame(4)[:20],
    "empty": b"",
}


def main() -> None:
    for name, seeds in {
        "batch": BATCHES,
        "records": RECORDS,
        "cleaner": CLEANERS,
        "index": INDEXES,
        "segment": SEGMENTS,
        "varint": VARINTS,
        "header": HEADERS_ALONE,
        "resync": RESYNCS,
        "uniform_run": RUNS,
        "columns": COLUMNS,
        "lz4": LZ4,
        "transactions": TRANSACTIONS,
        "batch_check": BATCH_CHECKS,
        "produce_frame": PRODUCE_FRAMES,
        "fetch_frame": FETCH_FRAMES,
    }.items():
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        for seed, data in seeds.items():
            (folder / seed).write_bytes(data)
        print(f"{folder.relative_to(CORPUS.parent)}: {len(seeds)} seeds")


if __name__ == "__main__":
    main()
