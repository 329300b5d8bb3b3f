"""Agenda: the tickets of one window of time, in the order of delivery.  Pure: no I/O, no clock.

The window is all ids below `end`.  Every live ticket of the window is in memory, as sorted arrays
and as a heap of those that arrived later.  A ticket at or after `end` is in the log only; `load`
moves `end` forward and reads the next ones.

Invariant: after `load` and `take_in` of all rows of the log, the agenda holds exactly the ids below
`end` that have a record, no tombstone, and are not taken (`take`) at this time.

Memory: at most 2 * `loaded_max` tickets and those that are taken; during a load also 4 *
`loaded_max` rows and one chunk.  If more tickets arrive in the window, `end` moves back, and the
tickets after it are loaded later.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from logstore.delays.ticket import COUNTER_BITS, GENERATIONS, generation_of

__all__ = ["EVERYTHING", "Agenda", "Rows"]

# Ids have 128 bits: the end of a window that has no end.
EVERYTHING = 1 << 128
LOW = (1 << 64) - 1
NEVER = np.iinfo(np.int64).max
# The heap is merged into the arrays when it has more tickets than this, or an eighth of them all.
HEAP_MAX = 4096


class Rows(NamedTuple):
    """Records of the internal topic, as arrays: due time, low half of the id, offset, tombstone."""

    due: npt.NDArray[np.uint64]
    serial: npt.NDArray[np.uint64]
    offset: npt.NDArray[np.int64]
    dead: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, bool]]) -> Rows:
        """Return rows of (id, offset, tombstone)."""
        listed = list(rows)
        return cls(
            np.array([number >> 64 for number, _, _ in listed], np.uint64),
            np.array([number & LOW for number, _, _ in listed], np.uint64),
            np.array([offset for _, offset, _ in listed], np.int64),
            np.array([dead for _, _, dead in listed], np.bool_),
        )

    @classmethod
    def joined(cls, parts: Iterable[Rows]) -> Rows:
        """Return the rows of all parts."""
        columns = zip(*parts, strict=True)
        return cls(*(np.concatenate(column) for column in columns))

    def __len__(self) -> int:
        return len(self.due)

    def where(self, chosen: npt.NDArray[np.bool_] | npt.NDArray[np.intp] | slice) -> Rows:
        """Return the chosen rows."""
        return Rows(self.due[chosen], self.serial[chosen], self.offset[chosen], self.dead[chosen])

    def number(self, row: int) -> int:
        """Return the id of one row."""
        return int(self.due[row]) << 64 | int(self.serial[row])

    def below(self, number: int) -> npt.NDArray[np.bool_]:
        """Return which ids are less than a number."""
        if number >= EVERYTHING:
            return np.ones(len(self), np.bool_)
        due, serial = np.uint64(number >> 64), np.uint64(number & LOW)
        below: npt.NDArray[np.bool_] = (self.due < due) | (
            (self.due == due) & (self.serial < serial)
        )
        return below

    def live(self) -> Rows:
        """Return the rows without tombstone, sorted by id; a tombstone removes all rows of its id.

        A tombstone without a record is removed as well: its record is not in the log any more.
        """
        order = np.lexsort((self.serial, self.due))
        rows = self.where(order)
        if not rows.dead.any():
            return rows
        first = np.ones(len(rows), np.bool_)
        first[1:] = (rows.due[1:] != rows.due[:-1]) | (rows.serial[1:] != rows.serial[:-1])
        # The number of each row's id, counted from 0; then whether any row of that id is dead.
        ids = np.cumsum(first) - 1
        ended = np.zeros(int(ids[-1]) + 1, np.bool_)
        ended[ids[rows.dead]] = True
        return rows.where(~ended[ids])

    def generations(self) -> npt.NDArray[np.uint64]:
        """Return the generation of each row; see `generation_of`."""
        inverted = self.serial >> np.uint64(COUNTER_BITS) & np.uint64(3)
        generations: npt.NDArray[np.uint64] = np.uint64(2) - np.minimum(inverted, np.uint64(2))
        return generations


NOTHING = Rows.of(())


class Agenda:
    """The live tickets of one window.  Threads must not share it without a lock."""

    def __init__(self, loaded_max: int) -> None:
        self._loaded_max = loaded_max
        self.end = 0  # ids below it are known here
        # Sorted.  The rows before `_at` were handed out; an offset of -1 is a cancelled ticket.
        self._rows = NOTHING
        self._at = 0
        self._count = 0  # of the rows from `_at` on that are not cancelled
        self._later: dict[int, int] = {}  # arrived after the load: id -> offset
        self._heap: list[int] = []  # the ids of `_later`, and some that were cancelled since
        self._taken: dict[int, int] = {}  # handed out, and neither settled nor given back
        self.highest = -1  # the greatest id that was ever handed out
        # Of each generation, the least offset of a record at or after `end`.
        self._beyond = [NEVER] * GENERATIONS

    def __len__(self) -> int:
        return self._count + len(self._later)

    def __repr__(self) -> str:
        end = "everything" if self.end >= EVERYTHING else f"{self.end >> 64} ms"
        return f"<Agenda of {len(self)} tickets up to {end}>"

    # ---- loading ----

    def wants_load(self, until_ms: int) -> bool:
        """Return whether the next tickets, or those up to `until_ms`, should be loaded now.

        Not while many are in memory: a backlog that is due is loaded piece by piece.
        """
        if self.end >= EVERYTHING:
            return False
        few = len(self) <= self._loaded_max // 2
        return len(self) == 0 or (few and self.end >> 64 <= until_ms)

    def load(self, chunks: Iterable[Rows]) -> None:
        """Move the window's end forward, and take the tickets up to it from all rows of the log.

        Rows of ids below the old end are ignored.  While the agenda is full, nothing changes.  The
        iterator of `chunks` may read `end` between
        two chunks: rows at or after it are not needed any more; see `skip`.
        """
        room = min(self._loaded_max, 2 * self._loaded_max - len(self))
        if room <= 0:
            return
        start, self.end = self.end, EVERYTHING
        self._beyond = [NEVER] * GENERATIONS
        held: list[Rows] = []
        count = 0
        for chunk in chunks:
            held.append(self._inside(chunk.where(~chunk.below(start))))
            count += len(held[-1])
            if count > 4 * self._loaded_max:
                held = [self._cut(Rows.joined(held).live(), room)]
                count = len(held[0])
        loaded = self._cut(Rows.joined(held).live(), room) if held else NOTHING
        # All loaded ids are at or after the old end: they follow the rows that are left.
        left = self._rows.where(slice(self._at, None))
        self._rows, self._at = Rows.joined((left, loaded)), 0
        self._count += len(loaded)
        for number in self._taken:  # their tombstones are not in the log yet
            self._remove(number)

    def skip(self, generation: int, offset: int) -> None:
        """Note that records from `offset` on were not read: all their ids are after `end`."""
        self._beyond[generation] = min(self._beyond[generation], offset)

    def _inside(self, rows: Rows) -> Rows:
        """Return the rows below `end`; note the offsets of the others."""
        below = rows.below(self.end)
        if not below.all():
            self._note_beyond(rows.where(~below))
            rows = rows.where(below)
        return rows

    def _note_beyond(self, rows: Rows) -> None:
        # A tombstone is after its record: only records decide what can be trimmed.
        rows = rows.where(~rows.dead)
        generations = rows.generations()
        for generation in range(GENERATIONS):
            offsets = rows.offset[generations == generation]
            if len(offsets):
                self.skip(generation, int(offsets.min()))

    def _cut(self, rows: Rows, room: int) -> Rows:
        """Return at most `room` of the sorted rows; `end` moves back to the first one left out."""
        if len(rows) <= room:
            return rows
        self.end = rows.number(room)
        self._note_beyond(rows.where(slice(room, None)))
        return rows.where(slice(None, room))

    def take_in(self, rows: Rows) -> None:
        """Take rows that were appended to the log after the last `load` or `take_in`."""
        rows = self._inside(rows)
        least = self.next_number()
        for row in np.flatnonzero(rows.dead).tolist():
            number = rows.number(row)
            if least is not None and number >= least:  # most tombstones are of delivered tickets
                self._remove(number)
            self._taken.pop(number, None)  # its delivery is committed
        live = rows.live() if rows.dead.any() else rows
        # In slices, so that the bound holds for a chunk of any size.
        size = min(HEAP_MAX, self._loaded_max)
        for at in range(0, len(live), size):
            part = self._inside(live.where(slice(at, at + size)))
            if len(self) + len(part) > 2 * self._loaded_max:
                self._merge()
                self._rows = Rows.joined((self._cut(self._rows, self._loaded_max),))
                self._count = len(self._rows)
                part = self._inside(part)
            elif len(self._later) > max(HEAP_MAX, len(self) // 8):
                self._merge()
            for row, offset in enumerate(part.offset.tolist()):
                self._arrive(part.number(row), offset)

    def _arrive(self, number: int, offset: int) -> None:
        if number not in self._later:
            heapq.heappush(self._heap, number)
        self._later[number] = offset

    def _merge(self) -> None:
        """Move the tickets of the heap into the arrays."""
        later = Rows.of((number, offset, False) for number, offset in self._later.items())
        left = self._rows.where(slice(self._at, None))
        rows = Rows.joined((left.where(left.offset >= 0), later)).live()
        self._rows, self._at, self._count = rows, 0, len(rows)
        self._later, self._heap = {}, []

    # ---- handing out ----

    def next_number(self) -> int | None:
        """Return the least id in memory, or None if there is none."""
        offsets = self._rows.offset
        while self._at < len(offsets) and offsets[self._at] < 0:
            self._at += 1
        while self._heap and self._heap[0] not in self._later:
            heapq.heappop(self._heap)
        sorted_one = self._rows.number(self._at) if self._at < len(offsets) else None
        if not self._heap:
            return sorted_one
        return self._heap[0] if sorted_one is None else min(sorted_one, self._heap[0])

    def next_due_ms(self) -> int | None:
        """Return the first due time in memory, or that of the window's end if there is none."""
        number = self.next_number()
        if number is None:
            return None if self.end >= EVERYTHING else self.end >> 64
        return number >> 64

    def take(self, now_ms: int, limit: int) -> list[tuple[int, int]]:
        """Hand out at most `limit` tickets that are due, as (id, offset), in the order of ids.

        They count as taken until `settle` or `give_back`.
        """
        taken: list[tuple[int, int]] = []
        while len(taken) < limit:
            number = self.next_number()
            if number is None or number >> 64 > now_ms:
                break
            taken.append((number, self._remove_next(number)))
            self.highest = max(self.highest, number)
        self._taken.update(taken)
        return taken

    def _remove_next(self, number: int) -> int:
        """Remove the least id; return its offset."""
        if self._heap and self._heap[0] == number:
            heapq.heappop(self._heap)
            return self._later.pop(number)
        offset = int(self._rows.offset[self._at])
        self._at += 1
        self._count -= 1
        return offset

    def settle(self, numbers: Iterable[int]) -> None:
        """Forget tickets that were taken: they are delivered."""
        for number in numbers:
            self._taken.pop(number, None)

    def give_back(self, numbers: Iterable[int]) -> None:
        """Take tickets back that were taken and not delivered."""
        for number in numbers:
            offset = self._taken.pop(number, None)
            if offset is None:
                continue
            if number < self.end:
                self._arrive(number, offset)
            else:
                self.skip(generation_of(number), offset)  # a load reads it again

    def give_back_all(self) -> None:
        """Take back all tickets that are taken: nothing is being delivered."""
        self.give_back([*self._taken])

    def adopt(self, other: Agenda) -> None:
        """Take over what another agenda has handed out, before the first load."""
        self._taken, self.highest = dict(other._taken), other.highest

    def cancel(self, number: int) -> bool | None:
        """Remove a ticket and return True; return False if it is not live.

        Return None if the agenda does not know.  If the id is after `highest` and is not due, it
        was never handed out: a tombstone can be appended at once.  Otherwise search the log.
        """
        if number in self._taken:
            return False
        return self._remove(number) if number < self.end else None

    def find(self, number: int) -> int | None:
        """Return the offset of a ticket that is in memory, also if it is taken; else None."""
        offset = self._taken.get(number, self._later.get(number))
        if offset is None:
            row = self._row(number)
            offset = None if row is None else int(self._rows.offset[row])
        return offset

    def _remove(self, number: int) -> bool:
        if self._later.pop(number, None) is not None:  # its id in the heap is skipped later
            return True
        row = self._row(number)
        if row is None:
            return False
        self._rows.offset[row] = -1
        self._count -= 1
        return True

    def _row(self, number: int) -> int | None:
        """Return the row of an id that is in the arrays and not cancelled, or None."""
        due, serial = np.uint64(number >> 64), np.uint64(number & LOW)
        rows = self._rows
        low = int(np.searchsorted(rows.due, due, "left"))
        high = int(np.searchsorted(rows.due, due, "right"))
        row = low + int(np.searchsorted(rows.serial[low:high], serial))
        found = row < high and rows.serial[row] == serial and row >= self._at
        return row if found and rows.offset[row] >= 0 else None

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield (id, offset) of all tickets in memory that are not taken, in the order of ids."""
        offsets = self._rows.offset.tolist()
        rows = (
            (self._rows.number(row), offset)
            for row, offset in enumerate(offsets)
            if row >= self._at and offset >= 0
        )
        return heapq.merge(rows, sorted(self._later.items()))

    # ---- reclaiming ----

    def first_live(self, generation: int) -> int | None:
        """Return the least offset of a generation that a live ticket may have, or None if none has.

        Tickets after the window count as live, because their tombstones are not known.
        """
        left = self._rows.where(slice(self._at, None))
        left = left.where((left.offset >= 0) & (left.generations() == generation))
        offsets = [self._beyond[generation], int(left.offset.min(initial=NEVER))]
        for held in (self._later, self._taken):
            offsets += [
                offset for number, offset in held.items() if generation_of(number) == generation
            ]
        least = min(offsets)
        return None if least == NEVER else least
