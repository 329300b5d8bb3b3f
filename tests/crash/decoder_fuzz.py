"""Fuzz every Python decoder of bytes from disk with bytes that were changed.

A decoder may return, or raise what it documents.  Anything else (another exception, memory
without bound) is a finding.  Half of the inputs get a right checksum again, as an
attacker would give them: a value with a right checksum is checked, too.

`make test` runs a fixed number of each; `make fuzz` runs more:
``python -m tests.crash.decoder_fuzz``.
The decoders in C have fuzzers of their own, in native/tests.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import logging
import os
import random
import re
import struct
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from logstore import BatchEncoder, InvalidRecordError, NotALogError, UnsupportedFormatError
from logstore._native import crc32c
from logstore.config import ConfigError
from logstore.coordinators.group_protocol import Assignment, Subscription
from logstore.coordinators.offset_records import (
    CommittedOffset,
    GroupKey,
    GroupMetadata,
    MemberMetadata,
    OffsetKey,
    TopicPartition,
    parse_key,
)
from logstore.coordinators.transaction_state import (
    TransactionMetadata,
    TransactionState,
    decode_key,
    encode_key,
)
from logstore.files.directory import Directory
from logstore.files.small_file import either_copy, twice, with_checksum, without_checksum
from logstore.format import codecs
from logstore.format.batch import BatchHeader, EndMarker
from logstore.format.index import AbortedTransaction, OffsetIndex, TimeIndex, TransactionIndex
from logstore.log.epochs import LEADER_EPOCHS, parse_leader_epochs, read_leader_epochs
from logstore.log.producer_state import (
    BatchSpan,
    CorruptSnapshotError,
    ProducerEntry,
    ProducerState,
)
from logstore.log.segment_digest import SegmentDigest
from logstore.log.segment_summary import SegmentSummary
from logstore.log.state import CleanerCheckpoint, DurableMark, PartitionState, StartMark
from logstore.log.topic_id import PARTITION_METADATA, read_topic_id, topic_id_text
from logstore.recovery.failed_sync import FailedSync
from logstore.recovery.swap_plan import SWAP_PLAN, RewrittenSegment, SwapPlan
from logstore.recovery.truncation_plan import TRUNCATION_PLAN, TruncationPlan
from logstore.root.catalogue import Catalogue
from logstore.root.checkpoint_twin import CheckpointTwin
from logstore.root.checkpoints import RECOVERY_POINTS, offsets_text, parse_offsets, read_offsets
from logstore.root.clean_shutdown import CleanShutdown
from logstore.root.identity import NodeIdentity
from logstore.root.producer_ids import ProducerIds
from tests.kit import with_crc

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
DECOMPRESSED_MAX = 1 << 20

Bytes = Callable[[bytes], bytes]


@dataclasses.dataclass(frozen=True)
class Target:
    """One decoder: what it reads, what it may raise, and how an input is made to look genuine."""

    seeds: tuple[bytes, ...]
    decode: Callable[[bytes], object]
    errors: tuple[type[BaseException], ...] = ()
    seal: Bytes | None = None  # put a right checksum before a body
    unseal: Bytes = bytes  # the body of a seed


# ---- the targets ----


def _reopened(name: str, read: Callable[[Directory], object]) -> Callable[[bytes], object]:
    """Read a file of this name that holds the input."""

    def decode(data: bytes) -> object:
        assert _directory is not None
        (_directory.path / name).write_bytes(data)
        return read(_directory)

    return decode


_directory: Directory | None = None


def _file_of(write: Callable[[Directory], object]) -> bytes:
    """What a class writes, as the one file that it leaves."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as root:
        directory = Directory(Path(root) / "seed-0", create=True)
        try:
            write(directory)
            (path,) = directory.path.iterdir()
            return path.read_bytes()
        finally:
            directory.close()


def _after_checksum(content: bytes) -> bytes:
    return without_checksum(content)


