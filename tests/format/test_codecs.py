"""logstore.codecs: Kafka's containers, byte for byte; hostile payloads; the bound on memory."""

from __future__ import annotations

import contextlib
import gzip
import io
import random
import struct
import sys
import threading
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

import logstore
from logstore.format import codecs, lz4_codec, snappy_codec, zstd_codec
from logstore.format.codec_ids import CODECS, CodecError, CodecLimitError
from logstore.format.codecs import CodecUnavailableError

lz4_frame = pytest.importorskip("lz4.frame")
zstandard = pytest.importorskip("zstandard")
cramjam = pytest.importorskip("cramjam")

GZIP, SNAPPY, LZ4, ZSTD = (CODECS[name] for name in ("gzip", "snappy", "lz4", "zstd"))
COMPRESSED = [GZIP, SNAPPY, LZ4, ZSTD]
PLENTY = 1 << 26


def words(size: int, seed: int = 1) -> bytes:
    """Text that compresses about as well as records do."""
    source = random.Random(seed)
    vocabulary = [source.randbytes(5).hex().encode() for _ in range(500)]
    return b" ".join(source.choices(vocabulary, k=size // 10 + 1))[:size]


PAYLOADS = {
    "empty": b"",
    "one byte": b"x",
    "short": b"hello, hello, hello",
    "words": words(5_000),
    "one xerial block": words(32 * 1024),
    "one byte more than a block": words(32 * 1024 + 1),
    "one lz4 block": words(64 * 1024),
    "many blocks": words(300_001),
    "noise": random.Random(2).randbytes(70_000),
    "zeros": bytes(200_000),
}


def name_of(codec: int) -> str:
    return {number: name for name, number in CODECS.items()}[codec]


# -------------------------------------------------------------------------------- names, arguments


def test_names_are_kafkas_and_uncompressed_means_none() -> None:
    assert dict(CODECS) == {
        "none": 0, "uncompressed": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4,
    }  # fmt: skip


def test_unknown_codecs_are_refused_both_ways() -> None:
    for codec in (-1, 5, 6, 7, 8):
        with pytest.raises(ValueError, match="unknown compression codec"):
            codecs.compress(codec, b"x")
        with pytest.raises(CodecError, match="unknown compression codec"):
            codecs.decompress(codec, b"x", 10)


@pytest.mark.parametrize(
    ("codec", "levels"),
    [
        (0, [0, 1]),
        (GZIP, [-2, 0, 10]),
        (SNAPPY, [1]),
        (LZ4, [-1, 0, 18]),
        (ZSTD, [-131073, 23]),
    ],
)
def test_levels_that_kafkas_configuration_refuses_are_refused(
    codec: int, levels: list[int]
) -> None:
    for level in levels:
        with pytest.raises(ValueError, match="level") as caught:
            codecs.compress(codec, b"x", level)
        assert not isinstance(caught.value, CodecError)  # a user's mistake, not damage


@pytest.mark.parametrize(
    ("codec", "levels"),
    [(GZIP, [-1, 1, 6, 9]), (LZ4, [1, 2, 3, 8, 9, 10, 17]), (ZSTD, [-131072, -5, 1, 3, 19, 22])],
)
def test_every_level_of_kafkas_configuration_round_trips(codec: int, levels: list[int]) -> None:
    payload = words(100_000)
    for level in levels:
        assert codecs.decompress(codec, codecs.compress(codec, payload, level), PLENTY) == payload


def test_a_missing_snappy_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cramjam", None)
    hint = r'pip install "logstore-engine\[snappy\]"'
    with pytest.raises(CodecUnavailableError, match=hint):
        codecs.compress(SNAPPY, b"x")
    with pytest.raises(CodecUnavailableError, match=hint):
        codecs.decompress(SNAPPY, b"\x01\x00x", 10)


def test_a_valid_log_is_not_called_damaged_or_old_where_its_codec_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with logstore.open(tmp_path) as store:
        log = store.create_topic("t", config={"compression.type": "snappy"})[0]
        log.append(b"x" * 500)
        monkeypatch.setitem(sys.modules, "cramjam", None)
        (problem,) = store.check()  # raises for an error
        assert problem.kind == logstore.ProblemKind.UNAVAILABLE_CODEC
        assert 'pip install "logstore-engine[snappy]"' in problem.detail
        assert "0.10" not in f"{problem.meaning} {problem.remedy}"
        for call in (lambda: log.append(b"y"), lambda: log[0], lambda: list(log)):
            with pytest.raises(logstore.CodecUnavailableError, match="cramjam"):
                call()
    repaired = logstore.repair(tmp_path, dry_run=True)
    assert not repaired.steps
    assert "cost" not in str(repaired)


# ------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
@pytest.mark.parametrize("codec", [0, *COMPRESSED], ids=name_of)
def test_round_trip_at_exactly_the_limit(codec: int, payload: bytes) -> None:
    compressed = codecs.compress(codec, payload)
    assert codecs.decompress(codec, compressed, len(payload)) == payload


@pytest.mark.parametrize("codec", [0, *COMPRESSED], ids=name_of)
def test_one_byte_over_the_limit_is_refused_with_the_numbers(codec: int) -> None:
    compressed = codecs.compress(codec, words(90_000))
    with pytest.raises(CodecLimitError) as caught:
        codecs.decompress(codec, compressed, 89_999)
    error = caught.value
    assert error.codec == codec
    assert error.limit == 89_999
    assert (error.declared or error.produced) == 90_000
    assert "89999" in str(error)
    assert "90000" in str(error)


@pytest.mark.parametrize("codec", [0, *COMPRESSED], ids=name_of)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_contiguous_buffer_is_accepted(codec: int, kind: Callable[[bytes], bytes]) -> None:
    payload = words(70_000)
    compressed = codecs.compress(codec, kind(payload))
    assert type(compressed) is bytes
    restored = codecs.decompress(codec, kind(compressed), PLENTY)
    assert type(restored) is bytes
    assert restored == payload
    window = memoryview(bytearray(b"before" + compressed + b"after"))[6:-5]
    assert codecs.decompress(codec, window, PLENTY) == payload


@pytest.mark.parametrize("codec", COMPRESSED, ids=name_of)
def test_an_empty_payload_is_damage(codec: int) -> None:
    with pytest.raises(CodecError, match="empty"):
        codecs.decompress(codec, b"", 10)


@pytest.mark.parametrize("codec", COMPRESSED, ids=name_of)
def test_threads_do_not_disturb_each_other(codec: int) -> None:
    failures: list[str] = []

    def work(seed: int) -> None:
        for step in range(30):
            payload = words(20_000 + 1_000 * step, seed)
            compressed = codecs.compress(codec, payload)
            if codecs.decompress(codec, compressed, PLENTY) != payload:
                failures.append(f"seed {seed} step {step}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("codec", COMPRESSED, ids=name_of)
def test_a_damaged_payload_leaves_nothing_behind_for_the_next(codec: int) -> None:
    payload = words(200_000)
    compressed = codecs.compress(codec, payload)
    damaged = bytearray(compressed)
    damaged[len(damaged) // 2 :] = bytes(len(damaged) - len(damaged) // 2)
    for _ in range(20):
        with pytest.raises(CodecError):
            codecs.decompress(codec, damaged, PLENTY)
        with pytest.raises(CodecLimitError):
            codecs.decompress(codec, compressed, 70_000)
        assert codecs.decompress(codec, compressed, PLENTY) == payload


# ----------------------------------------------------------------------------- exact framing bytes


def test_gzip_is_one_member_with_javas_header() -> None:
    payload = words(10_000)
    compressed = codecs.compress(GZIP, payload)
    assert compressed[:10].hex(" ") == "1f 8b 08 00 00 00 00 00 00 00"
    assert compressed[-8:] == struct.pack("<II", zlib.crc32(payload), len(payload))
    # Java's deflater at its default level is zlib's
    assert compressed[10:-8] == zlib.compress(payload, 6)[2:-4]


def test_snappy_is_xerial_with_32_kib_chunks() -> None:
    payload = words(32 * 1024 * 2 + 100)
    compressed = codecs.compress(SNAPPY, payload)
    assert compressed[:16].hex(" ") == "82 53 4e 41 50 50 59 00 00 00 00 01 00 00 00 01"
    position, sizes = 16, []
    while position < len(compressed):
        (length,) = struct.unpack_from(">i", compressed, position)
        position += 4
        sizes.append(len(cramjam.snappy.decompress_raw(compressed[position : position + length])))
        position += length
    assert sizes == [32 * 1024, 32 * 1024, 100]


def test_lz4_is_a_frame_of_independent_64_kib_blocks_without_checksums() -> None:
    payload = words(100_000)
    compressed = codecs.compress(LZ4, payload)
    assert compressed[:7].hex(" ") == "04 22 4d 18 60 40 82"
    position, sizes = 7, []
    while word := struct.unpack_from("<I", compressed, position)[0]:
        position += 4 + word
        sizes.append(word)
    assert len(sizes) == 2
    assert position + 4 == len(compressed)


def test_lz4_stores_a_block_that_does_not_shrink() -> None:
    noise = random.Random(3).randbytes(1_000)
    compressed = codecs.compress(LZ4, noise)
    assert compressed[7:] == struct.pack("<I", 0x80000000 | 1_000) + noise + bytes(4)


def test_lz4_level_9_is_the_fast_compressor_and_the_default() -> None:
    payload = words(100_000)
    default = codecs.compress(LZ4, payload)
    assert codecs.compress(LZ4, payload, 9) == default
    assert len(codecs.compress(LZ4, payload, 8)) < len(default)


def test_zstd_has_neither_content_size_nor_checksum_and_its_level_is_3() -> None:
    payload = words(100_000)
    compressed = codecs.compress(ZSTD, payload)
    parameters = zstandard.get_frame_parameters(compressed)
    assert compressed[:4].hex(" ") == "28 b5 2f fd"
    assert parameters.content_size == zstandard.CONTENTSIZE_UNKNOWN
    assert not parameters.has_checksum
    assert parameters.dict_id == 0
    assert parameters.window_size <= 8 << 20
    assert compressed == codecs.compress(ZSTD, payload, 3) != codecs.compress(ZSTD, payload, 1)


# --------------------------------------------------------------- what Kafka accepts, and what not


def test_gzip_members_may_be_many_and_have_names_and_times() -> None:
    named = io.BytesIO()
    with gzip.GzipFile("name", "wb", fileobj=named, mtime=12345) as out:
        out.write(b"second")
    stream = codecs.compress(GZIP, b"first,") + named.getvalue() + codecs.compress(GZIP, b"")
    assert codecs.decompress(GZIP, stream, 12) == b"first,second"
    with pytest.raises(CodecLimitError):
        codecs.decompress(GZIP, stream, 11)


def test_gzip_of_many_small_members_takes_linear_time() -> None:
    member = codecs.compress(GZIP, b"x")
    assert codecs.decompress(GZIP, member * 20_000, PLENTY) == b"x" * 20_000
    with pytest.raises(CodecError, match="cut short"):
        codecs.decompress(GZIP, (member * 20_000)[:-1], PLENTY)


@pytest.mark.parametrize("position", [-8, -4], ids=["crc", "size"])
def test_gzip_trailer_is_verified(position: int) -> None:
    damaged = bytearray(codecs.compress(GZIP, b"hello"))
    damaged[position] ^= 1
    with pytest.raises(CodecError):
        codecs.decompress(GZIP, damaged, 100)


def test_gzip_refuses_what_follows_a_member_and_is_none() -> None:
    with pytest.raises(CodecError):
        codecs.decompress(GZIP, codecs.compress(GZIP, b"hello") + b"rest", 100)


def test_snappy_without_the_magic_is_one_raw_block() -> None:
    for payload in (b"x", words(100_000)):
        raw = bytes(cramjam.snappy.compress_raw(payload))
        assert codecs.decompress(SNAPPY, raw, PLENTY) == payload


def test_snappy_streams_may_be_concatenated() -> None:
    first, second = words(40_000, 1), words(10, 2)
    stream = codecs.compress(SNAPPY, first) + codecs.compress(SNAPPY, second)
    assert codecs.decompress(SNAPPY, stream, PLENTY) == first + second


def test_snappy_header_alone_is_nothing() -> None:
    assert codecs.compress(SNAPPY, b"") == snappy_codec._XERIAL_HEADER
    assert codecs.decompress(SNAPPY, snappy_codec._XERIAL_HEADER, 10) == b""


def test_snappy_versions_below_one_are_refused_and_others_not() -> None:
    stream = bytearray(codecs.compress(SNAPPY, b"hello"))
    stream[8:12] = struct.pack("<i", 1)  # some writers get the byte order wrong
    assert codecs.decompress(SNAPPY, stream, 10) == b"hello"
    stream[8:12] = bytes(4)
    with pytest.raises(CodecError, match="version 0"):
        codecs.decompress(SNAPPY, stream, 10)


@pytest.mark.parametrize("length", [-1, -(2**31), (512 << 20) + 1, 2**31 - 1])
def test_snappy_chunk_lengths_out_of_range_are_refused(length: int) -> None:
    stream = snappy_codec._XERIAL_HEADER + struct.pack(">i", length) + b"\x05hello"
    with pytest.raises(CodecError, match=str(length)):
        codecs.decompress(SNAPPY, stream, 100)


def lz4_frame_of(payload: bytes, **options: object) -> bytes:
    compressed: bytes = lz4_frame.compress(
        payload, **{"block_linked": False, "store_size": False, **options}
    )
    return compressed


@pytest.mark.parametrize("size", [4, 5, 6, 7])
@pytest.mark.parametrize("block_checksum", [False, True])
@pytest.mark.parametrize("content_checksum", [False, True])
@pytest.mark.parametrize("store_size", [False, True])
def test_lz4_frames_kafka_reads_are_read(
    size: int, block_checksum: bool, content_checksum: bool, store_size: bool
) -> None:
    payload = words(150_000)
    frame = lz4_frame_of(
        payload,
        block_size=size,
        block_checksum=block_checksum,
        content_checksum=content_checksum,
        store_size=store_size,
    )
    assert codecs.decompress(LZ4, frame, len(payload)) == payload
    with pytest.raises(CodecLimitError):
        codecs.decompress(LZ4, frame, len(payload) - 1)


def test_lz4_content_size_and_checksum_are_stepped_over_as_kafka_does() -> None:
    payload = words(1_000)
    frame = bytearray(lz4_frame_of(payload, content_checksum=True, store_size=True))
    frame[-1] ^= 0xFF
    frame[6:14] = struct.pack("<Q", 1 << 60)
    frame[14] = lz4_codec._lz4_header_checksum(bytes(frame[4:14]))
    assert codecs.decompress(LZ4, frame, 1_000) == payload


def test_lz4_nothing_after_the_end_mark_is_read() -> None:
    frame = codecs.compress(LZ4, b"hello")
    assert codecs.decompress(LZ4, frame + b"anything", 10) == b"hello"
    # Kafka takes an empty stored block for the end mark, the general format does not
    assert codecs.decompress(LZ4, frame[:-4] + struct.pack("<I", 0x80000000), 10) == b"hello"


def test_lz4_block_checksums_are_verified() -> None:
    frame = bytearray(lz4_frame_of(words(1_000), block_checksum=True))
    frame[-5] ^= 1
    with pytest.raises(CodecError):
        codecs.decompress(LZ4, frame, PLENTY)


def lz4_header(flags: int, descriptor: int, *, rest: bytes = b"", checksum: int = 0) -> bytes:
    described = bytes((flags, descriptor)) + rest
    good = lz4_codec._lz4_header_checksum(described)
    return b"\x04\x22\x4d\x18" + described + bytes((good ^ checksum,))


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (lz4_header(0x40, 0x40), "depend"),
        (lz4_header(0x61, 0x40, rest=bytes(4)), "flags 61"),  # dictionary id
        (lz4_header(0x62, 0x40), "flags 62"),
        (lz4_header(0x20, 0x40), "flags 20"),
        (lz4_header(0xA0, 0x40), "flags a0"),
        (lz4_header(0x60, 0x30), "descriptor 30"),
        (lz4_header(0x60, 0x41), "descriptor 41"),
        (lz4_header(0x60, 0xC0), "descriptor c0"),
        (lz4_header(0x60, 0x40, checksum=1), "header checksum"),
        (b"\x05" + lz4_header(0x60, 0x40)[1:], "magic"),
        (b"\x02\x21\x4c\x18" + lz4_header(0x60, 0x40)[4:], "magic"),  # lz4's legacy frame
        (b"\x50\x2a\x4d\x18" + bytes(4) + lz4_header(0x60, 0x40), "magic"),  # a skippable one
    ],
)
def test_lz4_frames_kafka_refuses_are_refused(header: bytes, reason: str) -> None:
    body = struct.pack("<I", 0x80000005) + b"hello" + bytes(4)
    assert codecs.decompress(LZ4, lz4_header(0x60, 0x40) + body, 10) == b"hello"
    with pytest.raises(CodecError, match=reason):
        codecs.decompress(LZ4, header + body, 10)


def test_lz4_blocks_above_the_frames_maximum_are_refused() -> None:
    body = struct.pack("<I", 0x80000000 | 65_537) + bytes(65_537) + bytes(4)
    with pytest.raises(CodecError, match="65537"):
        codecs.decompress(LZ4, lz4_header(0x60, 0x40) + body, PLENTY)
    assert codecs.decompress(LZ4, lz4_header(0x60, 0x50) + body, PLENTY) == bytes(65_537)


def test_lz4_linked_blocks_are_refused() -> None:
    with pytest.raises(CodecError, match="depend"):
        codecs.decompress(LZ4, lz4_frame_of(words(200_000), block_linked=True), PLENTY)


def test_zstd_frames_may_be_concatenated_and_skippable_ones_lie_between() -> None:
    skippable = struct.pack("<II", 0x184D2A5E, 3) + b"abc"
    sized = zstandard.ZstdCompressor(write_checksum=True).compress(words(5_000, 2))
    stream = skippable + codecs.compress(ZSTD, words(5_000, 1)) + skippable + sized
    assert codecs.decompress(ZSTD, stream, 10_000) == words(5_000, 1) + words(5_000, 2)
    with pytest.raises(CodecLimitError):
        codecs.decompress(ZSTD, stream, 9_999)


def test_zstd_checksum_is_verified_when_present() -> None:
    frame = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(words(5_000)))
    frame[-1] ^= 1
    with pytest.raises(CodecError):
        codecs.decompress(ZSTD, frame, PLENTY)


@pytest.mark.parametrize("rest", [b"x", b"\x00" * 16, b"\x28\xb5\x2f\xfd"])
def test_zstd_refuses_what_follows_a_frame_and_is_none(rest: bytes) -> None:
    with pytest.raises(CodecError):
        codecs.decompress(ZSTD, codecs.compress(ZSTD, b"hello") + rest, 100)


def zstd_stream(payload: bytes, level: int = 3) -> bytes:
    """As Kafka's client: a stream of unknown size, so the level alone decides the window."""
    stream = zstandard.ZstdCompressor(level=level, write_content_size=False).compressobj()
    compressed: bytes = stream.compress(payload) + stream.flush()
    return compressed


@pytest.mark.parametrize("level", [-5, 3, 19, 20, 22])
@pytest.mark.parametrize("size", [0, 1, 100_000, 600_000])
def test_zstd_of_kafkas_streaming_client_is_read_at_every_level(level: int, size: int) -> None:
    payload = words(size)
    stream = zstd_stream(payload, level)
    assert codecs.decompress(ZSTD, stream, size) == payload
    assert codecs.decompress(ZSTD, stream, PLENTY) == payload


def test_zstd_at_the_highest_level_is_read_without_its_window_of_memory() -> None:
    payload = random.Random(5).randbytes(9_000_000)  # more than the window of level 19 ...
    payload += payload[:500_000]  # ... and a match that reaches back all the way
    stream = zstd_stream(payload, 22)
    assert zstandard.get_frame_parameters(stream).window_size == 1 << 27
    assert codecs.decompress(ZSTD, stream, len(payload)) == payload
    with pytest.raises(CodecLimitError):
        codecs.decompress(ZSTD, stream, len(payload) - 1)
    frame = next(zstd_codec._zstd_frames(memoryview(stream)))
    narrow = zstd_codec._zstd_narrow(memoryview(stream), frame, len(payload))
    assert zstandard.get_frame_parameters(narrow).window_size == 1 << 24


def test_zstd_windows_above_what_zstd_itself_reads_by_default_are_refused() -> None:
    frame = bytearray(codecs.compress(ZSTD, words(1_000)))
    frame[5] = 17 << 3  # 2 ** 27
    assert codecs.decompress(ZSTD, frame, PLENTY) == words(1_000)
    frame[5] |= 1
    with pytest.raises(CodecError, match="window"):
        codecs.decompress(ZSTD, frame, PLENTY)


def test_zstd_dictionaries_are_refused() -> None:
    dictionary = zstandard.train_dictionary(
        4_096, [words(400, seed) for seed in range(400)], k=64, d=8
    )
    frame = zstandard.ZstdCompressor(dict_data=dictionary).compress(words(1_000))
    with pytest.raises(CodecError):
        codecs.decompress(ZSTD, frame, PLENTY)


# ------------------------------------------------------------------------------------- truncations


def streams() -> list[tuple[str, int, bytes, bytes]]:
    payload = words(1_500) + random.Random(7).randbytes(300)
    sized_zstd = zstandard.ZstdCompressor(write_checksum=True).compress(payload)
    full_lz4 = lz4_frame_of(payload, content_checksum=True, store_size=True, block_checksum=True)
    return [
        ("gzip", GZIP, codecs.compress(GZIP, payload), payload),
        ("snappy", SNAPPY, codecs.compress(SNAPPY, payload), payload),
        ("raw snappy", SNAPPY, bytes(cramjam.snappy.compress_raw(payload)), payload),
        ("lz4", LZ4, codecs.compress(LZ4, payload), payload),
        ("lz4 with checksums", LZ4, full_lz4, payload),
        ("zstd", ZSTD, codecs.compress(ZSTD, payload), payload),
        ("zstd stream", ZSTD, zstd_stream(payload), payload),
        ("zstd with checksum", ZSTD, sized_zstd, payload),
    ]


WITH_EVERY_STREAM = pytest.mark.parametrize(
    ("codec", "stream", "payload"),
    [stream[1:] for stream in streams()],
    ids=[stream[0] for stream in streams()],
)


@WITH_EVERY_STREAM
def test_every_truncation_is_an_error_or_visibly_short(
    codec: int, stream: bytes, payload: bytes
) -> None:
    assert codecs.decompress(codec, stream, len(payload)) == payload
    for cut in range(len(stream)):
        try:
            restored = codecs.decompress(codec, stream[:cut], PLENTY)
        except CodecError:
            continue
        # only xerial's container has no end mark, and only between two of its chunks
        assert codec == SNAPPY
        assert len(restored) < len(payload)
        assert payload.startswith(restored)


@WITH_EVERY_STREAM
def test_every_changed_byte_is_an_error_or_bounded(
    codec: int, stream: bytes, payload: bytes
) -> None:
    """The batch's CRC finds these; a codec need only stay within bounds and raise its own error."""
    limit = 2 * len(payload)
    for position in range(len(stream)):
        damaged = bytearray(stream)
        for change in (0x01, 0x80, 0xFF):
            damaged[position] = stream[position] ^ change
            with contextlib.suppress(CodecError):
                assert len(codecs.decompress(codec, damaged, limit)) <= limit


@pytest.mark.parametrize("codec", COMPRESSED, ids=name_of)
def test_random_bytes_never_escape_the_error_class(codec: int) -> None:
    source = random.Random(codec)
    prefixes = [b"", codecs.compress(codec, b"hello")[:7], codecs.compress(codec, b"")[:16]]
    for _ in range(3_000):
        payload = source.choice(prefixes) + source.randbytes(source.randrange(60))
        with contextlib.suppress(CodecError):
            assert len(codecs.decompress(codec, payload, 10_000)) <= 10_000


# ------------------------------------------------------------------------------------------- bombs


BOMB_BYTES = 64 << 20
BOMB_LIMIT = 1 << 20


def gzip_bomb() -> bytes:
    return codecs.compress(GZIP, bytes(BOMB_BYTES))


def lz4_bomb() -> bytes:
    return lz4_frame_of(bytes(BOMB_BYTES), block_size=7)


def snappy_bomb() -> bytes:
    return codecs.compress(SNAPPY, bytes(BOMB_BYTES))


def raw_snappy_bomb() -> bytes:
    return bytes(cramjam.snappy.compress_raw(bytes(BOMB_BYTES)))


def zstd_bomb() -> bytes:
    return zstd_stream(bytes(BOMB_BYTES))


def wide_zstd_bomb() -> bytes:
    return zstd_stream(bytes(BOMB_BYTES), 22)


def sized_zstd_bomb() -> bytes:
    bomb: bytes = zstandard.ZstdCompressor().compress(bytes(BOMB_BYTES))
    return bomb


def many_frames_bomb() -> bytes:
    return zstd_stream(bytes(100_000)) * 1_000


def many_members_bomb() -> bytes:
    return codecs.compress(GZIP, bytes(100_000)) * 1_000


@pytest.mark.parametrize(
    ("codec", "bomb", "ratio"),
    [
        (GZIP, gzip_bomb, 1_000),
        (GZIP, many_members_bomb, 500),
        (SNAPPY, snappy_bomb, 20),  # all that snappy can do
        (SNAPPY, raw_snappy_bomb, 20),
        (LZ4, lz4_bomb, 250),  # all that lz4 can do
        (ZSTD, zstd_bomb, 1_000),
        (ZSTD, wide_zstd_bomb, 1_000),
        (ZSTD, sized_zstd_bomb, 1_000),
        (ZSTD, many_frames_bomb, 1_000),
    ],
)
def test_bombs_stop_at_the_bound_with_bounded_memory(
    codec: int, bomb: Callable[[], bytes], ratio: int
) -> None:
    payload = bomb()
    assert BOMB_BYTES / len(payload) > ratio
    with pytest.raises(CodecLimitError):  # imports, and the library's own tables
        codecs.decompress(codec, payload, 10)
    tracemalloc.start()
    try:
        with pytest.raises(CodecLimitError) as caught:
            codecs.decompress(codec, payload, BOMB_LIMIT)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.limit == BOMB_LIMIT
    assert caught.value.produced <= BOMB_LIMIT + 128 * 1024
    # what came out, a copy to join it, and the list of a thousand frames
    assert peak < 3 * BOMB_LIMIT + (512 << 10)


def lying_snappy_block(size: int) -> bytes:
    varint = bytearray()
    while size >= 0x80:
        varint.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes(varint) + bytes([size]) + b"\x10hello"


def lying_zstd(size: int) -> bytes:
    """A frame that declares ``size`` bytes of content and holds five."""
    body = struct.pack("<I", 5 << 3 | 1)[:3] + b"hello"
    return bytes.fromhex("28b52ffd e0") + struct.pack("<Q", size) + body


@pytest.mark.parametrize(
    ("codec", "payload"),
    [
        (SNAPPY, lying_snappy_block(40 << 20)),
        (SNAPPY, lying_snappy_block(2**32 - 1)),
        (SNAPPY, lying_snappy_block(2**33)),
        (SNAPPY, snappy_codec._XERIAL_HEADER + b"\x00\x00\x00\x0a" + lying_snappy_block(40 << 20)),
        (SNAPPY, snappy_codec._XERIAL_HEADER + struct.pack(">i", 40 << 20) + b"hello"),
        (ZSTD, lying_zstd(40 << 20)),
        (ZSTD, lying_zstd(2**63)),
        (LZ4, lz4_header(0x60, 0x70) + struct.pack("<I", 4 << 20) + b"hello"),
        (LZ4, lz4_header(0x68, 0x70, rest=struct.pack("<Q", 1 << 40)) + b"\x05\0\0\0hello\0\0\0\0"),
    ],
)
def test_lying_sizes_are_refused_before_anything_is_allocated(codec: int, payload: bytes) -> None:
    with pytest.raises(CodecError):
        codecs.decompress(codec, payload, 10)
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            codecs.decompress(codec, payload, PLENTY)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4.5 * (1 << 20)  # one lz4 block of the largest size


def test_a_declared_size_above_the_limit_is_named_in_the_error() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(5_000))
    with pytest.raises(CodecLimitError, match="declares 5000 bytes, more than the limit of 4999"):
        codecs.decompress(ZSTD, frame, 4_999)


