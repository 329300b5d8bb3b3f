"""Ticket: the identity of a delayed record; DelayedRecord: the record while it waits.

An id has 16 bytes: 8 of the due time in milliseconds, 4 of the scheduler's run, 4 of a counter.
The two highest bits of the counter are the generation, inverted: a record with a longer delay was
scheduled earlier than another with the same due time.  So ids are sorted by due time, then by
scheduling, and an id alone names the partition of its record.

The text of an id is base32hex, whose letters are in the order of ASCII: sorted texts are sorted
ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from logstore.record import Record
from logstore.work_errors import UnknownTicketError

__all__ = [
    "DelayedRecord",
    "Ticket",
    "generation_for",
    "generation_of",
    "number_of",
    "ticket_number",
    "tombstone",
]

ID_BYTES: Final = 16
GENERATIONS: Final = 3
COUNTER_BITS: Final = 30
COUNTER_MAX: Final = (1 << COUNTER_BITS) - 1
HOUR_MS: Final = 3_600_000
DAY_MS: Final = 86_400_000

DIGITS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUV"
PAIRS: Final = tuple(first + second for first in DIGITS for second in DIGITS)

# Headers of a record that waits.  A delivered record has `DUE` and `ID`.
PREFIX: Final = "logstore.delay."
TOPIC: Final = f"{PREFIX}topic"
KEY: Final = f"{PREFIX}key"
PARTITION: Final = f"{PREFIX}partition"
TIME: Final = f"{PREFIX}time"
NULL: Final = f"{PREFIX}null"
DUE: Final = f"{PREFIX}due"
ID: Final = f"{PREFIX}id"
REASON: Final = f"{PREFIX}reason"


def generation_of(number: int) -> int:
    """Return the partition that holds the record of an id."""
    # Ids that we made have 0 to 2 there; a foreign one must not name a partition that is not there.
    return max(0, 2 - (number >> COUNTER_BITS & 3))


def generation_for(delay_ms: int) -> int:
    """Return the generation of a delay: 0 within an hour, 1 within a day, 2 beyond."""
    return (delay_ms > HOUR_MS) + (delay_ms > DAY_MS)


def ticket_number(due_ms: int, run: int, counter: int, generation: int) -> int:
    """Return an id as a number."""
    return due_ms << 64 | run << 32 | (2 - generation) << COUNTER_BITS | counter


@dataclass(frozen=True, slots=True, order=True, repr=False)
class Ticket:
    """The identity of a delayed record.  Tickets are ordered by due time, then by scheduling."""

    number: int
    topic: str = ""  # the target; "" if the ticket was made from its id alone

    @property
    def id(self) -> str:
        """Return the id as text of 26 characters."""
        padded = self.number << 2  # 26 characters have 130 bits
        return "".join([PAIRS[padded >> shift & 1023] for shift in range(120, -1, -10)])

    @property
    def due_ms(self) -> int:
        """Return the time of delivery, in milliseconds since 1970."""
        return self.number >> 64

    @classmethod
    def parse(cls, text: str, topic: str = "") -> Ticket:
        """Return the ticket of an id.  Raises UnknownTicketError if the text is not an id."""
        if not re.fullmatch("[0-9A-V]{25}[048CGKOS]", text):
            raise UnknownTicketError(text)
        return cls(int(text, 32) >> 2, topic)  # the digits of base32hex are those of Python

    def __str__(self) -> str:
        return self.id

    def __repr__(self) -> str:
        return f"<Ticket {self.id} for {self.topic!r} at {self.due_ms} ms>"


def number_of(ticket: Ticket | str) -> int:
    """Return the number of a ticket, or of its id."""
    given: object = ticket
    if isinstance(given, str):
        return Ticket.parse(given).number
    if isinstance(given, Ticket):
        return given.number
    raise TypeError(f"a ticket is a Ticket or its id, not {given!r}")


@dataclass(frozen=True, slots=True)
class DelayedRecord:
    """A record that waits for its due time."""

    ticket: Ticket
    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    partition: int | None = None  # None: the topic's partitioner chooses when it is delivered
    scheduled_ms: int = 0

    @property
    def topic(self) -> str:
        """Return the target topic."""
        return self.ticket.topic

    @property
    def due_ms(self) -> int:
        """Return the time of delivery, in milliseconds since 1970."""
        return self.ticket.due_ms

    def encode(self) -> Record:
        """Return the record of the internal topic: its timestamp is the due time."""
        number = self.ticket.number
        headers: list[tuple[str, bytes | None]] = [(TOPIC, self.topic.encode())]
        if self.key is not None:
            headers.append((KEY, self.key))
        if self.partition is not None:
            headers.append((PARTITION, b"%d" % self.partition))
        if self.value is None:
            headers.append((NULL, None))  # a null value in the log is a tombstone of the ticket
        # Last of ours: the headers after it are the user's.
        headers.append((TIME, b"%d" % self.scheduled_ms))
        headers += self.headers
        return Record(
            self.value or b"", key=number.to_bytes(ID_BYTES), headers=headers,
            timestamp=number >> 64,
        )  # fmt: skip

    @classmethod
    def decode(cls, record: Record) -> DelayedRecord:
        """Return the delayed record that `encode` wrote."""
        names = [name for name, _ in record.headers]
        ours = names.index(TIME) + 1 if TIME in names else 0
        own = {name: value or b"" for name, value in record.headers[:ours]}
        partition = own.get(PARTITION)
        return cls(
            Ticket(int.from_bytes(record.key or b""), own.get(TOPIC, b"").decode()),
            None if NULL in own else record.value,
            own.get(KEY),
            record.headers[ours:],
            None if partition is None else int(partition),
            int(own.get(TIME, b"0")),
        )

    def delivered_headers(self, *more: tuple[str, bytes]) -> Iterable[tuple[str, bytes | None]]:
        """Return the headers of the delivered record."""
        return *self.headers, (DUE, b"%d" % self.due_ms), (ID, self.ticket.id.encode()), *more


def tombstone(number: int) -> Record:
    """Return the record that ends a ticket; it has the timestamp of the ticket's record."""
    return Record(None, key=number.to_bytes(ID_BYTES), timestamp=number >> 64)