def _copy_of(content: bytes) -> bytes:
    body = either_copy(content)
    assert body is not None
    return body


def _sealed_snapshot(body: bytes) -> bytes:
    return struct.pack(">hI", 1, crc32c(body)) + body


def _sealed_mark(body: bytes) -> bytes:
    return body[:8].ljust(8, b"\0") + struct.pack(">I", crc32c(body[:8].ljust(8, b"\0")))


def _sealed_batch(body: bytes) -> bytes:
    """A batch with its length and checksum set right."""
    body = body.ljust(61, b"\0")
    head = body[:8] + struct.pack(">i", len(body) - 12) + body[12:17]
    return with_crc(head + body[17:])


def _indexes(data: bytes) -> object:
    offsets, times = OffsetIndex(5, data), TimeIndex(5, data)
    return list(offsets), list(times), offsets.lookup(7), times.lookup(7)


def _aborts(data: bytes) -> object:
    index = TransactionIndex(5, data)
    return index.fault(), list(index), len(index)


def _batch(control: bool = False) -> bytes:
    if control:
        return EndMarker(True, 3).encode(
            base_offset=9, producer_id=4, producer_epoch=1, timestamp=5, leader_epoch=0
        )
    encoder = BatchEncoder()
    encoder.append(b"value", key=b"key", headers=[("h", b"v")], timestamp=7)
    encoder.append(None, key=b"gone", timestamp=8)
    return encoder.take()


def _codec(number: int) -> Target:
    seeds = (b"", b"a", b"logstore " * 300, random.Random(number).randbytes(3000))
    return Target(
        tuple(codecs.compress(number, seed) for seed in seeds),
        lambda data: _bounded(codecs.decompress(number, data, DECOMPRESSED_MAX)),
        (codecs.CodecError,),
    )


def _bounded(payload: bytes) -> int:
    assert len(payload) <= DECOMPRESSED_MAX, f"{len(payload)} bytes"
    return len(payload)


def _catalogue(data: bytes) -> object:
    assert _directory is not None
    (_directory.path / Catalogue.NAME).write_bytes(data)
    found = Catalogue.read(_directory)
    return [entry.numbers for entry in found.entries.values() if entry.partitions < 1000]


def _swap(directory: Directory) -> object:
    plan = SwapPlan.read(directory)
    return plan and (plan.new.names(), plan.is_sound(directory))


def _producer_ids(directory: Directory) -> object:
    return ProducerIds(directory, lambda: 5).take()


TOPIC_ID = uuid.UUID(int=0x1234567890ABCDEF1234567890ABCDEF)

CATALOGUE = {
    "version": 1,
    "topics": {
        "orders": {
            "id": "EjRWeJCrze8SNFZ4kKvN7w",
            "partitions": 3,
            "config": {"retention.ms": 1000, "cleanup.policy": "compact"},
            "creating_from": 1,
            "made": [0, 2],
        },
        "clicks": {"id": "EjRWeJCrze8SNFZ4kKvN7x", "partitions": 1, "deleting": True},
    },
    "deleted": ["old"],
}

ENTRY = ProducerEntry(7, 2, 1, 1000, 40, (BatchSpan(9, 44, 4, 1000),))
MEMBER = MemberMetadata("m-1", "i", "c", "/host", 300, 100, b"sub", b"assign")


