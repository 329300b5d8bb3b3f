"""Fixtures that every test may use, and the checks that every test gets.

`log` is a fresh partition; `make_log` opens as many as a test needs and closes what it forgot;
`fake_clock` moves only when a test advances it.  After each test, no file may be left open, and no
thread of a node of a cluster may run.

Hypothesis runs the same examples every time; HYPOTHESIS_PROFILE=explore looks for new ones.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import logstore
from logstore import Partition, Store
from logstore.clock import ManualClock
from tests.kit import node_threads

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# A shell starts background processes with SIGINT ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
MakeLog = Callable[..., Partition]


@pytest.fixture
def fake_clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def make_log(tmp_path: Path) -> Iterator[MakeLog]:
    """make_log(name="orders-0", *, durability="os", readonly=False, clock=None, **config).

    Opening the same name again, after a close, reopens the same directory.
    """
    with contextlib.ExitStack() as closing:

        def make(
            name: str = "orders-0",
            *,
            durability: str = "os",
            readonly: bool = False,
            clock: ManualClock | None = None,
            **config: Any,
        ) -> Partition:
            partition = Partition.open(
                tmp_path / name,
                durability=durability,
                readonly=readonly,
                clock=clock,
                config=config or None,
            )
            closing.callback(partition.close)
            return partition

        yield make


@pytest.fixture
def log(make_log: MakeLog) -> Partition:
    return make_log()


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """make_store(name="store", *, durability="os", **options); opening a closed one again works."""
    with contextlib.ExitStack() as closing:

        def make(name: str = "store", *, durability: str = "os", **options: Any) -> Store:
            store = logstore.open(tmp_path / name, durability=durability, **options)
            closing.callback(store.close)
            return store

        yield make


@pytest.fixture
def store(make_store: Callable[..., Store]) -> Store:
    return make_store()


RunShares = Callable[..., dict[str, int]]


@pytest.fixture
def run_shares() -> Iterator[RunShares]:
    """run_shares(file, *arguments, shares=2, chosen=(0, 1)): a campaign by several processes.

    `file` is run as a module with (share, shares, folder, *arguments).  Its last line is JSON: a
    dictionary of counts, which are added.  The folder is in memory where that is possible.
    `chosen` shares of `shares` are run, one process each.
    """
    shm = Path("/dev/shm")
    running: list[subprocess.Popen[str]] = []

    def run(
        file: str, *arguments: str, shares: int = 2, chosen: tuple[int, ...] = (0, 1)
    ) -> dict[str, int]:
        module = ".".join(Path(file).resolve().relative_to(ROOT).with_suffix("").parts)
        with tempfile.TemporaryDirectory(
            prefix="logstore-campaign-", dir=shm if shm.is_dir() else None
        ) as folder:
            for share in chosen:
                command = [sys.executable, "-W", "error", "-m", module, str(share), str(shares)]
                running.append(
                    subprocess.Popen(
                        [*command, folder, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
                    )
                )
            outputs = [process.communicate()[0] for process in running]
        assert [process.returncode for process in running] == [0] * len(chosen)
        running.clear()
        counts: Counter[str] = Counter()
        for output in outputs:
            counts.update(json.loads(output.splitlines()[-1]))
        return dict(counts)

    yield run
    for process in running:
        process.kill()
        process.wait()


def open_files() -> dict[int, str]:
    """Descriptor -> path of every file and directory this process has open."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:  # the one that listed the directory
            continue
        if target.startswith("/") and not target.startswith(("/dev/", "/proc/", "/sys/")):
            found[int(entry.name)] = target
    return found


def new_files(before: dict[int, str]) -> dict[int, str]:
    return {fd: path for fd, path in open_files().items() if before.get(fd) != path}


# The files that take longest, in seconds of one worker.  They are begun first, so that the workers
# end at the same time; the others follow by name.
LONGEST = (
    *("kafka/test_clients.py", "spark/test_sink.py", "crash/test_byte_damage.py"),
    *("house/test_examples.py", "spark/test_pipelines.py", "spark/test_stream.py"),
    *("testing/test_interrupt_explorer.py", "house/test_readme.py", "spark/test_push_down.py"),
    *("spark/test_golden_frames.py", "testing/test_reference_codec.py", "interop/test_follow.py"),
    *("partition/test_forks.py", "crash/test_crash_states.py", "interop/test_wire_clients.py"),
    *("interop/test_takeover.py", "spark/test_driver_killed.py", "spark/test_pains.py"),
    *("interop/test_wire_programs.py", "interop/test_wire_differential.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {str(ROOT / "tests" / name): place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(str(item.path), len(LONGEST)))  # stable


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def no_file_stays_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sockets and pipes are left out: they belong to clients and interpreters under test."""
    if not Path("/proc/self/fd").is_dir():
        yield
        return
    before = open_files()
    yield
    if request.node.stash.get(FAILED, False):
        return  # its traceback keeps everything alive; one message is enough
    if new_files(before):
        gc.collect()  # an iterator that was dropped half-way may still hold its file
    left = new_files(before)
    assert not left, f"left open: {left}"


@pytest.fixture(autouse=True)
def no_node_runs_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """A node that a test forgot would use files and ports of the tests behind it."""
    before = node_threads()
    yield
    if request.node.stash.get(FAILED, False):
        return
    until = time.monotonic() + 5
    while (left := node_threads() - before) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left, f"still running: {sorted(each.name for each in left)}"