# ------------------------------------------------------------------------------------------- peers


def kafka_python(name: str) -> Callable[[bytes], bytes]:
    module = pytest.importorskip("kafka.codec")
    codec = name.split("_")[0]
    if not getattr(module, f"has_{codec}")():
        pytest.skip(f"kafka-python has no {codec} here")
    function: Callable[[bytes], bytes] = getattr(module, name)
    return function


def aiokafka(name: str) -> Callable[[bytes], bytes]:
    module = pytest.importorskip("aiokafka.codec")
    codec = name.split("_")[0]
    if not getattr(module, f"has_{codec}")():
        pytest.skip(f"aiokafka has no {codec} here")
    function: Callable[[bytes], bytes] = getattr(module, name)
    return function


@pytest.mark.parametrize("peer", [kafka_python, aiokafka])
@pytest.mark.parametrize("codec", COMPRESSED, ids=name_of)
@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
def test_peers_read_what_we_write(
    peer: Callable[[str], Callable[[bytes], bytes]], codec: int, payload: bytes
) -> None:
    if codec == SNAPPY and not payload:
        pytest.skip("the peers take a header without chunks for a raw block")
    decode = peer(f"{name_of(codec)}_decode")
    assert bytes(decode(codecs.compress(codec, payload))) == payload


@pytest.mark.parametrize("peer", [kafka_python, aiokafka])
@pytest.mark.parametrize("codec", COMPRESSED, ids=name_of)
@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
def test_we_read_what_peers_write(
    peer: Callable[[str], Callable[[bytes], bytes]], codec: int, payload: bytes
) -> None:
    encode = peer(f"{name_of(codec)}_encode")
    assert codecs.decompress(codec, bytes(encode(payload)), PLENTY) == payload
