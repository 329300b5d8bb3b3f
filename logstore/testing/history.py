"""History: does what the clients of a log were told fit together?

`check` takes the operations of producers and consumers and finds what a log must never show, under
the names that Jepsen's Kafka tests gave to it:

``lost-write``             acknowledged, and a reader that came past it did not get it
``duplicate``              sent once, and at two offsets
``inconsistent-offsets``   two values at one offset
``poll-skip``              from one poll to the next, a consumer left out a value that was there
``nonmonotonic-poll``      from one poll to the next, it went back
``int-poll-skip``          the same two, inside of one operation
``int-nonmonotonic-poll``
``nonmonotonic-send``      a later send of a process got a lower offset
``int-nonmonotonic-send``  the same inside of one operation
``int-send-skip``          a value of someone else between two of one operation
``G1a``                    a read of what was aborted, or provably never written
``precommitted-read``      a committed reader saw a transaction before its commit was asked for
``unseen``                 acknowledged, and nobody has read it when all had caught up
``G0``, ``G1c``            operations that come before themselves, by writes; by writes and reads

and these of our own:

``exactly-once-copy``      a value of the source that is not just once in the copy
``commit-regression``      a group's offset went back without being told to
``two-owners``             two consumers with one partition in one generation
``torn-transaction``       a part of a transaction is there, a part is not
``end-regression``         a partition was seen to end earlier than before

Transactions of a log may be interleaved: ``int-send-skip`` and ``G0`` are then normal, and with
``G1c`` they are looked for only when asked.

The check believes nothing but the history: it needs no log, no files and no time.  It is sound (a
finding is a contradiction of the rules above), and it finds what the reads of the history show: a
record that nobody tried to read can be gone without a trace, which is why a test ends with a
`Snapshot`.  Compaction is not modelled; what retention removed lies below a snapshot's ``start``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from logstore.testing.history_checks import CHECKS, Checker
from logstore.testing.history_copies import check_copy
from logstore.testing.history_findings import Copy, Finding, HistoryViolation
from logstore.testing.operations import (
    Act,
    Assign,
    Commit,
    Committed,
    End,
    Event,
    History,
    MalformedHistoryError,
    Operation,
    Pending,
    Poll,
    Read,
    Recorder,
    Seek,
    Send,
    Snapshot,
    reads_of,
)

__all__ = [
    "ALL_KINDS",
    "DEFAULT_KINDS",
    "Act",
    "Assign",
    "Commit",
    "Committed",
    "End",
    "Event",
    "History",
    "MalformedHistoryError",
    "Operation",
    "Pending",
    "Poll",
    "Read",
    "Recorder",
    "Seek",
    "Send",
    "Snapshot",
    "assert_clean",
    "check",
    "reads_of",
]

ALL_KINDS = (
    *("lost-write", "duplicate", "inconsistent-offsets"),
    *("poll-skip", "nonmonotonic-poll", "int-poll-skip", "int-nonmonotonic-poll"),
    *("nonmonotonic-send", "int-nonmonotonic-send", "int-send-skip"),
    *("G1a", "precommitted-read", "unseen", "G0", "G1c"),
    *("exactly-once-copy", "commit-regression", "two-owners"),
    *("torn-transaction", "end-regression"),
)
# Writes of transactions may be interleaved, so that these three happen in a sound log.
DEFAULT_KINDS = tuple(kind for kind in ALL_KINDS if kind not in ("int-send-skip", "G0", "G1c"))


def check(
    history: History | Iterable[Event],
    *,
    kinds: Collection[str] = DEFAULT_KINDS,
    caught_up: bool = False,
    copies: Iterable[Copy] = (),
) -> list[Finding]:
    """Everything of these kinds that the history shows; empty when it fits together.

    `caught_up` claims that every consumer was given the time to read to the end.
    """
    unknown = [kind for kind in kinds if kind not in ALL_KINDS]
    if unknown:
        raise ValueError(f"no such kind: {', '.join(unknown)}; there are {', '.join(ALL_KINDS)}")
    if not isinstance(history, History):
        history = History(history)
    checker = Checker(history, caught_up)
    wanted = set(kinds)
    found: list[Finding] = []
    for names, look in CHECKS:
        if not wanted.isdisjoint(names):
            found += [finding for finding in look(checker) if finding.kind in wanted]
    if "exactly-once-copy" in wanted:
        for copy in copies:
            found += check_copy(checker, copy)
    return found


def assert_clean(
    history: History | Iterable[Event],
    *,
    kinds: Collection[str] = DEFAULT_KINDS,
    caught_up: bool = False,
    copies: Iterable[Copy] = (),
) -> None:
    """Raise HistoryViolation unless `check` finds nothing."""
    findings = check(history, kinds=kinds, caught_up=caught_up, copies=copies)
    if findings:
        raise HistoryViolation(findings)


# ---- what the history says of one partition ----
