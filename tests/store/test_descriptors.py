"""Fewer descriptors than the partitions of a store need: idle partitions are closed for others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import logstore
from tests.kit import kill

FEW = """
import json, os, resource, sys
import logstore

path, topics = sys.argv[1], [f"t{i}" for i in range(60)]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

def append(store):
    for name in topics:
        store[name][0].append(name.encode())

def count(store):
    return sum(len(list(store[name][0].scan())) for name in topics)

result = {}
"""


def with_few_descriptors(path: Path, program: str) -> dict[str, int]:
    """Run a program that may open 64 files; what it leaves in `result`."""
    command = [sys.executable, "-W", "error", "-c", FEW + program + "\nprint(json.dumps(result))"]
    done = subprocess.run(
        [*command, str(path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_sixty_topics_are_written_closed_and_opened_with_64_descriptors(tmp_path: Path) -> None:
    program = """
with logstore.open(path) as store:
    for name in topics:
        store.create_topic(name)
    append(store)
    append(store)
    result["written"] = count(store)
with logstore.open(path) as store:
    result["clean"] = store.recovery.clean
    append(store)
with logstore.open(path, readonly=True) as store:
    result["read"] = count(store)
"""
    found = with_few_descriptors(tmp_path / "store", program)
    assert found == {"written": 120, "clean": True, "read": 180}
    with logstore.open(tmp_path / "store", readonly=True) as store:
        assert store.check() == []


def test_a_store_is_recovered_with_64_descriptors(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = logstore.open(path)
    for number in range(60):
        store.create_topic(f"t{number}")[0].append(b"x")
    kill(store)
    program = """
with logstore.open(path) as store:
    result["clean"], result["failed"] = store.recovery.clean, len(store.recovery.failed)
    append(store)
    result["written"] = count(store)
"""
    assert with_few_descriptors(path, program) == {"clean": False, "failed": 0, "written": 120}


def test_a_partition_that_is_in_use_is_not_closed_for_others(tmp_path: Path) -> None:
    program = """
store = logstore.open(path)
for name in topics:
    store.create_topic(name)
held = []
try:
    for name in topics:
        held.append(store[name][0])
        held[-1].append(b"x")
except OSError as error:
    result["errno"] = error.errno
assert not any(log.closed for log in held)
store.close()
with logstore.open(path) as store:
    result["clean"] = store.recovery.clean
"""
    assert with_few_descriptors(tmp_path / "store", program) == {"errno": 24, "clean": True}