Access = Callable[[Directory], object]
TWIN = CheckpointTwin({RECOVERY_POINTS: (7, 8)}, {RECOVERY_POINTS: {("a", 0): 12, ("b-1", 3): 4}})
# The files with a checksum: by name, the function that writes one, and the one that reads it.
BEHIND_A_CHECKSUM: dict[str, tuple[Access, Access]] = {
    "logstore.state": (lambda d: PartitionState.of_new().write(d), PartitionState.read),
    "logstore.start": (lambda d: StartMark.write(d, 1234), StartMark.read),
    "logstore.cleaner": (lambda d: CleanerCheckpoint.write(d, 1234), CleanerCheckpoint.read),
    "logstore.failed": (lambda d: FailedSync(1234, "EIO 5").leave(d), FailedSync.read),
    "00000000000000000000.sum": (
        lambda d: SegmentDigest((100, 7), {".index": (16, 8)}).write(d, 0),
        lambda d: SegmentDigest.known(d, 0),
    ),
    "00000000000000000000.summary": (
        lambda d: SegmentSummary(100, 1_700_000_000_000, (34, 9)).write(d, 0),
        lambda d: SegmentSummary.read(d, 0, 100),
    ),
    CheckpointTwin.NAME: (TWIN.write, CheckpointTwin.read),
}


def targets() -> dict[str, Target]:
    """All of them; a function, as making the seeds takes the decoders' own writers."""
    found = {
        name: Target(
            (_file_of(write),), _reopened(name, read), seal=with_checksum, unseal=_after_checksum
        )
        for name, (write, read) in BEHIND_A_CHECKSUM.items()
    }
    # These two as they are used.
    for name, use in (
        (
            "00000000000000000000.summary",
            lambda d: SegmentSummary.read_min(d, 0, 100),
        ),
        (
            CheckpointTwin.NAME,
            lambda d: CheckpointTwin.reconcile(CheckpointTwin.read(d), d, RECOVERY_POINTS),
        ),
    ):
        found[name] = dataclasses.replace(found[name], decode=_reopened(name, use))
    cut = TruncationPlan(0, 61, b"batch", (100, 200), 90)
    swap = SwapPlan(RewrittenSegment(0, (".log", ".index"), 100, 7), (0, 50))
    found |= {
        TRUNCATION_PLAN: Target(
            (_file_of(cut.write),), _reopened(TRUNCATION_PLAN, TruncationPlan.read),
            seal=twice, unseal=_copy_of,
        ),
        SWAP_PLAN: Target(
            (_file_of(swap.write),), _reopened(SWAP_PLAN, _swap), seal=twice, unseal=_copy_of
        ),
        DurableMark.NAME: Target(
            (_sealed_mark(struct.pack(">q", 77)),),
            _reopened(DurableMark.NAME, DurableMark.read),
            seal=_sealed_mark,
            unseal=lambda content: content[:8],
        ),
        Catalogue.NAME: Target((json.dumps(CATALOGUE).encode(),), _catalogue, (ConfigError,)),
        NodeIdentity.NAME: Target(
            (_file_of(NodeIdentity.new().write), b"broker.id=3\nversion=0\n"),
            _reopened(NodeIdentity.NAME, NodeIdentity.read),
            (NotALogError,),
        ),
        CleanShutdown.MARKER: Target(
            (CleanShutdown.OURS, b'{"version":0,"brokerEpoch":7}'),
            _reopened(CleanShutdown.MARKER, CleanShutdown.read),
        ),
        CleanShutdown.TWIN: Target(
            (b"%08x\n" % crc32c(CleanShutdown.OURS),),
            _reopened(CleanShutdown.TWIN, CleanShutdown.read),
        ),
        ProducerIds.NAME: Target(
            (b'{"next": 1000}\n',), _reopened(ProducerIds.NAME, _producer_ids), (ConfigError,)
        ),
        PARTITION_METADATA: Target(
            (topic_id_text(TOPIC_ID),),
            _reopened(PARTITION_METADATA, read_topic_id),
            (NotALogError,),
        ),
        LEADER_EPOCHS: Target(
            (b"0\n2\n0 0\n3 17\n", b"0\n0\n"),
            lambda data: (
                parse_leader_epochs(data),
                _reopened(LEADER_EPOCHS, read_leader_epochs)(data),
            ),
        ),
        RECOVERY_POINTS: Target(
            (offsets_text({("orders", 0): 5, ("a.b-c", 12): 1 << 40}), b"0\n0\n"),
            lambda data: (
                parse_offsets(data),
                _reopened(RECOVERY_POINTS, lambda d: read_offsets(d, RECOVERY_POINTS))(data),
            ),
        ),
        "snapshot": Target(
            (ProducerState([ENTRY]).encode(), ProducerState([]).encode()),
            lambda data: list(ProducerState.decode(data)),
            (CorruptSnapshotError,),
            seal=_sealed_snapshot,
            unseal=lambda content: content[6:],
        ),
        "index, timeindex": Target((struct.pack(">iiii", 0, 0, 9, 4096), b"\0" * 24), _indexes),
        "txnindex": Target(
            (struct.pack(">hqqqq", 0, *AbortedTransaction(7, 6, 20, 6)),), _aborts
        ),
        "batch header": Target(
            (_batch(),),
            lambda data: BatchHeader.parse(data).pack(),
            (InvalidRecordError, UnsupportedFormatError),
            seal=_sealed_batch,
        ),
        "marker": Target(
            (_batch(control=True), _batch()),
            EndMarker.parse,
            (InvalidRecordError, UnsupportedFormatError),
            seal=_sealed_batch,
        ),
        "key of an offset": Target(
            (OffsetKey("g", "orders", 3).encode(), GroupKey("g").encode()),
            parse_key,
            (InvalidRecordError,),
        ),
        "committed offset": Target(
            (CommittedOffset(5, "m").encode(), CommittedOffset(5, "m", expires=9).encode()),
            CommittedOffset.decode,
            (InvalidRecordError,),
        ),
        "group": Target(
            (GroupMetadata("consumer", 3, "range", "m-1", 7, (MEMBER,)).encode(),),
            GroupMetadata.decode,
            (InvalidRecordError,),
        ),
        "subscription": Target(
            (Subscription(("a", "b"), b"u", (TopicPartition("a", 1),), 4, "r").encode(),),
            Subscription.decode,
            (InvalidRecordError,),
        ),
        "assignment": Target(
            (Assignment((TopicPartition("a", 1), TopicPartition("b", 0)), b"u").encode(),),
            Assignment.decode,
            (InvalidRecordError,),
        ),
        "key of a transaction": Target((encode_key("t"),), decode_key, (InvalidRecordError,)),
        "transaction": Target(
            (
                TransactionMetadata(
                    "t", 7, 2, 60_000, TransactionState.ONGOING, frozenset({("a", 0), ("b", 3)}),
                    5, 4, 6, 8,
                ).encode(),
            ),
            lambda data: TransactionMetadata.decode("t", data),
            (InvalidRecordError,),
        ),
        "gzip": _codec(codecs.GZIP),
        "snappy": _codec(codecs.SNAPPY),
        "lz4": _codec(codecs.LZ4),
        "zstd": _codec(codecs.ZSTD),
    }  # fmt: skip
    bomb = gzip.compress(bytes(50 << 20), 9)
    found["gzip"] = dataclasses.replace(found["gzip"], seeds=(*found["gzip"].seeds, bomb))
    return found


