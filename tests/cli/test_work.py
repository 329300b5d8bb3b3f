"""`logstore work`: a command for each record."""

from __future__ import annotations

import sys
from pathlib import Path

import logstore
from logstore import Record
from tests.cli.conftest import Command
from tests.kit import committed

# Fails at the first attempt of the value "b"; prints the fields of the record.
PROGRAM = """
import os, sys
value = sys.stdin.read()
if value == "b" and os.environ["LOGSTORE_ATTEMPT"] == "1":
    sys.exit(75)
print(value, *(os.environ["LOGSTORE_" + name] for name in ("KEY", "OFFSET", "HEADER_TRACE_ID")))
"""


def test_a_command_runs_for_each_record_and_its_lines_are_appended(
    command: Command, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with logstore.open(command.store) as store:
        store.create_topic("jobs", partitions=1)
        store.create_topic("results", partitions=1)
        store["jobs"][0].extend(
            [Record(v, key=b"k", headers=[("trace-id", b"7")]) for v in (b"a", b"b", b"c")]
        )
    work = ("work", "jobs", "--group", "g", "--to", "results", "--idle", 0, "--timeout", "1m")
    done = command(*work, "--", sys.executable, program)
    assert "3 done, 0 skipped, 1 failed" in done.text
    with logstore.open(command.store, readonly=True) as store:
        assert committed(store["results"][0]) == [b"a k 0 7", b"b k 1 7", b"c k 2 7"]
    (row,) = command("group", "show", "g").rows
    assert (row["committed_offset"], row["progress"]) == (3, "0 open, 0 finished above")


def test_a_topic_that_does_not_exist_is_named(command: Command) -> None:
    command.fill(count=1)
    assert "order" in command("work", "order", "-g", "g", "--", "true", code=2).err
