"""History: check that the results which clients of a log saw are consistent.

`check` takes the operations of producers and consumers and finds anomalies, with the names of
Jepsen's Kafka tests:

``lost-write``             acknowledged, but a reader that read past its offset did not get it
``duplicate``              sent once, but at two offsets
``inconsistent-offsets``   two values at one offset
``poll-skip``              between two polls, a consumer skipped a value that exists
``nonmonotonic-poll``      between two polls, a consumer moved back
``int-poll-skip``          the same two, within one operation
``int-nonmonotonic-poll``
``nonmonotonic-send``      a later send of a process got a lower offset
``int-nonmonotonic-send``  the same within one operation
``int-send-skip``          a value of another process between two of one operation
``G1a``                    a read of a value that was aborted or provably never written
``precommitted-read``      a read_committed reader saw a transaction before its commit began
``unseen``                 acknowledged, but never read although all consumers caught up
``G0``, ``G1c``            a cycle of operations, by writes; by writes and reads

and these of our own:

``exactly-once-copy``      a value of the source is not exactly once in the copy
``commit-regression``      a group's committed offset moved back without a reset
``two-owners``             two consumers own one partition in one generation
``torn-transaction``       only a part of a transaction is in the log
``end-regression``         the end of a partition moved back

Transactions of a log may be interleaved, so ``int-send-skip`` and ``G0`` are normal then.  They and
``G1c`` are checked only on request.

The check uses only the history: no log, no files, no clock.  It has no false positives: a finding
is a contradiction of the rules above.  It cannot find the loss of a record that no operation tried
to read, so a test should end with a `Snapshot`.  Compaction is not modelled.  Records that
retention removed are below a snapshot's ``start``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from logstore.testing.history_checks import CHECKS, Checker
from logstore.testing.history_copies import check_copy
from logstore.testing.history_findings import Copy, Finding, HistoryViolation
from logstore.testing.operations import Event, History

__all__ = ["ALL_KINDS", "DEFAULT_KINDS", "assert_clean", "check"]

ALL_KINDS = (
    *("lost-write", "duplicate", "inconsistent-offsets"),
    *("poll-skip", "nonmonotonic-poll", "int-poll-skip", "int-nonmonotonic-poll"),
    *("nonmonotonic-send", "int-nonmonotonic-send", "int-send-skip"),
    *("G1a", "precommitted-read", "unseen", "G0", "G1c"),
    *("exactly-once-copy", "commit-regression", "two-owners"),
    *("torn-transaction", "end-regression"),
)
# Writes of transactions may be interleaved, so a correct log can show these three.
DEFAULT_KINDS = tuple(kind for kind in ALL_KINDS if kind not in ("int-send-skip", "G0", "G1c"))


def check(
    history: History | Iterable[Event],
    *,
    kinds: Collection[str] = DEFAULT_KINDS,
    caught_up: bool = False,
    copies: Iterable[Copy] = (),
) -> list[Finding]:
    """Return the findings of these kinds; an empty list if the history is consistent.

    Set `caught_up` if every consumer has read to the end.
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


# ---- one partition ----
