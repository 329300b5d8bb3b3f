"""EmbeddedTree: the suite of all metadata trees in memory and in a file, and the file itself."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from logstore.errors import ClosedError, CorruptMetadataError, LockedError
from logstore.replication.embedded import EmbeddedMetadata, EmbeddedTree
from logstore.replication.metadata import Committed, Create, Delete, Outcome, Set, Unknown
from logstore.testing import KINDS, Crash, Fault, explore, inject_io, record_io
from tests.campaign import sized
from tests.replication.metadata_suite import MetadataSuite, Seat


class EmbeddedWorld:
    def __init__(self, tree: EmbeddedTree) -> None:
        self.tree = tree

    def session(self) -> EmbeddedMetadata:
        return self.tree.session()

    def expire(self, session: EmbeddedMetadata) -> None:
        session.expire()

    def until(self, holds: Callable[[], object]) -> None:
        end = time.monotonic() + 30
        while not holds():
            assert time.monotonic() < end, "not in time"
            time.sleep(0.001)


class TestInMemory(MetadataSuite):
    @pytest.fixture
    def world(self) -> Iterator[EmbeddedWorld]:  # type: ignore[override]
        with EmbeddedTree() as tree:
            yield EmbeddedWorld(tree)


class TestInAFile(MetadataSuite):
    @pytest.fixture
    def world(self, tmp_path: Path) -> Iterator[EmbeddedWorld]:  # type: ignore[override]
        with EmbeddedTree(tmp_path / "cluster") as tree:
            yield EmbeddedWorld(tree)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[EmbeddedTree]:
    with EmbeddedTree(tmp_path) as opened:
        yield opened


def seat_of(tree: EmbeddedTree) -> Seat:
    return Seat(EmbeddedWorld(tree), ("/",))


def test_what_was_committed_is_there_after_a_restart(tmp_path: Path) -> None:
    with EmbeddedTree(tmp_path) as tree:
        seat = seat_of(tree)
        seat.done(Create("/a/b", b"\xff\x00"), Create("/a-b", b"x"), Create("/a/e", b"", True))
        seat.done(Set("/a/b", b"\xfe\xf0\x9f\x98\x80", 0))
        seat.done(Create("/gone", b""), Delete("/gone"))
    with EmbeddedTree(tmp_path) as tree:
        seat = seat_of(tree)
        assert seat.read("/a/b") == (b"\xfe\xf0\x9f\x98\x80", 1)
        assert seat.read("/a-b") == (b"x", 0)
        assert seat.session.children("/") == ["a", "a-b"]
        assert seat.session.children("/a") == ["b"]  # an ephemeral path ends with its process
        assert seat.done(Set("/a/b", b"", 1)) == (2,)
    assert sorted(os.listdir(tmp_path)) == ["logstore.cluster", "logstore.cluster.lock"]


def test_many_commits_share_one_write(tmp_path: Path, tree: EmbeddedTree) -> None:
    seat = seat_of(tree)
    seat.done(Create("/n", b""))
    answers: list[Outcome] = []
    with inject_io(Fault.delay(0.01, "rename", forever=True), root=tmp_path) as injected:
        for version in range(200):
            seat.session.commit([Set("/n", b"", version)], answers.append)
        seat.sync()
    assert answers == [Committed((version + 1,)) for version in range(200)]
    assert sum(call.kind == "rename" for call in injected.calls) < 100


def test_ephemeral_paths_are_not_written(tmp_path: Path, tree: EmbeddedTree) -> None:
    seat = seat_of(tree)
    seat.done(Create("/ids/kept", b""))
    before = (tmp_path / "logstore.cluster").stat()
    seat.done(Create("/ids/1", b"x", True))
    seat.done(Set("/ids/1", b"y", 0))
    seat.session.close()
    assert (tmp_path / "logstore.cluster").stat().st_ino == before.st_ino


def test_two_trees_exclude_each_other(tmp_path: Path, tree: EmbeddedTree) -> None:
    with pytest.raises(LockedError, match=r"logstore\.cluster\.lock"):
        EmbeddedTree(tmp_path)
    code = (
        "import sys\nfrom logstore.replication.embedded import EmbeddedTree\n"
        "from logstore.errors import LockedError\n"
        "try:\n    EmbeddedTree(sys.argv[1])\n"
        "except LockedError as error:\n    print(error.pid)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=60
    )
    assert ended.stdout == f"{os.getpid()}\n", ended.stderr
    tree.close()
    EmbeddedTree(tmp_path).close()


def test_a_closed_tree_refuses_new_work(tmp_path: Path) -> None:
    tree = EmbeddedTree(tmp_path)
    seat, idle = seat_of(tree), tree.session()
    answers: list[Outcome] = []
    for number in range(20):
        seat.session.commit([Create(f"/{number}", b"")], answers.append)
    tree.close()
    tree.close()
    assert answers == [Committed((0,))] * 20
    assert seat.moved == ["lost"]
    with pytest.raises(ClosedError):
        seat.session.commit([Create("/late", b"")], answers.append)
    with pytest.raises(ClosedError):
        idle.start((), lambda path: None, lambda state: None)
    seat.session.close()


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    with EmbeddedTree(tmp_path) as tree:
        seat_of(tree).done(Create("/a", b"0"), Set("/a", b"1", 0), Create("/b", b"2"))
    path = tmp_path / "logstore.cluster"
    whole = path.read_bytes()
    for position in range(len(whole) - 1):  # the newline at the end is not needed
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            if bytes(damaged).lower() == whole:
                continue  # a digit of the checksum in upper case is the same digit
            path.write_bytes(damaged)
            with pytest.raises(CorruptMetadataError) as caught:
                EmbeddedTree(tmp_path)
            assert caught.value.path == str(path)
    for length in range(len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptMetadataError, match="is damaged"):
            EmbeddedTree(tmp_path)
    path.write_bytes(whole)
    EmbeddedTree(tmp_path).close()


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    from logstore.files.small_file import with_checksum

    body = json.dumps({"format": 2, "nodes": {}}).encode()
    (tmp_path / "logstore.cluster").write_bytes(with_checksum(body))
    with pytest.raises(CorruptMetadataError, match="the format is 2, not 1"):
        EmbeddedTree(tmp_path)


def test_a_commit_whose_write_fails_is_unknown_and_may_be_repeated(tmp_path: Path) -> None:
    def count_calls() -> int:
        with EmbeddedTree(tmp_path / "counted") as tree:
            seat = seat_of(tree)
            with inject_io() as counted:
                seat.done(Create("/n", b"first"))
            return sum(call.kind != "close" for call in counted.calls)

    for number in range(count_calls()):
        path = tmp_path / str(number)
        with EmbeddedTree(path) as tree:
            seat, leaving = seat_of(tree), seat_of(tree)
            seat.done(Create("/n", b"first"))
            leaving.done(Create("/e", b"", True))
            # A close that is not performed would only leave a descriptor open.
            kinds = [kind for kind in KINDS if kind != "close"]
            with inject_io(Fault.fail(errno.EIO, kinds, call=number + 1)) as injected:
                outcome = seat.commit(Set("/n", b"second", 0))
                assert outcome in (Unknown(), Committed((1,)))
                assert injected.fired == 1
            if outcome == Unknown():
                assert seat.read("/n") == (b"first", 0)
                assert seat.done(Set("/n", b"second", 0)) == (1,)
            leaving.session.close()
            assert seat.read("/e") is None
        with EmbeddedTree(path) as tree:
            assert seat_of(tree).read("/n") == (b"second", 1)


def test_a_session_ends_on_a_disk_that_takes_no_writes(tmp_path: Path, tree: EmbeddedTree) -> None:
    seat, other = seat_of(tree), seat_of(tree)
    other.done(Create("/ids/1", b"", True))
    outcomes: list[Outcome] = []
    with inject_io(Fault.fail(errno.ENOSPC, "pwrite", forever=True)):
        seat.session.commit([Create("/x", b"")], outcomes.append)
        other.session.close()
        assert seat.commit(Create("/y", b"")) == Unknown()
    assert outcomes == [Unknown()]
    assert seat.session.children("/ids") == []
    assert seat.changed[-1] == "/ids/1"
    assert seat.done(Create("/x", b"")) == (0,)


@pytest.mark.parametrize("synced", [True, False])
def test_a_crash_at_any_call_keeps_what_was_acknowledged(tmp_path: Path, synced: bool) -> None:
    """Without its syncs the tree must fail here: else this test would prove nothing."""
    faults = [] if synced else [Fault.pretend(("sync", "datasync"))]
    with record_io(tmp_path, *faults) as trace, EmbeddedTree(tmp_path) as tree:
        seat = seat_of(tree)
        seat.done(Create("/n", b"0"))
        trace.mark(0)
        for version in range(4):
            data = b"%d" % (version + 1) * 50 * (4 - version)  # the file grows and shrinks
            seat.done(Set("/n", data, version), Create(f"/{version}", b""))
            trace.mark(version + 1)

    def recover(path: str, crash: Crash) -> tuple[int, list[str]]:
        with EmbeddedTree(path) as tree:
            seat = seat_of(tree)
            found = seat.read("/n")
            return -1 if found is None else found[1], seat.session.children("/")

    def judge(found: tuple[int, list[str]], crash: Crash) -> None:
        version, names = found
        acknowledged = max(crash.marks, default=-1)
        assert acknowledged <= version <= acknowledged + 1
        assert names == [*(str(each) for each in range(version)), *(["n"] if version >= 0 else [])]

    explored = explore(trace, recover, judge)
    if synced:
        assert not explored.violations, explored
        assert explored.distinct > 50
    else:
        assert explored.violations


@pytest.mark.campaign
def test_kills_lose_no_acknowledged_commit(tmp_path: Path) -> None:
    code = (
        "import sys, threading\n"
        "from logstore.replication.embedded import EmbeddedTree\n"
        "from logstore.replication.metadata import Create, Set\n"
        "session = EmbeddedTree(sys.argv[1]).session()\n"
        "session.start(('/',), lambda path: None, lambda state: None)\n"
        "if session.read('/n') is None:\n"
        "    session.commit([Create('/n', b'0')], lambda outcome: None)\n"
        "def add(version):\n"
        "    def done(outcome):\n"
        "        print(outcome.versions[0], flush=True)\n"
        "        add(outcome.versions[0])\n"
        "    session.commit([Set('/n', b'%d' % (version + 1), version)], done)\n"
        "session.sync(lambda: add(session.read('/n')[1]))\n"
        "threading.Event().wait()\n"
    )
    last = 0
    for kill in range(sized(5, 50, 500)):
        process = subprocess.Popen(
            [sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(3 + kill % 7):
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split("\n")
        process.stdout.close()
        process.wait()
        last = max([last, *(int(each) for each in rest[:-1] if each)])
        with EmbeddedTree(tmp_path) as tree:
            found = seat_of(tree).read("/n")
            assert found is not None
            assert int(found[0]) == found[1]
            assert found[1] in (last, last + 1)
            last = found[1]
