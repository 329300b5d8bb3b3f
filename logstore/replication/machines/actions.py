"""Actions: what the machines of a replica ask its owner to do.

A machine has no I/O.  A method takes one event and returns a list of actions; the owner carries
them out in order, before it passes the next event of this partition to the machine.  `Sync` and
`Commit` only start then: their ends are events.  Answers are given without a lock.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from logstore.replication.metadata import Commit

__all__ = [
    "Action",
    "Answer",
    "Append",
    "AskOffsets",
    "BeginEpoch",
    "Notify",
    "Offline",
    "RestartAt",
    "Retry",
    "SetHighWatermark",
    "Sync",
    "Trim",
    "Truncate",
]


class BeginEpoch(NamedTuple):
    """Record that a leader epoch begins at the end of the log.  Durable before the next action."""

    epoch: int


class Append(NamedTuple):
    """Append a leader's batches as they are, if the log ends at `expect_end`.

    The event is `appended`, or `append_failed`.
    """

    raw: bytes
    expect_end: int


class Sync(NamedTuple):
    """Make the log durable up to `end`.  The event is `synced`, or `failed`."""

    end: int


class Truncate(NamedTuple):
    """Cut the log at `offset`; a batch that has it is cut whole.  The event is `truncated`.

    Leader epochs and producer state are cut too, even if no record is.
    """

    offset: int


class RestartAt(NamedTuple):
    """Delete all records and begin an empty log at `offset`.  The event is `restarted`."""

    offset: int


class Trim(NamedTuple):
    """Delete the records below `offset`."""

    offset: int


class SetHighWatermark(NamedTuple):
    """Show readers the records below `offset`."""

    offset: int


class AskOffsets(NamedTuple):
    """Ask the leader where its log starts and ends.  The event is `offsets`, with the token."""

    token: int
    leader: int
    leader_epoch: int


class Answer(NamedTuple):
    """End a wait: `code` is an error code of Kafka, 0 if the records are committed."""

    token: object
    code: int


class Notify(NamedTuple):
    """Wake the requests that wait for a change of this partition."""

    what: Literal["hw", "end", "role", "start"]


class Retry(NamedTuple):
    """Call the machine's `retry` after `delay_ms`."""

    delay_ms: int


class Offline(NamedTuple):
    """Stop using the log: it is damaged, or the disk failed."""

    reason: str


Action = (
    BeginEpoch
    | Append
    | Sync
    | Truncate
    | RestartAt
    | Trim
    | SetHighWatermark
    | AskOffsets
    | Answer
    | Notify
    | Retry
    | Offline
    | Commit
)
