"""Every use of the wall clock is listed here with its purpose, and no purpose is to forget.

What is old enough to be deleted, expired or answered as unknown is decided with
`GuardedClock.now_ms`, which does not follow a clock that leaps.  A use that is not in the list
fails: take the guarded time, or add the use with what it does.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import logstore

ROOT = Path(logstore.__file__).parent
CONNECTOR = ROOT.parent / "spark_connector" / "pyspark_logstore"
WALL_TIMES = {"time_ms", "_time_ms", "_ask_time", "ask_time", "time_ns", "utcnow", "today"}

# What a use of the wall clock may be for.
STAMP = "writes the time of an event"
LIMIT = "refuses records whose own time is too far off"
SHOW = "shows ages and lags"
FIND = "finds the place in a log that a person gave as an age"
CADENCE = "decides how often to look; a guarded time decides what is forgotten"
PASS = "hands the clock on"
GUARD = "is the guard"

# Function -> (number of uses, purpose).
ALLOWED = {
    "checked_offsets": (1, STAMP),
    "_refuse_records": (1, LIMIT),
    "append_plain": (2, LIMIT),
    "list_transactions": (1, SHOW),
    "RawAppender._append_raw_locked": (2, STAMP),
    "Appender._batches": (1, PASS),
    "Appender._apply": (1, PASS),
    "ActiveLog.time_of_append": (1, STAMP),
    "Appender._write_locked": (2, STAMP),
    "RawAppender.append_batch": (1, LIMIT),
    "RawAppender._end_transaction_locked": (1, STAMP),
    "Appender.writer": (1, PASS),
    "Committer._check": (1, LIMIT),
    "Consumer.lag": (1, SHOW),
    "DedupeWindows.once": (1, STAMP),
    "DedupeWindows.time_ms": (1, STAMP),
    "Follow._last_time": (1, SHOW),
    "Follow._row": (1, SHOW),
    "Follow._take": (1, SHOW),
    "GroupCoordinator.delete_group": (1, STAMP),
    "GroupEffects._run_turns": (1, STAMP),
    "GroupEffects._stored": (1, STAMP),
    "GroupEffects.lose": (1, STAMP),
    "GroupRooms._act_now": (1, STAMP),
    "GroupRooms._expired": (1, STAMP),
    "GroupRooms._load_room": (2, STAMP),
    "GroupRooms.close": (1, STAMP),
    "Groups.commit": (1, STAMP),
    "Groups.lag": (1, SHOW),
    "Scheduler._delayed": (1, STAMP),
    "Groups.reset_offsets": (1, FIND),
    "GuardedClock.__init__": (1, GUARD),
    "GuardedClock.now_ms": (1, GUARD),
    "Lane.__new__": (1, PASS),
    "wall_ms": (1, STAMP),
    "Maintenance._attempt": (1, STAMP),
    "OffsetBook._records": (1, STAMP),
    "OffsetBook.delete_group": (1, STAMP),
    "OffsetBook.delete_offsets": (1, STAMP),
    "OffsetBook.write_consumer_group": (1, STAMP),
    "OffsetBook.write_group": (1, STAMP),
    "ProducerIds._read": (2, STAMP),
    "Producers.__init__": (1, PASS),
    "Producers.admit": (1, CADENCE),
    "ShareGroups._open": (1, STAMP),
    "ShareGroups._snapshot": (1, STAMP),
    "ShareGroups.deadline_ms": (1, STAMP),
    "SourceOptions.parse": (1, FIND),
    "Store.__init__": (1, PASS),
    "TopicTable.refresh": (1, CADENCE),
    "SystemClock.time_ms": (1, PASS),
    "Transactions._begin_request.ask": (1, STAMP),
    "Transactions._finish.abort": (1, STAMP),
    "TransactionDriver._done": (1, STAMP),
    "TransactionDriver._time_out": (1, STAMP),
    "ActiveLog.__init__": (1, PASS),
    "ActiveLog._prepare": (1, STAMP),
    "Receipt.__init__": (1, STAMP),
    "_clock": (1, SHOW),
    "_moment": (1, FIND),
    "_row": (1, SHOW),
    "_store": (1, SHOW),
    "_topic": (1, SHOW),
    "parse_time": (1, FIND),
    "RequestLog.write": (1, "the time of a line in the request log"),
    "show_verb": (1, SHOW),
    "ZooKeeperMetadata.start": (1, STAMP),
}


class Uses(ast.NodeVisitor):
    """The qualified names of the functions that use the wall clock, once for each use."""

    def __init__(self) -> None:
        self.scope: list[str] = []
        self.found: Counter[str] = Counter()

    def visit_scope(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.scope.append(node.name)
        self.generic_visit(node)
        self.scope.pop()

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = visit_scope

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = ast.unparse(node.value)
        named = (owner, node.attr) == ("time", "time") or (
            node.attr == "now" and owner in ("datetime", "datetime.datetime")
        )
        if (named or node.attr in WALL_TIMES) and isinstance(node.ctx, ast.Load):
            self.found[".".join(self.scope)] += 1
        self.generic_visit(node)


def uses_of(source: str) -> Counter[str]:
    uses = Uses()
    uses.visit(ast.parse(source))
    return uses.found


def sources() -> Iterator[Path]:
    for root in (ROOT, CONNECTOR):
        yield from (path for path in sorted(root.rglob("*.py")) if "testing" not in path.parts)


def test_every_use_of_the_wall_clock_has_a_purpose_and_none_is_to_forget() -> None:
    found: Counter[str] = Counter()
    for path in sources():
        found += uses_of(path.read_text())
    allowed = {name: count for name, (count, _) in ALLOWED.items()}
    assert dict(found) == allowed, (
        "a decision that forgets takes GuardedClock.now_ms(); any other use is listed in ALLOWED"
    )


def test_a_new_use_is_found_whatever_it_is_called() -> None:
    found = uses_of(
        "class A:\n"
        "    def expire(self):\n"
        "        now = self.clock.time_ms()\n"
        "        then = time.time() + time.time_ns()\n"
        "        ask = self._time_ms\n"
        "        return datetime.datetime.now(datetime.UTC)\n"
    )
    assert found == {"A.expire": 5}
