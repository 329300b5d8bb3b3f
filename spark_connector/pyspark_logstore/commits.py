"""Commits: append prepared files to the log exactly once, even if a process is killed.

One file, the plan, decides a commit.  The plan names the prepared files of a batch, the producer
that appends them, and the end offset of every partition when the plan is made.  The steps:

    1  open the store for writing; its lock excludes other commits
    2  finish the plans of commits that were interrupted, with steps 5 to 7
    3  stop if the batch is already done
    4  write, sync and rename the plan; from here on the batch will be in the log
    5  append the batches in a transaction, with their sequences in the plan; append the end
       markers; sync
    6  write, sync and rename the file that records the batch as done
    7  delete the plan, then the prepared files

After a kill before step 4, nothing is in the log and Spark prepares the batch again.  After a kill
later than that, the next commit to the store, or `finish`, reads the log from the planned ends on
to find which part of the plan is there, and appends the rest.  A replayed batch may have its rows
in another order; this is harmless, because the files of the plan are the batch.

Producer id and epoch are computed from the application's name and the number of the batch.  So no
two batches share sequences, and the log itself also rejects a batch that was appended before.

Files at the root, which stores and brokers ignore: ``logstore.sink.<owner>.plan`` and ``.done``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import logstore
from logstore import (
    BatchHeader,
    InvalidRecordError,
    LockedError,
    OutOfOrderSequenceError,
    Partition,
    RecordTooLargeError,
    Store,
    with_producer,
)
from pyspark_logstore.prepared import (
    PREFIX,
    Extent,
    PreparedFile,
    age_of,
    owner_of,
    prepared_names,
    remove,
)

__all__ = ["Commit", "Committer", "SinkError"]

log = logging.getLogger("pyspark_logstore.commits")

PLAN, DONE, TEMPORARY = ".plan", ".done", ".tmp"
EPOCHS = 1 << 15  # batches that share a producer id, one epoch each
RECORDS_MAX = (1 << 31) - 1  # of one batch in one partition: sequences must not come round
TIME_SLACK_MS = 60_000  # what may pass between the check of a record's time and its append
DAY = 86_400.0


class SinkError(RuntimeError):
    """A write that cannot be done, with the remedy in the message."""


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
    """What a commit did.  Not `applied`: the batch had been committed before."""

    application: str
    batch_id: int
    applied: bool
    records: int
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Target:
    """A partition that a plan appends to, or trims, and where it ended when the plan was made."""

    topic: str
    topic_id: str
    partition: int
    end_offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """A decided commit."""

    application: str
    batch_id: int
    query_id: str
    once: bool  # a batch job, which is never replayed: do not record it as done
    overwrite: bool
    files: tuple[PreparedFile, ...]
    targets: tuple[_Target, ...]

    @property
    def name(self) -> str:
        return PREFIX + owner_of(self.application) + PLAN

    @property
    def producer(self) -> tuple[int, int]:
        """Id and epoch.  Ids from 2**62 on are never given out by a coordinator."""
        block, epoch = divmod(self.batch_id, EPOCHS)
        digest = hashlib.sha256(f"{self.application}\n{block}".encode()).digest()
        return (1 << 62) | (int.from_bytes(digest[:8], "big") >> 2), epoch

    @property
    def records(self) -> int:
        return sum(extent.records for file in self.files for extent in file.extents)

    def stretches(self, topic: str, partition: int) -> Iterator[tuple[PreparedFile, Extent]]:
        """Return the stretches of a partition, always in the same order."""
        for file in self.files:
            for extent in file.extents:
                if (extent.topic, extent.partition) == (topic, partition):
                    yield file, extent

    def encode(self) -> bytes:
        content = {
            "version": 1,
            "application": self.application,
            "batch": self.batch_id,
            "query": self.query_id,
            "once": self.once,
            "overwrite": self.overwrite,
            "files": [file.as_json() for file in self.files],
            "targets": [dataclasses.astuple(target) for target in self.targets],
        }
        return json.dumps(content).encode() + b"\n"

    @classmethod
    def read(cls, path: Path) -> _Plan:
        try:
            content = json.loads(path.read_bytes())
            return cls(
                content["application"],
                content["batch"],
                content["query"],
                content["once"],
                content["overwrite"],
                tuple(map(PreparedFile.from_json, content["files"])),
                tuple(_Target(*fields) for fields in content["targets"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise SinkError(
                f"{path} cannot be read ({error}): it is the plan of a commit that was cut short; "
                f"put it back from a copy, or remove it to give that batch up"
            ) from error


class Committer:
    """Commits prepared files to one store.  Opens the store for each commit, and closes it."""

    def __init__(
        self,
        root: Path,
        *,
        fsync: bool = True,
        lock_timeout: float = 60.0,
        orphan_age: float = DAY,
    ) -> None:
        self._root = root
        self._fsync = fsync
        self._lock_timeout = lock_timeout
        self._orphan_age = orphan_age

    # ---- what sinks call ----

    def commit(
        self,
        application: str,
        batch_id: int,
        files: Sequence[PreparedFile],
        *,
        query_id: str = "",
        once: bool = False,
        create: Mapping[str, int] | None = None,
        overwrite: Iterable[str] = (),
    ) -> Commit:
        """Append everything in the files, unless this batch has been committed before.

        `create` names topics to make where they are missing, with their number of partitions;
        `overwrite` those whose older records go.  When it raises, the batch is either not in the
        log at all or decided: committing it again, with any files, is right in both cases.
        """
        with self._opened() as store:
            self._finish_all(store)
            done, by = self._done(application)
            if batch_id <= done:
                self._refuse_another(application, batch_id, done, by, query_id)
                remove(self._root, [file.name for file in files])
                self._sweep(application, done)
                return Commit(application, batch_id, False, 0, 0)
            replaced = tuple(overwrite)
            plan = self._plan(store, application, batch_id, query_id, once, files, create or {},
                              replaced)  # fmt: skip
            if plan.files or replaced:
                self._replace(plan.name, plan.encode())
                self._apply(store, plan)
            size = sum(file.size for file in plan.files)
        return Commit(application, batch_id, True, plan.records, size)

    def last_batch(self, application: str) -> int:
        """The number of the application's last batch that is known to be in the log, or -1."""
        return self._done(application)[0]

    def abort(
        self,
        files: Sequence[PreparedFile | None],
        *,
        application: str = "",
        batch_id: int | None = None,
    ) -> None:
        """Delete the prepared files of a batch that will not be committed.

        With the application's name, also delete the files of its tasks that were killed before they
        reported them.
        """
        planned = {file.name for plan in self._plans() for file in plan.files}
        names = {file.name for file in files if file is not None}
        if application:
            mine = (owner_of(application), -1 if batch_id is None else batch_id)
            names |= {name for name, *of in prepared_names(self._root) if tuple(of) == mine}
        remove(self._root, sorted(names - planned))

    def finish(self) -> list[Commit]:
        """Finish every interrupted plan and delete garbage; return the finished commits."""
        with self._opened() as store:
            finished = self._finish_all(store)
            self._sweep("", -1)
        return finished

    # ---- the store ----

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Store]:
        """The store, for writing: its lock is what makes commits wait for each other."""
        deadline = time.monotonic() + self._lock_timeout
        while True:
            try:
                store = logstore.open(
                    self._root, create=False, durability="fsync" if self._fsync else "os"
                )
                break
            except LockedError as error:
                if time.monotonic() >= deadline:
                    raise SinkError(
                        f"the store is locked: {error}. A sink needs it only while it commits, and "
                        f"waited {self._lock_timeout:g} s: let the other writer close it, or raise "
                        f"the option lockTimeout"
                    ) from error
                time.sleep(0.05)
        with store:
            yield store

    # ---- planning ----

    def _plan(self, store: Store, application: str, batch_id: int, query_id: str, once: bool,
              files: Sequence[PreparedFile], create: Mapping[str, int],
              overwrite: tuple[str, ...]) -> _Plan:  # fmt: skip
        """Everything that could refuse a record is looked at here: a plan must not fail later."""
        places = sorted({(e.topic, e.partition) for file in files for e in file.extents})
        names = sorted({topic for topic, _ in places} | set(overwrite))
        for topic in names:
            if topic not in store:
                if topic not in create:
                    raise SinkError(
                        f"there is no topic {topic!r} in {self._root}: create it, or set the "
                        f"option createTopic to true"
                    )
                store.create_topic(topic, create[topic])
        for topic, partition in places:
            count = len(store[topic])
            if partition >= count:
                raise SinkError(
                    f"topic {topic!r} has partitions 0 to {count - 1}; rows were prepared for "
                    f"partition {partition}: add partitions, or correct the column"
                )
        for file in files:
            self._check(store, file)
        for topic in overwrite:
            places += [(topic, p.number) for p in store[topic] if (topic, p.number) not in places]
        plan = _Plan(
            application,
            batch_id,
            query_id,
            once,
            bool(overwrite),
            tuple(files),
            tuple(
                _Target(topic, str(store[topic].id), number, self._end(store[topic][number]))
                for topic, number in sorted(places)
            ),
        )
        for target in plan.targets:
            total = sum(e.records for _, e in plan.stretches(target.topic, target.partition))
            if total > RECORDS_MAX:
                raise SinkError(
                    f"{total} records for {target.topic}-{target.partition} in one batch; at most "
                    f"{RECORDS_MAX} are possible: use more partitions, or smaller batches "
                    f"(maxOffsetsPerTrigger)"
                )
        return plan

    def _end(self, partition: Partition) -> int:
        """Where it ends, durably: the search for what is there of a plan starts from it."""
        if self._fsync:
            partition.sync()
        return partition.end_offset

    def _check(self, store: Store, file: PreparedFile) -> None:
        path = self._root / file.name
        if not path.exists() or path.stat().st_size != file.size:
            raise SinkError(
                f"{path} is not as its task left it, with {file.size} bytes: the driver does not "
                f"see what tasks write; use a path on storage that all of them share"
            )
        now = int(time.time() * 1000)
        for topic in sorted({extent.topic for extent in file.extents}):
            config = store[topic].config
            if config.compacts and topic in file.keyless:
                raise SinkError(
                    f"topic {topic!r} has cleanup.policy={config.cleanup_policy}, and some rows "
                    f"have no key: give every row a key"
                )
            if config.message_timestamp_type == "CreateTime":
                before = config.message_timestamp_before_max_ms
                after = config.message_timestamp_after_max_ms
                if (
                    file.least_timestamp >= 0
                    and now + TIME_SLACK_MS - file.least_timestamp > before
                ) or file.greatest_timestamp - now > after:
                    raise SinkError(
                        f"rows for {topic!r} have times from {file.least_timestamp} to "
                        f"{file.greatest_timestamp}, beyond message.timestamp.before.max.ms="
                        f"{before} or message.timestamp.after.max.ms={after}: widen these, or "
                        f"set the option timestamps to now"
                    )
            limit = min(config.max_message_bytes, config.segment_bytes)
            for extent in file.extents:
                if extent.topic == topic and extent.size > limit:
                    largest = max(map(len, file.batches(self._root, extent)))
                    if largest > limit:
                        raise SinkError(
                            f"a batch of {largest} bytes was prepared for {topic!r}, where "
                            f"max.message.bytes or segment.bytes allows {limit}: raise these, or "
                            f"set the option batchBytes to less"
                        )

    # ---- finishing ----

    def _finish_all(self, store: Store) -> list[Commit]:
        finished = []
        for plan in self._plans():
            log.warning("finishing batch %d of %s", plan.batch_id, plan.application)
            self._apply(store, plan)
            size = sum(file.size for file in plan.files)
            finished.append(Commit(plan.application, plan.batch_id, True, plan.records, size))
        return finished

    def _plans(self) -> list[_Plan]:
        names = [n for n in os.listdir(self._root) if n.startswith(PREFIX) and n.endswith(PLAN)]
        return [_Plan.read(self._root / name) for name in sorted(names)]

    def _apply(self, store: Store, plan: _Plan) -> None:
        """Steps 5 to 7; may be repeated from any point at which it was cut short."""
        if plan.once or self._done(plan.application)[0] < plan.batch_id:
            self._append_all(store, plan)
            if not plan.once:
                done = {"version": 1, "application": plan.application, "batch": plan.batch_id,
                        "query": plan.query_id}  # fmt: skip
                self._replace(self._done_name(plan.application), json.dumps(done).encode() + b"\n")
        (self._root / plan.name).unlink()
        self._sync_root()  # before its files are deleted: a plan that a crash restores needs them
        remove(self._root, [file.name for file in plan.files])
        self._sweep(plan.application, plan.batch_id, whole=plan.once)

    def _append_all(self, store: Store, plan: _Plan) -> None:
        producer_id, epoch = plan.producer
        unended: list[Partition] = []
        touched: list[tuple[Partition, int]] = []
        for target in plan.targets:
            if target.topic not in store or str(store[target.topic].id) != target.topic_id:
                # Deleted since then, and so would be these records.
                log.warning("topic %s is gone since batch %d of %s was decided",
                            target.topic, plan.batch_id, plan.application)  # fmt: skip
                continue
            partition = store[target.topic][target.partition]
            touched.append((partition, target.end_offset))
            there, ended = self._progress(partition, target, producer_id, epoch)
            if ended:
                continue
            sequence = 0
            for file, extent in plan.stretches(target.topic, target.partition):
                if sequence + extent.records <= there:
                    sequence += extent.records
                    continue
                for raw in self._read(plan, file, extent):
                    count = BatchHeader.parse(raw).last_offset_delta + 1
                    if sequence >= there:
                        self._append(partition, plan, file, raw, sequence)
                    sequence += count
            if sequence:
                unended.append(partition)
        for partition in unended:
            partition.end_transaction(producer_id, epoch, commit=True, durability="os")
        for partition, end_offset in touched:
            if self._fsync:
                partition.sync()
            if plan.overwrite:
                partition.trim(end_offset)

    def _read(self, plan: _Plan, file: PreparedFile, extent: Extent) -> list[bytes]:
        try:
            return file.batches(self._root, extent)
        except (OSError, ValueError) as error:
            raise SinkError(self._stuck(plan, file, error)) from error

    def _append(
        self, partition: Partition, plan: _Plan, file: PreparedFile, raw: bytes, sequence: int
    ) -> None:
        producer_id, epoch = plan.producer
        try:
            stamped = with_producer(raw, producer_id=producer_id, producer_epoch=epoch,
                                    base_sequence=sequence, transactional=True)  # fmt: skip
            # The plan decides this transaction: the coordinator does not know it.
            partition.append_batch(stamped, durability="os", verify_transaction=False)
        except OutOfOrderSequenceError as error:
            # The log knows better what it has seen of us, even when retention took it away since.
            if error.expected <= sequence:
                raise
        except (InvalidRecordError, RecordTooLargeError) as error:
            raise SinkError(self._stuck(plan, file, error)) from error

    def _stuck(self, plan: _Plan, file: PreparedFile, error: Exception) -> str:
        producer_id, epoch = plan.producer
        return (
            f"batch {plan.batch_id} of {plan.application!r} is decided, but {file.name} cannot be "
            f"appended: {error}. Change the topic's settings back, or the file from a copy, and "
            f"try again; to give the batch up, remove {self._root / plan.name} and abort its "
            f"transaction (producer {producer_id}, epoch {epoch}) with Partition.end_transaction"
        )

    def _progress(
        self, partition: Partition, target: _Target, producer_id: int, epoch: int
    ) -> tuple[int, bool]:
        """How many records of the plan are in the log, and whether their end marker is."""
        there, ended = 0, False
        if partition.end_offset > target.end_offset:
            for raw in partition.scan(target.end_offset, on_lost="skip").batches():
                header = BatchHeader.parse(raw)
                if (header.producer_id, header.producer_epoch) == (producer_id, epoch):
                    if header.control:
                        ended = True
                    else:
                        there = max(there, header.base_sequence + header.last_offset_delta + 1)
        return there, ended

    # ---- files at the root ----

    def _done_name(self, application: str) -> str:
        return PREFIX + owner_of(application) + DONE

    def _done(self, application: str) -> tuple[int, str]:
        """The last batch of an application that is in the log, -1 for none, and whose it was."""
        path = self._root / self._done_name(application)
        try:
            content = json.loads(path.read_bytes())
            return int(content["batch"]), str(content["query"])
        except FileNotFoundError:
            return -1, ""
        except (KeyError, TypeError, ValueError) as error:
            raise SinkError(
                f"{path} cannot be read ({error}): it says which batches are in the log; put it "
                f"back from a copy, or remove it and choose another txnAppId"
            ) from error

    def _refuse_another(
        self, application: str, batch_id: int, done: int, by: str, query_id: str
    ) -> None:
        """A new query under an old name counts from 0 again: that is no replay."""
        if by and query_id and by != query_id:
            raise SinkError(
                f"txnAppId {application!r} has committed batches up to {done} as query {by}; this "
                f"is query {query_id} with batch {batch_id}, of which nobody knows whether it is "
                f"a replay: use the old checkpoint again, or choose another txnAppId"
            )

    def _replace(self, name: str, content: bytes) -> None:
        """Replace a file atomically and durably.  The caller holds the store's lock."""
        temporary = self._root / f"{name}{TEMPORARY}"
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                if self._fsync:
                    os.fsync(file.fileno())
            os.replace(temporary, self._root / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._sync_root()

    def _sync_root(self) -> None:
        if self._fsync:
            directory = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def _sweep(self, application: str, batch_id: int, *, whole: bool = False) -> None:
        """Remove prepared files that no plan can want: of batches that are done, or old ones.

        `whole`: the application is done for good, and so is everything it prepared.
        """
        owner = owner_of(application) if application else ""
        wanted = {file.name for plan in self._plans() for file in plan.files}
        for name, of, batch in prepared_names(self._root):
            if name in wanted:
                continue
            done = of == owner and (whole or 0 <= batch <= batch_id)
            if done or self._is_old(name):
                log.info("swept %s", name)
                remove(self._root, [name])
        for name in os.listdir(self._root):
            if name.startswith(PREFIX) and name.endswith(TEMPORARY):
                remove(self._root, [name])

    def _is_old(self, name: str) -> bool:
        return age_of(self._root / name) > self._orphan_age
