"""Producers against a model: idempotence, what committed readers see, the last stable offset.

Several producers, idempotent and transactional, send, repeat, leave gaps and are fenced, while the
log is rolled, cut, trimmed, closed, killed and opened again.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from logstore import FencedError, InvalidRecordError, OutOfOrderSequenceError, Partition
from logstore.clock import ManualClock
from logstore.testing import (
    ModelBatch,
    ReferenceRecord,
    TransactionModel,
    check_invariants,
    encode_batch,
)

NOW = 1_700_000_000_000
SEQUENCE_MAX = 2**31 - 1
IDEMPOTENT, TRANSACTIONAL = (1, 2), (11, 12, 13)
PRODUCERS = (*IDEMPOTENT, *TRANSACTIONAL)
producers = st.sampled_from(PRODUCERS)
sizes = st.integers(1, 4)


class ProducersMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp())
        self.lives = 0
        self.model = TransactionModel()
        self.clock = ManualClock(NOW)
        self.sent: dict[int, list[ModelBatch]] = {}
        self.number = 0
        # Batches whose retry is certainly recognised: those appended since the state was loaded.
        self.certain: set[ModelBatch] = set()
        self.log: Partition

    @initialize(first=st.sampled_from([0, 0, SEQUENCE_MAX - 3, SEQUENCE_MAX]))
    def start(self, first: int) -> None:
        self.first_sequence = first
        self.open(self.home / "orders-0")

    def open(self, path: Path) -> None:
        config = {"segment.bytes": 1024, "index.interval.bytes": 200}
        self.log = Partition.open(path, durability="os", config=config, clock=self.clock)
        self.certain = set()

    def teardown(self) -> None:
        if hasattr(self, "log"):
            check_invariants(self.log)
            self.log.close()
        shutil.rmtree(self.home)

    # ---- batches ----

    def values(self, count: int) -> list[bytes]:
        self.number += 1
        return [b"%d.%d" % (self.number, i) + b"x" * (self.number % 40) for i in range(count)]

    def raw(self, batch: ModelBatch) -> bytes:
        return encode_batch(
            [ReferenceRecord(value, timestamp=NOW) for value in batch.values],
            producer_id=batch.producer_id,
            producer_epoch=batch.epoch,
            base_sequence=batch.sequence,
            transactional=batch.transactional,
        )

    def next_batch(
        self, producer_id: int, count: int, *, epoch: int = 0, skip: int = 0
    ) -> ModelBatch:
        known = self.model.producers().get(producer_id)
        sequence = self.first_sequence
        if known is not None:
            sequence = known.next_sequence if epoch == known.epoch else 0  # type: ignore[assignment]
        return ModelBatch(
            0,
            tuple(self.values(count)),
            producer_id,
            epoch,
            (sequence + skip) & SEQUENCE_MAX,
            producer_id in TRANSACTIONAL,
        )

    def epoch(self, producer_id: int) -> int:
        known = self.model.producers().get(producer_id)
        return 0 if known is None else known.epoch

    def append(self, batch: ModelBatch) -> None:
        done = self.log.append_batch(self.raw(batch))
        offsets = self.model.append(
            batch.values,
            producer_id=batch.producer_id,
            epoch=batch.epoch,
            sequence=batch.sequence,
            transactional=batch.transactional,
        )
        assert (done.offsets, done.duplicate) == (offsets, False)
        stored = self.model.batches[-1]
        self.sent.setdefault(batch.producer_id, []).append(stored)
        self.certain.add(stored)

    # ---- what producers do ----

    @rule(count=sizes)
    def plain(self, count: int) -> None:
        values = self.values(count)
        assert self.log.extend(values) == self.model.append(values)

    @rule(producer_id=producers, count=sizes)
    def send(self, producer_id: int, count: int) -> None:
        self.append(self.next_batch(producer_id, count, epoch=self.epoch(producer_id)))

    @rule(producer_id=st.sampled_from(TRANSACTIONAL), commit=st.booleans())
    def end(self, producer_id: int, commit: bool) -> None:
        epoch = self.epoch(producer_id)
        offset = self.log.end_transaction(producer_id, epoch, commit=commit)
        assert offset == self.model.end(producer_id, epoch, commit=commit)

    @rule(producer_id=producers, back=st.integers(1, 7))
    def retry(self, producer_id: int, back: int) -> None:
        sent = self.sent.get(producer_id, [])
        if len(sent) < back:
            return
        batch = sent[-back]
        known = self.model.producers().get(producer_id)
        here = batch in self.model.batches
        newest = known is not None and known.last == batch
        if known is None or (known.next_sequence == batch.sequence and known.epoch == batch.epoch):
            return  # it was truncated, and would be appended again
        if batch.epoch > known.epoch or (known.last is None and batch.sequence == 0):
            return
        try:
            done = self.log.append_batch(self.raw(batch))
        except OutOfOrderSequenceError:
            assert batch.epoch == known.epoch
            recent = [b for b in self.model.batches if b in self.certain and not b.ends]
            recent = [b for b in recent if b.producer_id == producer_id and b.epoch == known.epoch]
            assert not newest
            assert batch not in recent[-5:]
        except FencedError:
            assert batch.epoch < known.epoch
        else:
            assert here, "answered for a batch that is not in the log"
            assert done.duplicate
            assert done.offsets == range(batch.base_offset, batch.end_offset)

    @rule(producer_id=producers, count=sizes, skip=st.integers(1, 9))
    def leave_a_gap(self, producer_id: int, count: int, skip: int) -> None:
        if producer_id not in self.model.producers():
            return
        batch = self.next_batch(producer_id, count, epoch=self.epoch(producer_id), skip=skip)
        with pytest.raises(OutOfOrderSequenceError) as error:
            self.log.append_batch(self.raw(batch))
        assert error.value.sequence == batch.sequence

    @rule(producer_id=st.sampled_from(IDEMPOTENT), count=sizes)
    def start_an_epoch(self, producer_id: int, count: int) -> None:
        epoch = self.epoch(producer_id) + 1
        self.append(self.next_batch(producer_id, count, epoch=epoch))

    @rule(producer_id=st.sampled_from(TRANSACTIONAL))
    def fence(self, producer_id: int) -> None:
        epoch = self.epoch(producer_id) + 1
        offset = self.log.end_transaction(producer_id, epoch, commit=False)
        assert offset == self.model.end(producer_id, epoch, commit=False)

    @rule(producer_id=producers, count=sizes)
    def come_back_as_a_zombie(self, producer_id: int, count: int) -> None:
        epoch = self.epoch(producer_id) - 1
        if epoch < 0:
            return
        batch = self.next_batch(producer_id, count, epoch=epoch)
        with pytest.raises(FencedError):
            self.log.append_batch(self.raw(batch))
        if producer_id in TRANSACTIONAL:
            with pytest.raises(FencedError):
                self.log.end_transaction(producer_id, epoch, commit=True)

    @rule(producer_id=st.sampled_from(TRANSACTIONAL))
    def forget_the_transaction(self, producer_id: int) -> None:
        if producer_id not in self.model.ongoing():
            return
        batch = self.next_batch(producer_id, 1, epoch=self.epoch(producer_id))
        plain = encode_batch(
            [ReferenceRecord(b"no", timestamp=NOW)],
            producer_id=producer_id, producer_epoch=batch.epoch, base_sequence=batch.sequence,
        )  # fmt: skip
        with pytest.raises(InvalidRecordError):
            self.log.append_batch(plain)

    # ---- what happens to the log ----

    @rule()
    def roll(self) -> None:
        self.log.roll()

    @rule(share=st.floats(0, 1))
    @precondition(lambda self: self.model.end_offset > 0)
    def truncate(self, share: float) -> None:
        start, end = self.model.start_offset, self.model.end_offset
        cut = max(start, end - round((end - start) * share * share * share))
        self.log.truncate(cut)
        self.model.truncate(cut)
        if cut != end:
            self.certain = set()

    @rule(share=st.floats(0, 1))
    def trim(self, share: float) -> None:
        start, end = self.model.start_offset, self.model.end_offset
        at = start + round((end - start) * share * share)
        self.log.trim(at)
        self.model.trim(at)

    @rule()
    def reopen(self) -> None:
        path = self.log.path
        self.log.close()
        self.open(path)
        assert self.log.recovery.clean

    @rule(lost=st.sampled_from(["nothing", "snapshots", "indexes"]))
    def kill_and_reopen(self, lost: str) -> None:
        """The directory as the process leaves it when it is killed; some of its files torn."""
        self.lives += 1
        path = self.home / f"life-{self.lives}" / "orders-0"
        shutil.copytree(self.log.path, path)
        old = self.log
        self.open(path)
        old.close()
        shutil.rmtree(old.path)
        assert not self.log.recovery.damage
        if lost == "indexes" and not list(path.glob("*.txnindex")):
            return
        if lost != "nothing":
            self.tear(path, ".snapshot" if lost == "snapshots" else ".txnindex")

    def tear(self, path: Path, suffix: str) -> None:
        """Close, damage the newest file of a kind, and open: the log knows better."""
        if suffix == ".snapshot" and self.model.start_offset > 0:
            return  # an older one may be needed for what was trimmed away
        self.log.close()
        newest = max(path.glob(f"*{suffix}"), default=None)
        if newest is not None:
            content = newest.read_bytes()
            newest.write_bytes(b"\1" + content[1:])
        if suffix == ".txnindex":
            with Partition.open(path, readonly=True, clock=self.clock) as reader:
                self.compare(reader)
        self.open(path)

    # ---- what must hold ----

    def compare(self, log: Partition) -> None:
        model = self.model
        assert (log.start_offset, log.end_offset) == (model.start_offset, model.end_offset)
        assert log.last_stable_offset == model.last_stable_offset
        assert [(r.offset, r.value) for r in log] == list(model.records())
        committed = log.scan(isolation="read_committed")
        assert [(r.offset, r.value) for r in committed] == model.committed()
        columns = [
            (offset, value)
            for chunk in committed.columns(3)
            for offset, value in zip(chunk.offsets.tolist(), chunk.values, strict=True)
        ]
        assert columns == model.committed()

    @invariant()
    def the_log_is_what_the_model_says(self) -> None:
        if not hasattr(self, "log"):
            return
        self.compare(self.log)
        start = self.model.start_offset
        found = [entry[:3] for entry in self.log.aborted_transactions()]
        assert found == [entry for entry in self.model.aborted() if entry[2] >= start]
        ongoing = {t.producer_id: t.first_offset for t in self.log.ongoing_transactions}
        assert ongoing == self.model.ongoing()

    @rule()
    def a_reader_agrees(self) -> None:
        with Partition.open(self.log.path, readonly=True, clock=self.clock) as reader:
            self.compare(reader)
            found = {t.producer_id: t.first_offset for t in reader.ongoing_transactions}
            assert found == self.model.ongoing()


def machine(**options: Any) -> type:
    case = ProducersMachine.TestCase
    case.settings = settings(deadline=None, **options)
    return case


TestProducers = machine(max_examples=25, stateful_step_count=30)


@pytest.mark.slow
def test_producers_at_length() -> None:
    """LOGSTORE_SEED=n repeats a run."""
    from hypothesis import seed
    from hypothesis.stateful import run_state_machine_as_test

    number = int(os.environ.get("LOGSTORE_SEED", random.randrange(1 << 32)))
    print("LOGSTORE_SEED =", number)
    options = settings(deadline=None, max_examples=150, stateful_step_count=60, database=None,
                       derandomize=False)  # fmt: skip
    run_state_machine_as_test(seed(number)(ProducersMachine), settings=options)
