"""The oracle for crashes: a ledger of the guarantees so far, and a judge of the recovered log.

A test notes in a `Ledger` what it is about to do and what was acknowledged.  The notes are marks in
the recording.  The notes up to the moment of a crash decide what recovery must find:

- every record that was acknowledged with enough durability for this kind of crash, at its offset;
- a prefix of the issued records: no other record, no duplicate, no gap;
- no record whose truncation, trim, purge or compaction was acknowledged;
- topics, partitions and settings as before the last change, or as after it.

`recover_store` and `recover_partition` open a directory and read it twice, through the engine and
with the reference codec.  Both must agree.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import logstore
from logstore import Partition
from logstore.store import recovery_pool
from logstore.store.store import abandon_store
from logstore.testing.crash_states import Crash
from logstore.testing.invariants import check_invariants
from logstore.testing.io_calls import Trace
from logstore.testing.reference import ReferenceBatch, decode_batch

__all__ = [
    "Found",
    "FoundPartition",
    "Ledger",
    "Note",
    "judge",
    "recover_partition",
    "recover_store",
]

_LEFTOVERS: Final = (".tmp", ".cleaned", ".swap", "swap.plan", "truncate.plan")
_AGAIN_EVERY: Final = 16  # one of this many states is appended to and recovered again

Entry = tuple[int, bytes | None, bytes | None, str]  # timestamp, key, value, kind


# ---- guarantees ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Note:
    """One line of the ledger."""

    act: str
    where: str
    what: Any = None


@dataclass(slots=True)
class _Promise:
    """The contents that a partition may have."""

    entries: dict[int, Entry] = field(default_factory=dict)  # issued records, by offset
    end: int = 0  # of the issued records
    kept_after_kill: int = 0  # records below it are acknowledged
    kept_after_cut: int = 0
    start_low: int = 0
    start_high: int = 0
    optional: frozenset[int] = frozenset()  # compaction may have removed them
    gone: frozenset[int] = frozenset()  # compaction or a purge has removed them


class Ledger:
    """The calls of a test and their acknowledgements, in order.

    `where` is the name of a partition's directory (``orders-0``), or of a topic.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def _note(self, act: str, where: str, what: Any = None) -> None:
        self._trace.mark(Note(act, where, what))

    def issue(self, where: str, entries: Mapping[int, Entry]) -> None:
        """Note that these records are about to be appended: from now on they may be in the log."""
        self._note("issue", where, dict(entries))

    def acknowledge(self, where: str, end_offset: int, *, durable: bool) -> None:
        """Note that all records below are acknowledged.  `durable`: they survive a power cut."""
        self._note("ack", where, (end_offset, durable))

    def cut(self, where: str, end_offset: int) -> None:
        """Note that the log is about to be truncated."""
        self._note("cut", where, end_offset)

    def was_cut(self, where: str, end_offset: int) -> None:
        """Note that it is truncated: no record from there on may reappear."""
        self._note("was cut", where, end_offset)

    def raise_start(self, where: str, start_offset: int) -> None:
        """Note that records below are about to be deleted."""
        self._note("start", where, start_offset)

    def start_is(self, where: str, start_offset: int) -> None:
        """Note that records below are deleted."""
        self._note("started", where, start_offset)

    def remove(self, where: str, offsets: Iterable[int]) -> None:
        """Note that compaction or a purge is about to remove these offsets."""
        self._note("remove", where, frozenset(offsets))

    def removed(self, where: str, offsets: Iterable[int]) -> None:
        """Note that these offsets are removed."""
        self._note("removed", where, frozenset(offsets))

    def topic(self, name: str, *allowed: Any) -> None:
        """Note that the topic is one of `allowed`: None, or (partitions, settings)."""
        self._note("topic", name, allowed)


_promises: dict[int, tuple[tuple[Any, ...], _Promises]] = {}


