"""Every call to the disk uses one seam, where tests record calls and make them fail."""

from __future__ import annotations

import ast
import errno
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import logstore
from logstore import Partition
from logstore.testing.io import inject_io, record_io
from logstore.testing.io_calls import KINDS, Fault, Operation

ROOT = Path(__file__).resolve().parent.parent.parent

# ---- no call avoids the seam -----------------------------------------------------------------

OS_CALLS = """
    access chmod chown close copy_file_range fchmod fdatasync fstat fsync ftruncate link listdir
    lseek lstat makedirs mkdir mknod open posix_fadvise posix_fallocate pread preadv pwrite pwritev
    read readlink readv remove removedirs rename renames replace rmdir scandir sendfile stat symlink
    sync truncate unlink utime walk fwalk write writev
"""
PATH_METHODS = """
    glob is_dir is_file iterdir lstat read_bytes read_text rglob samefile symlink_to touch
    write_bytes write_text
"""
NAMES_OF_FILES = ("exists", "getsize", "isdir", "isfile", "getmtime")
# These stand outside the engine: they look at directories, or make them, as a user would.
OUTSIDE = frozenset({"testing", "cli"})


def python_faults(source: str, name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called, owner = node.func, None
        if isinstance(called, ast.Attribute):
            owner = ast.unparse(called.value)
            what = called.attr
        elif isinstance(called, ast.Name):
            what = called.id
        else:
            continue
        where = f"{name}:{node.lineno}: {ast.unparse(called)}"
        if (
            (owner == "os" and what in OS_CALLS.split())
            or (owner == "os.path" and what in NAMES_OF_FILES)
            or owner in ("shutil", "mmap", "io", "tempfile")
            or what in PATH_METHODS.split()
            or (owner is None and what == "open" and not of_the_kernel(node.args[0]))
        ):
            yield where


def of_the_kernel(argument: ast.expr) -> bool:
    """Whether the name of a file begins with /proc: no file of a log."""
    if isinstance(argument, ast.JoinedStr):
        argument = argument.values[0]
    return isinstance(argument, ast.Constant) and str(argument.value).startswith("/proc/")


def test_no_python_of_the_engine_touches_a_file_around_the_seam() -> None:
    files = [
        path
        for path in sorted((ROOT / "logstore").rglob("*.py"))
        if path.relative_to(ROOT / "logstore").parts[0] not in OUTSIDE
    ]
    assert len(files) > 20
    faults = [
        fault
        for path in files
        for fault in python_faults(path.read_text("utf-8"), path.name)
        # A table of offsets that the user names is no file of a log.
        if not (path.name == "group_admin.py" and fault.endswith(": open"))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "source",
    [
        "os.open(name, 0)",
        "os.mkdir(path)",
        "with os.scandir(fd) as entries: pass",
        "os.path.exists(path)",
        "shutil.rmtree(path)",
        "path.write_bytes(b'')",
        "open(path)",
        "open(f'{path}/x')",
        "mmap.mmap(3, 0)",
    ],
)
def test_a_call_around_the_seam_is_found(source: str) -> None:
    assert list(python_faults(source, "x.py"))


@pytest.mark.parametrize("source", ["open('/proc/self/x')", "os.getpid()", "directory.open('x')"])
def test_other_calls_are_allowed(source: str) -> None:
    assert not list(python_faults(source, "x.py"))


SYSTEM_CALL = re.compile(
    r"(?<![\w>.])(?:open|openat|creat|pread|pwrite|read|write|fsync|fdatasync|ftruncate|truncate|"
    r"rename|renameat|unlink|unlinkat|mkdir|mkdirat|rmdir|fstat|fstatat|stat|lstat|opendir|"
    r"fdopendir|fopen|mmap|posix_fallocate|fallocate|sync_file_range)\("
)
SEAM = {"io.c", "io_recorder.c"}


def c_faults(source: str, name: str) -> list[str]:
    code = re.sub(r"/\*.*?\*/|\"(?:[^\"\\\n]|\\.)*\"", "", source, flags=re.DOTALL)
    found = [f"{name}: {match.group()}" for match in SYSTEM_CALL.finditer(code)]
    return found + [f"{name}: a writable mapping"] * ("PROT_WRITE" in code)


def test_no_c_touches_a_file_around_the_seam_and_nothing_maps_one() -> None:
    files = [p for folder in ("core", "python") for p in (ROOT / "native" / folder).glob("*.[ch]")]
    assert len(files) > 20
    faults = [
        fault
        for path in files
        for fault in c_faults(path.read_text("utf-8"), path.name)
        if path.parent.name != "core" or path.name not in SEAM or "map" in fault
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("source", ["pread(fd, a, b, c);", "x = mmap(0);", "int a = PROT_WRITE;"])
def test_a_system_call_in_c_around_the_seam_is_found(source: str) -> None:
    assert c_faults(source, "x.c")
    assert not c_faults("io->pread(io, fd); file_pread(x); /* open(2) */", "x.c")


# ---- the recorder ---------------------------------------------------------------------------


def mutations(operations: list[Operation]) -> list[str]:
    kinds = ("pwrite", "datasync", "sync", "rename", "mkdir", "truncate", "mark")
    return [str(each) for each in operations if each.kind in kinds]


def test_a_recording_has_every_call_in_order_with_its_bytes(tmp_path: Path) -> None:
    with record_io(tmp_path) as trace:
        with Partition.open(tmp_path / "a-0") as log:
            trace.mark("append")
            log.append(b"hello")
            trace.mark("done")
        assert trace.count == sum(each.kind != "mark" for each in trace.operations)
    calls = trace.operations
    start, end = (i for i, each in enumerate(calls) if each.kind == "mark")
    between = [each for each in calls[start:end] if each.path.endswith(".log")]
    assert [each.kind for each in between if each.kind != "size"] == ["pwrite", "datasync"]
    written = between[-2]
    content = (tmp_path / "a-0" / "00000000000000000000.log").read_bytes()
    assert (written.data, written.position, written.result) == (content, 0, len(content))
    assert any(each.kind == "mkdir" and each.path == "a-0" for each in calls)
    assert any(each.kind == "sync" and each.path == "" for each in calls), "the parent's entry"
    count = trace.count
    with Partition.open(tmp_path / "a-0", readonly=True) as log:
        assert log[0].value == b"hello"
    assert trace.count == count, "the watch is off"


def test_only_what_is_below_the_root_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "inside-not").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "in")
    with record_io(tmp_path / "in") as trace:
        Partition.open(tmp_path / "inside-not" / "a-0").close()
        assert trace.count == 0
        Partition.open(link / "a-0").close()
    paths = {each.path for each in trace.operations}
    assert "a-0" in paths
    assert not any("not" in path for path in paths)


