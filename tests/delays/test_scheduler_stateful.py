"""A scheduler on a real store against a sorted list: crashes, compaction, transactions, leaps."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import logstore
from logstore import Compactor, ManualClock, Producer, Scheduler, Store, Ticket, UnknownTicketError
from logstore.coordinators.internal_topics import DELAYED
from logstore.store.store import abandon_store
from tests.campaign import sized
from tests.machines import fast_directory

DELAYS = st.sampled_from([0, 0.001, 0.5, 2, 3000, 4000, 90_000, 100_000])


class SchedulerMachine(RuleBasedStateMachine):
    """`pending` is the model: ticket -> value."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="logstore-machine-", dir=fast_directory()))
        self.copies = 0

    @initialize(loaded_max=st.integers(1, 5), batch_max=st.integers(1, 4))
    def begin(self, loaded_max: int, batch_max: int) -> None:
        self.clock = ManualClock()
        self.sizes = {"loaded_max": loaded_max, "batch_max": batch_max}
        self.pending: dict[Ticket, bytes] = {}
        self.expected: list[bytes] = []  # delivered
        self.in_transaction: dict[Ticket, bytes] = {}
        self.counter = 0
        self.open()
        self.store.create_topic("t")

    def open(self) -> None:
        self.store: Store = logstore.open(
            self.root / f"copy{self.copies}", durability="os", clock=self.clock
        )
        self.scheduler = Scheduler.of(self.store, **self.sizes)
        self.producer = Producer(self.store, "user")
        self.transaction: logstore.Transaction | None = None
        self.in_transaction = {}

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.root)

    def value(self) -> bytes:
        self.counter += 1
        return b"%d" % self.counter

    def due(self) -> list[Ticket]:
        return sorted(t for t in self.pending if t.due_ms <= self.clock.now_ms)

    # ---- rules ----

    @rule(delays=st.lists(DELAYS, min_size=1, max_size=6))
    def schedule(self, delays: list[float]) -> None:
        for delay in delays:
            value = self.value()
            self.pending[self.scheduler.schedule("t", value, deliver_after=delay)] = value

    @rule(delay=DELAYS)
    def schedule_in_the_transaction(self, delay: float) -> None:
        if self.transaction is None:
            self.transaction = self.producer.transaction()
        value = self.value()
        ticket = self.scheduler.schedule(
            "t", value, deliver_after=delay, transaction=self.transaction
        )
        self.in_transaction[ticket] = value
        self.producer.flush()

    @precondition(lambda self: self.transaction)
    @rule(commit=st.booleans())
    def end_the_transaction(self, commit: bool) -> None:
        assert self.transaction is not None
        if commit:
            self.transaction.commit()
            self.pending |= self.in_transaction
        else:
            self.transaction.abort()
        self.transaction, self.in_transaction = None, {}

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.pending)))
        assert self.scheduler.cancel(ticket)
        del self.pending[ticket]

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), delay=DELAYS)
    def reschedule(self, data: st.DataObject, delay: float) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.pending)))
        moved = self.scheduler.reschedule(ticket, deliver_after=delay)
        self.pending[moved] = self.pending.pop(ticket)
        try:
            self.scheduler.get(ticket)
        except UnknownTicketError:
            return
        raise AssertionError("the old ticket is still pending")

    @rule(ms=st.sampled_from([0, 1, 1000, 4_000_000, 100_000_000]))
    def deliver(self, ms: int) -> None:
        self.clock.advance(ms)
        due = self.due()
        assert self.scheduler.run_once() == len(due)
        self.expected += [self.pending.pop(ticket) for ticket in due]
        log = self.store["t"][0]
        got = [record.value for record in log.scan(isolation="read_committed")]
        assert got == self.expected  # D1, D2, D3

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()

    @rule()
    def crash(self) -> None:
        """The files as a killed process leaves them."""
        before = self.root / f"copy{self.copies}"
        self.copies += 1
        shutil.copytree(before, self.root / f"copy{self.copies}")
        abandon_store(self.store)
        shutil.rmtree(before)
        self.open()

    @rule(number=st.integers(0, 2))
    def compact(self, number: int) -> None:
        topic = self.store.get(DELAYED)
        if topic is not None and number in topic.partition_numbers:
            topic[number].roll()
            Compactor(topic[number], delete_retention_ms=0).run()

    @rule()
    def reclaim(self) -> None:
        with self.scheduler._lock:
            self.scheduler._reclaim()

    @invariant()
    def the_log_has_what_is_pending(self) -> None:
        if not hasattr(self, "store"):
            return
        found = self.scheduler.pending(limit=1000)
        assert [(each.ticket, each.value) for each in found] == sorted(self.pending.items())  # D6
        assert self.scheduler.count() == len(self.pending)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=sized(12, 100, 2000), stateful_step_count=25, deadline=None
)
