"""Agenda against a sorted list, with windows so small that every boundary is met."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from logstore.delays.agenda import EVERYTHING, Agenda, Rows
from logstore.delays.ticket import GENERATIONS, generation_of, ticket_number
from tests.campaign import sized

DUES = st.integers(0, 12)


class AgendaMachine(RuleBasedStateMachine):
    """A log of rows in three generations, and the list of ids that are alive by its rows."""

    @initialize(loaded_max=st.integers(1, 5))
    def begin(self, loaded_max: int) -> None:
        self.loaded_max = loaded_max
        self.logs: list[list[tuple[int, int, bool]]] = [[] for _ in range(GENERATIONS)]
        self.ends = [0] * GENERATIONS
        self.news: list[tuple[int, int, bool]] = []  # rows that the agenda has not seen
        self.open: dict[int, list[int]] = {}  # transactions
        self.hidden: dict[int, tuple[int, int, bool]] = {}  # rows of open transactions
        self.alive: set[int] = set()
        self.ended: set[int] = set()
        self.delivered: list[int] = []
        self.cancelled: set[int] = set()
        self.taken: list[int] = []
        self.counter = 0
        self.now = 0
        self.agenda = Agenda(loaded_max)

    # ---- the log ----

    def append(self, number: int, dead: bool, *, hidden: bool = False) -> None:
        generation = generation_of(number)
        row = (number, self.ends[generation], dead)
        self.ends[generation] += 1
        if hidden:
            self.hidden[number] = row
        else:
            self.logs[generation].append(row)
            self.news.append(row)

    def catch_up(self) -> None:
        if self.news:
            self.agenda.take_in(Rows.of(self.news))
            self.news = []

    def load(self) -> None:
        self.catch_up()
        rows = [row for log in self.logs for row in log]
        # In chunks, so that a ticket and its tombstone may be in different ones.
        self.agenda.load(Rows.of(rows[at : at + 3]) for at in range(0, len(rows), 3))

    def known(self) -> list[int]:
        """D5: a naive filter of the whole log."""
        rows = [row for log in self.logs for row in log]
        dead = {number for number, _, is_dead in rows if is_dead}
        return sorted({number for number, _, _ in rows} - dead)

    def new_number(self, due: int, generation: int) -> int:
        self.counter += 1
        return ticket_number(due, 1, self.counter, generation)

    # ---- rules ----

    @rule(dues=st.lists(DUES, min_size=1, max_size=12), generation=st.integers(0, 2))
    def schedule(self, dues: list[int], generation: int) -> None:
        for due in dues:
            number = self.new_number(self.now + due, generation)
            self.append(number, False)
            self.alive.add(number)

    @rule(due=DUES, generation=st.integers(0, 2), transaction=st.integers(0, 2))
    def schedule_in_a_transaction(self, due: int, generation: int, transaction: int) -> None:
        number = self.new_number(self.now + due, generation)
        self.append(number, False, hidden=True)
        self.open.setdefault(transaction, []).append(number)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), commit=st.booleans())
    def end_transaction(self, data: st.DataObject, commit: bool) -> None:
        for number in self.open.pop(data.draw(st.sampled_from(sorted(self.open)))):
            row = self.hidden.pop(number)
            log = self.logs[generation_of(number)]
            if commit:
                log.append(row)
                log.sort(key=lambda row: row[1])
                if number not in self.ended:
                    # A cancelled one is not in the rows of the marker; see Journal.
                    self.news.append(row)
                    self.alive.add(number)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.alive | set(self.delivered[-3:]))))
        self.catch_up()
        answer = self.agenda.cancel(number)
        if answer is None and (number <= self.agenda.highest or number >> 64 <= self.now):
            answer = number in self.known() and number not in self.taken
        if number in self.taken or number not in self.alive:
            assert answer is False  # D1: it is being delivered, or has been
            return
        assert answer in (True, None)
        self.append(number, True)
        self.alive.discard(number)
        self.ended.add(number)
        self.cancelled.add(number)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel_beyond_the_window_before_the_commit(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([n for ns in self.open.values() for n in ns]))
        self.catch_up()
        never_taken = number > self.agenda.highest and number >> 64 > self.now
        if never_taken and self.agenda.cancel(number) is None:
            self.append(number, True)
            self.ended.add(number)

    @precondition(lambda self: not self.taken)
    @rule(ms=st.integers(0, 6), limit=st.integers(1, 4))
    def take(self, ms: int, limit: int) -> None:
        self.now += ms
        self.catch_up()
        while self.agenda.wants_load(self.now):
            self.load()
        rows = self.agenda.take(self.now, limit)
        self.taken = [number for number, _ in rows]
        for number, offset in rows:
            assert (number, offset, False) in self.logs[generation_of(number)]
        # D2 and D3: those that are due, in order, and no other is before them.  Fewer than `limit`
        # if not all of them are loaded.
        due = sorted(number for number in self.alive if number >> 64 <= self.now)
        assert self.taken == due[: len(self.taken)] and bool(self.taken) == bool(due)

    @precondition(lambda self: self.taken)
    @rule(fails=st.booleans())
    def deliver(self, fails: bool) -> None:
        if fails:
            self.agenda.give_back(self.taken)
        else:
            for number in self.taken:
                assert number not in self.delivered and number not in self.cancelled  # D1
                self.append(number, True)
                self.ended.add(number)
                self.alive.discard(number)
                self.delivered.append(number)
            self.agenda.settle(self.taken)
        self.taken = []

    @rule()
    def load_more(self) -> None:
        self.load()

    @rule()
    def forget(self) -> None:
        """An interrupt in the middle of a change: the agenda is made again, the taken are known."""
        fresh = Agenda(self.loaded_max)
        fresh.adopt(self.agenda)
        self.agenda, self.news = fresh, []

    @rule()
    def crash(self) -> None:
        """D6: the log is the only state, and open transactions are aborted."""
        self.agenda, self.news, self.taken = Agenda(self.loaded_max), [], []
        self.open, self.hidden = {}, {}
        assert self.known() == sorted(self.alive)

    @rule(generation=st.integers(0, 2))
    def compact(self, generation: int) -> None:
        live = set(self.known())
        log = self.logs[generation]
        # Tombstones may outlive their records.
        self.logs[generation] = [row for row in log if row[2] or row[0] in live]

    @rule(generation=st.integers(0, 2))
    def trim(self, generation: int) -> None:
        self.catch_up()
        if self.agenda.end == 0:
            return  # nothing was loaded: nothing is known
        first = self.agenda.first_live(generation)
        hidden = [at for number, (_, at, _) in self.hidden.items()
                  if generation_of(number) == generation]  # fmt: skip
        first = min([self.ends[generation] if first is None else first, *hidden])
        self.logs[generation] = [row for row in self.logs[generation] if row[1] >= first]
        assert self.known() == sorted(self.alive)

    @invariant()
    def the_window_is_the_log(self) -> None:
        if not hasattr(self, "agenda"):
            return
        self.catch_up()
        agenda = self.agenda
        expected = [n for n in sorted(self.alive) if n < agenda.end and n not in self.taken]
        assert [number for number, _ in agenda] == expected  # D5
        assert len(agenda) == len(expected)
        # D4
        assert len(agenda) <= 2 * self.loaded_max + 4  # 4 that were given back
        least = agenda.next_number()
        assert least == (expected[0] if expected else None)
        for number, offset in agenda:
            assert agenda.find(number) == offset


TestAgenda = AgendaMachine.TestCase
TestAgenda.settings = settings(
    max_examples=sized(100, 500, 20_000), stateful_step_count=40, deadline=None
)


def test_d4_a_load_holds_a_bounded_number_of_rows_whatever_is_pending() -> None:
    agenda = Agenda(100)
    seen = []

    def chunks() -> object:
        for base in range(0, 100_000, 50):
            rows = Rows.of((ticket_number(7, 1, n * 7919 % 100_000, 0), n, False)
                           for n in range(base, base + 50))  # fmt: skip
            seen.append(agenda.end)
            yield rows

    agenda.load(chunks())  # type: ignore[arg-type]
    assert len(agenda) == 100
    # All are due in one millisecond: the end of the window is inside of it.
    assert agenda.end == ticket_number(7, 1, 100, 0)
    assert seen == sorted(seen, reverse=True) and seen[0] == EVERYTHING
    assert [number for number, _ in agenda] == [ticket_number(7, 1, n, 0) for n in range(100)]
    delivered = 0
    while agenda.wants_load(7) or len(agenda):
        if agenda.wants_load(7):
            agenda.load(chunks())  # type: ignore[arg-type]
            assert len(agenda) <= 200
        taken = agenda.take(7, 60)
        delivered += len(taken)
        agenda.settle(number for number, _ in taken)
        if delivered > 1000:
            break
    assert delivered > 1000


@pytest.mark.parametrize("generation", [0, 1, 2])
def test_the_generation_of_an_id_is_where_its_record_is(generation: int) -> None:
    number = ticket_number(5, 9, 77, generation)
    assert generation_of(number) == generation
    assert Rows.of([(number, 0, False)]).generations().tolist() == [generation]
    assert number >> 64 == 5