@dataclass(slots=True)
class _Promises:
    partitions: dict[str, _Promise] = field(default_factory=dict)
    topics: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, marks: Sequence[Any]) -> _Promises:
        self = cls()
        for mark in marks:
            if isinstance(mark, Note):
                self.take(mark)
        return self

    def take(self, note: Note) -> None:
        if note.act == "topic":
            self.topics[note.where] = note.what
            if None in note.what:
                for where in [w for w in self.partitions if w.rpartition("-")[0] == note.where]:
                    del self.partitions[where]
            return
        promise = self.partitions.setdefault(note.where, _Promise())
        what = note.what
        if note.act == "issue":
            promise.entries.update(what)
            promise.end = max(what) + 1
        elif note.act == "ack":
            end, durable = what
            promise.kept_after_kill = max(promise.kept_after_kill, end)
            if durable:
                promise.kept_after_cut = max(promise.kept_after_cut, end)
        elif note.act == "cut":
            promise.kept_after_kill = min(promise.kept_after_kill, what)
            promise.kept_after_cut = min(promise.kept_after_cut, what)
        elif note.act == "was cut":
            promise.entries = {o: e for o, e in promise.entries.items() if o < what}
            promise.end = min(promise.end, what)
            # A cut is acknowledged only when it is durable.  The rest is as durable as before.
        elif note.act == "start":
            promise.start_high = max(promise.start_high, what)
        elif note.act == "started":
            promise.start_low = promise.start_high = max(promise.start_high, what)
        elif note.act == "remove":
            promise.optional |= what
        elif note.act == "removed":
            promise.optional -= what
            promise.gone |= what
        else:
            raise AssertionError(note)


# ---- results ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FoundPartition:
    """A partition after recovery."""

    start: int
    end: int
    entries: tuple[tuple[int, Entry], ...]
    committed: tuple[int, ...]  # offsets that a read_committed reader sees
    epochs: tuple[tuple[int, int], ...]

    def __repr__(self) -> str:
        offsets = [offset for offset, _ in self.entries]
        return f"[{self.start}, {self.end}) with {offsets}, committed {list(self.committed)}"


@dataclass(frozen=True, slots=True)
class Found:
    """The store after recovery."""

    topics: tuple[tuple[str, int, tuple[tuple[str, Any], ...]], ...]
    partitions: tuple[tuple[str, FoundPartition], ...]


def _require(truth: bool, message: str) -> None:
    if not truth:
        raise AssertionError(message)


_decoded: dict[tuple[int, bytes], list[ReferenceBatch]] = {}
_single: dict[bytes, ReferenceBatch] = {}
_indexes_seen: set[tuple[bytes, bytes, bytes]] = set()


def _decode(base: int, content: bytes) -> list[ReferenceBatch]:
    """Decode a .log file with the reference codec: valid batches with increasing offsets."""
    known = _decoded.get((base, content))
    if known is not None:
        return known
    batches: list[ReferenceBatch] = []
    position, expected = 0, base
    while position < len(content):
        (length,) = struct.unpack_from(">i", content, position + 8)
        raw = content[position : position + 12 + length]
        batch = _single.get(raw)
        if batch is None:
            batch = _single[raw] = decode_batch(raw)
        batch = replace(batch, position=position)
        _require(batch.base_offset >= expected, f"offset {batch.base_offset} after {expected}")
        batches.append(batch)
        expected = batch.next_offset
        position += len(raw)
    if len(_decoded) > 5000:
        _decoded.clear()
    _decoded[base, content] = batches
    return batches


def _control(batch: ReferenceBatch) -> str:
    key = batch.records[0].key or b""
    return "commit" if key[2:4] == b"\0\1" else "abort"


def _committed(batches: Sequence[ReferenceBatch], start: int, end: int) -> list[int]:
    """Return the offsets that a read_committed reader sees, from all batches in order."""
    open_since: dict[int, int] = {}
    ended: list[tuple[int, int, int, str]] = []  # producer, first, marker's offset, kind
    for batch in batches:
        if batch.control:
            first = open_since.pop(batch.producer_id, None)
            if first is not None:
                ended.append((batch.producer_id, first, batch.base_offset, _control(batch)))
        elif batch.transactional:
            open_since.setdefault(batch.producer_id, batch.base_offset)
    stable = min(open_since.values(), default=end)
    seen = []
    for batch in batches:
        if batch.control:
            continue
        aborted = batch.transactional and any(
            producer == batch.producer_id and first <= batch.base_offset < marker
            for producer, first, marker, kind in ended
            if kind == "abort"
        )
        if not aborted:
            seen += [r.offset for r in batch.records if start <= r.offset < min(stable, end)]
    return seen