def test_files_that_are_open_already_are_recorded_under_the_names_they_have_now(
    tmp_path: Path,
) -> None:
    with Partition.open(tmp_path / "a-0") as log:
        log.append(b"before")
        with record_io(tmp_path) as trace:
            log.append(b"hello")
    assert "datasync a-0/00000000000000000000.log" in mutations(trace.operations)


def test_there_is_one_watch_at_a_time(tmp_path: Path) -> None:
    with record_io(tmp_path):  # noqa: SIM117
        with pytest.raises(RuntimeError, match="one at a time"), inject_io(root=tmp_path):
            pass
    with inject_io(root=tmp_path):
        pass


def test_a_recording_of_threads_is_in_the_order_of_the_disk(tmp_path: Path) -> None:
    """Replaying the writes in their order gives the files as they are."""
    log = Partition.open(tmp_path / "a-0")
    with record_io(tmp_path) as trace:
        threads = [
            threading.Thread(target=lambda n=n: [log.append(b"%d" % n * 50) for _ in range(50)])
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    content = bytearray()
    for call in trace.operations:
        if call.kind == "pwrite" and call.path.endswith("0.log"):
            assert call.data is not None
            assert call.position == len(content)
            content += call.data
    assert content == (tmp_path / "a-0" / "00000000000000000000.log").read_bytes()
    log.close()


# ---- faults ---------------------------------------------------------------------------------


def test_an_error_once_and_then_none(tmp_path: Path) -> None:
    with Partition.open(tmp_path / "a-0") as log:
        with inject_io(Fault.fail(errno.ENOSPC, "pwrite", "*.log"), root=tmp_path) as injected:
            with pytest.raises(logstore.DiskFullError):
                log.append(b"refused")
            assert log.append(b"taken") == 0
        assert injected.fired == 1
        assert injected.matched == [2]
        spoiled = [str(each) for each in injected.calls if each.spoiled]
        assert len(spoiled) == 1
        assert spoiled[0].endswith("ENOSPC (error)")
        assert [record.value for record in log] == [b"taken"]


def test_an_error_for_ever_from_the_third_on(tmp_path: Path) -> None:
    with Partition.open(tmp_path / "a-0", durability="os") as log:
        fault = Fault.fail(errno.EDQUOT, "pwrite", "*.log", call=3, forever=True)
        with inject_io(fault, root=tmp_path) as injected:
            for number in range(2):
                assert log.append(b"taken") == number
            for _ in range(3):
                with pytest.raises(OSError):
                    log.append(b"refused")
        assert injected.fired == 3
        assert log.append(b"taken") == 2


@pytest.mark.parametrize("count", [1, 7, 60])
def test_short_counts_are_taken_up_again(tmp_path: Path, count: int) -> None:
    with (
        inject_io(Fault.short(count, forever=True), root=tmp_path) as injected,
        Partition.open(tmp_path / "a-0") as log,
    ):
        log.append(b"hello")
        assert [record.value for record in log] == [b"hello"]
    assert any(each.result < each.size for each in injected.calls if each.spoiled)


def test_interrupted_calls_are_made_again(tmp_path: Path) -> None:
    faults = [Fault.fail(errno.EINTR, kind, call=n) for kind in ("pread", "pwrite") for n in (1, 2)]
    with inject_io(*faults, root=tmp_path) as injected:
        with Partition.open(tmp_path / "a-0") as log:
            log.append(b"hello")
        with Partition.open(tmp_path / "a-0") as log:
            assert log[0].value == b"hello"
    assert injected.fired == 4


def test_a_late_error_is_an_error_of_something_done(tmp_path: Path) -> None:
    fault = Fault.fail(errno.EIO, "mkdir", late=True)
    with inject_io(fault, root=tmp_path) as injected, pytest.raises(OSError):
        Partition.open(tmp_path / "a-0")
    assert (tmp_path / "a-0").is_dir()
    assert [each.performed for each in injected.calls if each.spoiled] == [True]


def test_pretending_leaves_the_call_out(tmp_path: Path) -> None:
    pretend = Fault.pretend("datasync")
    with record_io(tmp_path, pretend) as trace, Partition.open(tmp_path / "a-0") as log:
        log.append(b"hello")
    syncs = [each for each in trace.operations if each.kind == "datasync"]
    assert syncs
    assert not any(each.performed for each in syncs)
    with Partition.open(tmp_path / "a-0") as log, inject_io(Fault.pretend("pwrite", "*.log")):
        log.append(b"nowhere")
        size = log.path.joinpath("00000000000000000000.log").stat().st_size
    assert size == len(b"".join(x.data or b"" for x in trace.operations if "0.log" in x.path))


def test_a_delayed_call_is_done_and_others_go_on(tmp_path: Path) -> None:
    log = Partition.open(tmp_path / "a-0")
    began = time.monotonic()
    with inject_io(Fault.delay(0.05, "datasync"), root=tmp_path) as injected:
        log.append(b"hello")
    assert time.monotonic() - began >= 0.05
    assert injected.fired == 1
    log.close()


def killed_child(tmp_path: Path, fault: Fault) -> None:
    child = os.fork()
    if child == 0:
        try:
            with inject_io(fault, root=tmp_path), Partition.open(tmp_path / "a-0") as log:
                for _ in range(5):
                    log.append(b"hello")
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), status
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_a_kill_comes_before_the_call(tmp_path: Path) -> None:
    killed_child(tmp_path, Fault.kill("pwrite", "*.log", call=3))
    with Partition.open(tmp_path / "a-0") as log:
        assert [record.offset for record in log] == [0, 1]