# ---- changed inputs ----

NUMBER = re.compile(rb"-?\d+")
NUMBERS = (
    b"-1", b"0", b"1", b"2147483648", b"9223372036854775807", b"9223372036854775808",
    b"-9223372036854775809", b"1e999", b"-1e999", b"NaN", b"Infinity", b"1.5", b"true", b"null",
    b"[]", b"{}", b'"x"', b"[[]]", b'[{"a": []}]', b"9" * 5000, b"[" * 50_000,
)  # fmt: skip
WORD = re.compile(rb'"[^"]*"')
WORDS = (
    b'""',
    b"null",
    b"7",
    b"[]",
    b"{}",
    b'"../x"',
    b'"\\u0000"',
    b'".log"',
    b'"' + b"y" * 300 + b'"',
)
EDGES = (b"\0", b"\xff", b"\x7f", b"\x80", b"\x01", b"\n", b" ", b"-")


def changed(data: bytes, others: tuple[bytes, ...], rng: random.Random) -> bytes:
    """One to four changes, of bytes or of what looks like a number or a word."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = _change(data, others, rng)
    return data


def _change(data: bytes, others: tuple[bytes, ...], rng: random.Random) -> bytes:
    kind = rng.randrange(10)
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((1, 1, 2, 4, 8, 40)))
    if kind < 2:
        for found, instead in ((NUMBER, NUMBERS), (WORD, WORDS))[kind::-1]:
            places = list(found.finditer(data))
            if places:
                place = rng.choice(places)
                return data[: place.start()] + rng.choice(instead) + data[place.end() :]
    if kind == 2:
        return data[:at]
    if kind == 3:
        return data[:at] + data[end:]
    if kind == 4:
        return data[:end] + data[at:end] * rng.randrange(1, 4) + data[end:]
    if kind == 5:
        return data[:at] + rng.randbytes(end - at) + data[end:]
    if kind == 6:
        return data[:at] + rng.choice(EDGES) * (end - at) + data[end:]
    if kind == 7:
        other = rng.choice(others)
        return data[:at] + other[rng.randrange(len(other) + 1) :]
    if kind == 8:
        return data[:at] + rng.choice(EDGES) + data[at:]
    if data:
        at = rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    return rng.randbytes(4)


@dataclasses.dataclass
class Finding:
    target: str
    data: bytes
    error: BaseException

    def __str__(self) -> str:
        kind = type(self.error).__name__
        return f"{self.target}: {kind}: {self.error} for {self.data[:200]!r}"


def inputs(target: Target, seed: int) -> Iterator[bytes]:
    """The seeds, then changed ones without end; the same for the same seed."""
    rng = random.Random(seed)
    yield from target.seeds
    bodies = tuple(target.unseal(each) for each in target.seeds) if target.seal else ()
    while True:
        if target.seal is not None and rng.random() < 0.5:
            yield target.seal(changed(rng.choice(bodies), bodies, rng))
        else:
            yield changed(rng.choice(target.seeds), target.seeds, rng)


def fuzz(
    name: str, target: Target, *, runs: int, seconds: float = 0.0, seed: int = 0
) -> tuple[int, list[Finding]]:
    """Feed one decoder so many inputs, and then on until the time is over; at most 3 findings."""
    global _directory
    findings: list[Finding] = []
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(dir=MEMORY) as root:
        _directory = Directory(Path(root) / "fuzz-0", create=True)
        try:
            for number, data in enumerate(inputs(target, seed)):
                look = number % 256 == 0 or not seconds
                if number >= runs and look and time.monotonic() >= until:
                    return number, findings
                try:
                    target.decode(data)
                except target.errors:
                    pass
                except Exception as error:  # noqa: BLE001  that is what is looked for
                    findings.append(Finding(name, data, error))
                    if len(findings) == 3:
                        return number + 1, findings
        finally:
            _directory.close()
            _directory = None
    raise AssertionError("inputs do not end")


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the decoders that are written in Python.")
    parser.add_argument("--seconds", type=float, default=10, help="for each")
    parser.add_argument("--seed", type=int, help="else by the clock")
    parser.add_argument("targets", nargs="*", help="else all")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    seed = options.seed if options.seed is not None else time.time_ns()
    total, failed = 0, False
    for name, target in targets().items():
        if options.targets and name not in options.targets:
            continue
        runs, findings = fuzz(name, target, runs=0, seconds=options.seconds, seed=seed)
        total += runs
        print(f"fuzz    {name:<34} {runs:10} executions", flush=True)
        for finding in findings:
            failed = True
            print(f"        {finding} (--seed {seed})", flush=True)
    print(f"fuzz    {'decoders in Python':<34} {total:10} executions")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