def _look_at(log: Partition, *, thorough: bool) -> FoundPartition:
    """Read a partition and check everything that does not depend on the ledger."""
    directory = os.fspath(log.path)
    _require(not log.recovery.damage, f"recovery reports damage: {log.recovery.damage}")
    start, end = log.start_offset, log.end_offset
    stable, high = log.last_stable_offset, log.high_watermark
    _require(
        0 <= start <= stable <= high <= end,
        f"start {start}, stable {stable}, high watermark {high}, end {end} are not in order",
    )
    names = set(os.listdir(directory))
    left = [name for name in names if name.endswith(_LEFTOVERS)]
    _require(not left, f"{left} are left over")
    batches: list[ReferenceBatch] = []
    logs = sorted(name for name in names if name.endswith(".log"))
    for number, name in enumerate(logs):
        content = Path(directory, name).read_bytes()
        base = int(name[:-4])
        found = _decode(base, content)
        _require(
            not batches or not found or found[0].base_offset >= batches[-1].next_offset,
            f"{name} begins inside the segment before it",
        )
        if number + 1 < len(logs):
            _check_index_files(directory, base, content, found)
        batches += found
    entries: list[tuple[int, Entry]] = []
    for batch in batches:
        for record in batch.records:
            if start <= record.offset < end:
                kind = _control(batch) if batch.control else "record"
                timestamp = -1 if batch.control else record.timestamp
                key, value = (None, None) if batch.control else (record.key, record.value)
                entries.append((record.offset, (timestamp, key, value, kind)))
    plain = [(offset, *entry[:3]) for offset, entry in entries if entry[3] == "record"]
    scanned = [(r.offset, r.timestamp, r.key, r.value) for r in log.scan()]
    _require(scanned == plain, f"a scan gives {scanned}, the files hold {plain}")
    committed = [r.offset for r in log.scan(isolation="read_committed")]
    expected = _committed(batches, start, end)
    _require(committed == expected, f"committed are {committed}, by the files {expected}")
    epochs = tuple(log.leader_epochs.entries)
    _require(
        all(a[0] < b[0] and a[1] <= b[1] for a, b in itertools.pairwise(epochs)),
        f"leader epochs do not rise: {epochs}",
    )
    if thorough and log.segments[0].end_offset > start:
        # Else a deletion is unfinished, and some records below the start may be deleted.
        check_invariants(log)
    return FoundPartition(start, end, tuple(entries), tuple(committed), epochs)


def _check_index_files(
    directory: str, base: int, content: bytes, batches: Sequence[ReferenceBatch]
) -> None:
    """Check the index files of a sealed segment against its log.  Each pair is checked once."""
    files = []
    for suffix in (".index", ".timeindex"):
        path = Path(directory, f"{base:020d}{suffix}")
        files.append(path.read_bytes() if path.exists() else b"")
    key = content, files[0], files[1]
    if key in _indexes_seen:
        return
    ends = {batch.last_offset: batch for batch in batches}
    at = {batch.position: batch for batch in batches}
    for offset, position in struct.iter_unpack(">ii", files[0]):
        batch = at.get(position)
        _require(
            batch is not None and base + offset in ends and batch.base_offset <= base + offset,
            f"the offset index of {base} has ({offset}, {position}), where no batch starts",
        )
    latest = -1
    for timestamp, offset in struct.iter_unpack(">qi", files[1]):
        batch = ends.get(base + offset)
        _require(
            batch is not None and batch.max_timestamp == timestamp and timestamp > latest,
            f"the time index of {base} has a wrong entry ({timestamp}, {offset})",
        )
        latest = timestamp
    newest = max((batch.max_timestamp for batch in batches), default=-1)
    _require(latest in (newest, -1), f"the time index of {base} ends at {latest}, not {newest}")
    if len(_indexes_seen) > 20_000:
        _indexes_seen.clear()
    _indexes_seen.add(key)


def _retry(log: Partition) -> None:
    """Check that a retry of each producer's last batch is detected and returns its offset."""
    for segment in reversed(log.segments):
        content = Path(segment.path).read_bytes()
        for batch in reversed(_decode(segment.base_offset, content)):
            if batch.control or batch.transactional or batch.producer_id < 0:
                continue
            if batch.base_offset < log.start_offset:
                return
            (length,) = struct.unpack_from(">i", content, batch.position + 8)
            answer = log.append_batch(content[batch.position : batch.position + 12 + length])
            _require(
                answer.duplicate and answer.offsets.start == batch.base_offset,
                f"the batch at {batch.base_offset} was taken again: {answer}",
            )
            return


def _once_more(log: Partition) -> None:
    _retry(log)
    log.append(b"once more", key=b"again", timestamp=2)


def _has_one_more(after: FoundPartition, before: FoundPartition) -> None:
    expected = (*before.entries, (before.end, (2, b"again", b"once more", "record")))
    _require(
        after.entries == expected,
        f"after one more append and a kill there is {after}, before there was {before}",
    )