def test_a_kill_inside_a_write_leaves_a_torn_tail(tmp_path: Path) -> None:
    killed_child(tmp_path, Fault.kill("pwrite", "*.log", call=3, after_bytes=30))
    segment = tmp_path / "a-0" / "00000000000000000000.log"
    assert segment.stat().st_size == 2 * 73 + 30
    with Partition.open(tmp_path / "a-0") as log:
        assert [record.offset for record in log] == [0, 1]


def test_a_forked_child_has_a_watch_of_its_own(tmp_path: Path) -> None:
    with inject_io(root=tmp_path) as injected:
        child = os.fork()
        if child == 0:
            Partition.open(tmp_path / "a-0").close()
            os._exit(0 if injected.count > 10 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert injected.count == 0


def test_a_loop_over_every_call_ends_and_leaves_the_log_whole(tmp_path: Path) -> None:
    """The loop for which the counters are there: fail each call of an append in its turn."""
    with Partition.open(tmp_path / "a-0") as log:
        call = 1
        while True:
            end = log.end_offset
            with inject_io(
                Fault.fail(errno.ENOSPC, "pwrite", call=call), root=tmp_path
            ) as injected:
                try:
                    log.append(b"x")
                except OSError:
                    assert log.end_offset == end
            if not injected.fired:
                break
            call += 1
        assert call > 1
        assert [record.offset for record in log] == list(range(log.end_offset))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Fault.fail(99999), "no errno"),
        (lambda: Fault.fail(errno.EIO, "fsync"), "no kind of call"),
        (lambda: Fault.fail(errno.EIO, call=0), "counted from 1"),
        (lambda: Fault.short(1, "sync"), "only pread and pwrite"),
        (lambda: Fault.pretend("pread"), "nothing can stand in"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(make: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()  # type: ignore[operator]


def test_kinds_are_named() -> None:
    assert {"pread", "pwrite", "datasync", "sync", "rename", "mkdir", "list"} <= set(KINDS)
    assert "mark" not in KINDS
