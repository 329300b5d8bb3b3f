"""More than one process: the lock, readers of a log that is being written, fork, kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import logstore
from logstore import (
    ClosedError,
    ForkedHandleError,
    LockedError,
    Partition,
    PartitionConfig,
    ReadOnlyError,
)
from tests.conftest import MakeLog


def start(script: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), *map(str, args)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


# ---- the lock ----


def test_a_second_writer_is_refused_with_the_holder_named(log: Partition) -> None:
    with pytest.raises(LockedError, match="already open for writing in this process") as caught:
        Partition.open(log.path)
    assert caught.value.pid == os.getpid()
    assert caught.value.path == str(log.path / ".lock")
    log.append(b"still ours")


def test_another_process_is_refused_and_gets_in_when_we_are_gone(
    log: Partition, tmp_path: Path
) -> None:
    script = """
        import sys, logstore
        try:
            with logstore.Partition.open(sys.argv[1]) as log:
                print("opened", log.end_offset)
        except logstore.LockedError as error:
            print("locked", error.pid)
    """
    log.append(b"a")
    assert start(script, log.path).communicate()[0].split() == ["locked", str(os.getpid())]
    log.close()
    assert start(script, log.path).communicate()[0].split() == ["opened", "1"]


def test_a_killed_holder_does_not_keep_the_lock(tmp_path: Path) -> None:
    script = """
        import sys, time, logstore
        log = logstore.Partition.open(sys.argv[1])
        log.append(b"from the dead")
        print("ready", flush=True)
        time.sleep(60)
    """
    child = start(script, tmp_path / "orders-0")
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    with pytest.raises(LockedError):
        Partition.open(tmp_path / "orders-0")
    child.kill()
    child.communicate()
    with Partition.open(tmp_path / "orders-0") as log:
        assert [record.value for record in log] == [b"from the dead"]


def test_a_lock_on_the_whole_directory_keeps_partitions_out(tmp_path: Path) -> None:
    """A running broker holds .lock in its log directory with fcntl, as Java does."""
    script = """
        import fcntl, sys
        file = open(sys.argv[1], "w")
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print("ready", flush=True)
        sys.stdin.read()
    """
    broker = start(script, tmp_path / ".lock")
    assert broker.stdout is not None
    assert broker.stdout.readline() == "ready\n"
    with pytest.raises(LockedError, match=f"locked by process {broker.pid}"):
        Partition.open(tmp_path / "orders-0")
    broker.communicate("")
    with Partition.open(tmp_path / "orders-0"), Partition.open(tmp_path / "orders-1"):
        pass


# ---- readers of a log that another process writes ----


def test_a_reader_sees_appends_rolls_and_trims_of_a_writer(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=2048)
    reader = make_log(readonly=True, segment_bytes=2048)
    assert reader.end_offset == 0
    for i in range(100):
        log.append(b"%d" % i, key=b"x" * 100)
        assert reader.end_offset == i + 1
        assert reader[i].value == b"%d" % i
    assert len(reader.segments) == len(log.segments) > 3
    assert [record.value for record in reader] == [b"%d" % i for i in range(100)]
    log.trim(50)
    assert reader.start_offset == 50
    assert [record.offset for record in reader] == list(range(50, 100))
    log.truncate(80)
    log.append(b"new")
    assert reader.end_offset == 81
    assert reader[-1].value == b"new"
    assert reader.offset_for_time(0) == 50
    log.sync()
    assert reader.durable_offset == 81


def test_a_reader_changes_nothing_and_says_so(make_log: MakeLog) -> None:
    log = make_log()
    log.append(b"a")
    log.close()
    before = {
        path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in log.path.iterdir()
    }
    reader = make_log(readonly=True)
    assert [record.value for record in reader] == [b"a"]
    for attempt in (
        lambda: reader.append(b"b"),
        lambda: reader.extend([b"b"]),
        lambda: reader.writer(),
        lambda: reader.roll(),
        lambda: reader.trim(1),
        lambda: reader.truncate(0),
        lambda: reader.sync(),
    ):
        with pytest.raises(ReadOnlyError, match="readonly=True"):
            attempt()
    reader.close()
    after = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in log.path.iterdir()}
    assert before == after


def test_a_reader_of_a_crashed_log_leaves_the_torn_tail_out(make_log: MakeLog) -> None:
    log = make_log()
    log.extend([b"a", b"b"])
    log.close()
    segment = log.segments[0].path
    content = segment.read_bytes() + b"half a batch"
    segment.write_bytes(content)
    reader = make_log(readonly=True)
    assert [record.value for record in reader] == [b"a", b"b"]
    assert not reader.recovery.clean
    assert segment.read_bytes() == content


def test_a_following_process_sees_records_soon_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "orders-0"
    script = """
        import sys, time, logstore
        log = logstore.Partition.open(sys.argv[1], readonly=True)
        print("ready", flush=True)
        for record in log.scan(follow=True, timeout=60, max_records=300):
            sent = int(record.value[:20])
            print(record.offset, (time.time_ns() - sent) / 1e6, flush=True)
    """
    with Partition.open(path, durability="os", config={"segment.bytes": 20_000}) as log:
        child = start(script, path)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        for _ in range(300):
            log.append(b"%020d" % time.time_ns() + b"x" * 300)
            time.sleep(0.001)
        lines = [line.split() for line in child.communicate(timeout=120)[0].splitlines()]
    assert [int(offset) for offset, _ in lines] == list(range(300))


def test_readers_in_other_processes_see_only_whole_batches(tmp_path: Path) -> None:
    path = tmp_path / "orders-0"
    script = """
        import sys, time, logstore
        log = logstore.Partition.open(sys.argv[1], readonly=True)
        seen = 0
        while seen < 20000:
            records = list(log.scan(seen))
            assert [r.offset for r in records] == list(range(seen, seen + len(records)))
            assert all(r.value == b"%d" % r.offset * 20 for r in records)
            seen += len(records)
        print(seen)
    """
    with Partition.open(path, durability="os", config={"segment.bytes": 100_000}) as log:
        children = [start(script, path) for _ in range(2)]
        for first in range(0, 20_000, 50):
            log.extend([b"%d" % i * 20 for i in range(first, first + 50)])
        for child in children:
            assert child.communicate(timeout=60)[0] == "20000\n"


# ---- fork ----


def forked(act: object) -> str:
    """The name of what `act` raises in a forked child, or its result."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = repr(act())  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001
            answer = type(error).__name__
        os.write(send, answer.encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(pid, 0)
    return answer


def test_a_handle_used_after_fork_raises_with_the_remedy(log: Partition) -> None:
    log.extend([b"a", b"b"])
    iterator = iter(log.scan())
    next(iterator)
    out = log.writer(linger=None)
    for act in (
        lambda: log.append(b"x"),
        lambda: log.extend([b"x"]),
        lambda: log[0],
        lambda: list(log),
        lambda: log.end_offset,
        lambda: log.tail(1),
        lambda: log.sync(),
        lambda: out.append(b"x"),
    ):
        assert forked(act) == "ForkedHandleError"
    assert forked(log.close) == "None"
    assert issubclass(ForkedHandleError, ClosedError)
    out.close()
    assert log.append(b"c") == 2
    assert [record.value for record in log] == [b"a", b"b", b"c"]


def test_a_child_can_open_readonly_and_its_death_harms_nothing(log: Partition) -> None:
    log.extend([b"a", b"b"])

    def read() -> int:
        with Partition.open(log.path, readonly=True) as mine:
            return sum(1 for _ in mine)

    assert forked(read) == "2"
    assert log.append(b"c") == 2


@pytest.mark.parametrize("kind", ["partition", "store"])
def test_a_child_does_not_inherit_the_lock(tmp_path: Path, kind: str) -> None:
    """The parent is killed, so that nothing but its death frees the lock; its child lives on."""
    script = """
        import os, sys, time, logstore
        if sys.argv[2] == "partition":
            log = logstore.Partition.open(sys.argv[1] + "/orders-0")
        else:
            store = logstore.open(sys.argv[1])
            log = store.create_topic("orders")[0]
        log.append(b"a")
        if os.fork() == 0:
            print(os.getpid(), flush=True)
            sys.stdin.read()  # until the test closes it
            os._exit(0)
        time.sleep(60)
    """
    parent = start(script, tmp_path, kind)
    assert parent.stdin is not None and parent.stdout is not None
    child = int(parent.stdout.readline())
    with pytest.raises(LockedError):
        open_to_append(tmp_path, kind)
    parent.kill()
    parent.wait()
    try:
        assert open_to_append(tmp_path, kind) == 1
        os.kill(child, 0)  # it still runs
    finally:
        parent.stdin.close()
        assert parent.stdout.read() == "", "the child has ended"
        parent.stdout.close()


def open_to_append(path: Path, kind: str) -> int:
    """Return the offset that an append gets."""
    if kind == "partition":
        with Partition.open(path / "orders-0") as log:
            return log.append(b"b")
    with logstore.open(path) as store:
        return store["orders"][0].append(b"b")


# ---- kill -9 ----

WRITER = """
    import os, sys, threading, logstore
    log = logstore.Partition.open(sys.argv[1], durability=sys.argv[2],
                                  config={"segment.bytes": 30000})
    out = os.fdopen(1, "wb", buffering=0)
    def work(number):
        i = 0
        while True:
            value = b"%d:%d:" % (number, i) + b"x" * (i * 37 % 400)
            offset = log.append(value)
            out.write(b"%d %s\\n" % (offset, value))
            i += 1
    for number in range(3):
        threading.Thread(target=work, args=(number,), daemon=True).start()
    threading.Event().wait()
"""


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_kill_9_under_load_loses_no_acknowledged_record(tmp_path: Path, durability: str) -> None:
    path = tmp_path / "orders-0"
    ledger: dict[int, bytes] = {}
    for round_number in range(8):
        child = start(WRITER, path, durability)
        assert child.stdout is not None
        # 8 rounds of 13 lines: more than 100 acknowledgements, however slow the machine is.
        text = "".join(child.stdout.readline() for _ in range(13))
        time.sleep(0.05 + 0.03 * round_number)
        os.killpg(child.pid, signal.SIGKILL)
        output = (text + child.stdout.read()).encode()
        child.communicate()
        for line in output.splitlines(keepends=True):
            if line.endswith(b"\n"):
                offset, value = line.rstrip(b"\n").split(b" ", 1)
                ledger[int(offset)] = value
        with Partition.open(path, config=PartitionConfig(segment_bytes=30000)) as log:
            assert log.recovery.damage == []
            stored = {record.offset: record.value for record in log}
            assert list(stored) == list(range(log.end_offset))
            assert all(stored[offset] == value for offset, value in ledger.items())
            log.check()
    assert len(ledger) > 100