def recover_partition(
    path: str, crash: Crash, *, name: str = "a-0", config: Any = None, more: bool = True
) -> Found:
    """Open a single partition, read it, and leave it as after a kill.

    With `more`, some states, chosen by their digests, are also checked with `check_invariants`, and
    some are appended to, killed and recovered again.
    """
    digest = crash.digest
    again = more and digest[1] % _AGAIN_EVERY == 0
    log = Partition.open(f"{path}/{name}", config=config)
    try:
        found = _look_at(log, thorough=more and digest[0] % 64 == 0)
        if again:
            _once_more(log)
    finally:
        log.parts.discard()
    if again:
        log = Partition.open(f"{path}/{name}", config=config)
        try:
            _has_one_more(_look_at(log, thorough=False), found)
        finally:
            log.parts.discard()
    return Found((), ((name, found),))


def recover_store(
    path: str, crash: Crash, *, name: str = "s", config: Any = None, more: bool = True
) -> Found:
    """Do the same as `recover_partition` for a store and all of its partitions."""
    digest = crash.digest
    again = more and digest[1] % _AGAIN_EVERY == 0
    thorough = more and digest[0] % 64 == 0
    found = _look_at_store(f"{path}/{name}", config, thorough=thorough, append=again)
    if again:
        after = dict(_look_at_store(f"{path}/{name}", config, thorough=False).partitions)
        for where, before in found.partitions:
            _has_one_more(after[where], before)
    return found


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Recover partitions in one thread: the order is fixed, and it is faster for small ones."""
    before = recovery_pool.RECOVERY_THREADS
    recovery_pool.RECOVERY_THREADS = 1
    try:
        yield
    finally:
        recovery_pool.RECOVERY_THREADS = before


def _look_at_store(path: str, config: Any, *, thorough: bool, append: bool = False) -> Found:
    with _one_thread():
        store = logstore.open(path, config=config)
    partitions: list[tuple[str, FoundPartition]] = []
    topics: list[tuple[str, int, tuple[tuple[str, Any], ...]]] = []
    try:
        for topic in store.values():
            settings = tuple(sorted(store.topic_changes.stored_settings(topic).items()))
            topics.append((topic.name, len(topic), settings))
            for number in range(len(topic)):
                log = topic[number]
                partitions.append((f"{topic.name}-{number}", _look_at(log, thorough=thorough)))
                if append:
                    _once_more(log)
        left = [name for name in os.listdir(path) if name.endswith((".tmp", "-delete"))]
        _require(not left, f"{left} are left over at the root")
    finally:
        abandon_store(store)
    return Found(tuple(topics), tuple(partitions))


# ---- judging --------------------------------------------------------------------------------


def judge(found: Found, crash: Crash) -> None:
    """Raise AssertionError unless the result is allowed by the ledger up to the crash."""
    promises = _promises_at(crash)
    partitions = dict(found.partitions)
    topics = {name: (count, dict(settings)) for name, count, settings in found.topics}
    for name, allowed in promises.topics.items():
        have = topics.get(name)
        _require(have in allowed, f"topic {name} is {have}, allowed is {allowed}")
    for where, promise in promises.partitions.items():
        have_partition = partitions.get(where)
        if have_partition is None:
            topic = where.rpartition("-")[0]
            may_lack = None in promises.topics.get(topic, ()) or not promise.kept_after_kill
            _require(may_lack, f"{where} is missing")
            continue
        _judge_partition(where, have_partition, promise, power=crash.model != "kill")


def _promises_at(crash: Crash) -> _Promises:
    """Return the guarantees at a crash; cached for the marks of a step."""
    known = _promises.get(0)
    if known is not None and known[0] is crash.marks:
        return known[1]
    made = _Promises.of(crash.marks)
    _promises[0] = crash.marks, made
    return made


def _judge_partition(where: str, found: FoundPartition, promise: _Promise, *, power: bool) -> None:
    kept = promise.kept_after_cut if power else promise.kept_after_kill
    _require(
        kept <= found.end <= max(promise.end, promise.start_high),
        f"{where} ends at {found.end}; acknowledged up to {kept}, issued up to {promise.end}",
    )
    _require(
        promise.start_low <= found.start <= promise.start_high,
        f"{where} starts at {found.start}, not within [{promise.start_low}, {promise.start_high}]",
    )
    have = dict(found.entries)
    for offset, entry in have.items():
        issued = promise.entries.get(offset)
        _require(issued is not None, f"{where} has a record at {offset} that was never issued")
        _require(entry == issued, f"{where} at {offset}: {entry}, issued was {issued}")
        _require(offset not in promise.gone, f"{where}: the record at {offset} is back")
    for offset in promise.entries:
        if found.start <= offset < found.end and offset not in have:
            gone = offset in promise.gone or offset in promise.optional
            _require(gone, f"{where} has no record at {offset}, but ends at {found.end}")
