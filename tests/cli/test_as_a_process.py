"""What only a process shows: pipes, signals, locks, what is imported, a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import logstore
from tests.cli.conftest import LONG, Command, on_a_terminal
from tests.kit import wait_until


def finish(process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
    out, err = process.communicate(timeout=LONG)
    return process.returncode, out or b"", err or b""


def wait_for(path: Path, size: int) -> None:
    """Until a file has that many bytes."""
    wait_until(lambda: path.exists() and path.stat().st_size >= size, f"{path} of {size} bytes",
               patience=LONG)  # fmt: skip


# ---- pipes ----


def test_a_pipe_of_two_processes(command: Command) -> None:
    command.fill("a", count=100, partitions=2)
    command("topic", "create", "b", "-p", 2)
    lines = command("read", "a").out
    with open(command.store.parent / "lines", "wb") as out:
        reader = command.start("read", "a", "-o", "jsonl", stdout=out)
        assert finish(reader)[0] == 0
    with open(command.store.parent / "lines", "rb") as stdin:
        writer = command.start("write", "b", "--format", "jsonl", stdin=stdin)
        assert finish(writer) == (0, b"", b"")
    one = sorted(line.split(b'"timestamp"')[1] for line in lines.splitlines())
    two = sorted(line.split(b'"timestamp"')[1] for line in command("read", "b").out.splitlines())
    assert one == two


def test_a_reader_that_has_had_enough_ends_it_silently(command: Command) -> None:
    with logstore.open(command.store) as store:
        store.create_topic("orders").extend([b"x" * 1000] * 5000)
    reader = command.start("read", "orders")
    assert reader.stdout is not None
    assert reader.stdout.readline().startswith(b'{"topic":"orders"')
    reader.stdout.close()
    assert reader.wait(LONG) == 0
    assert reader.stderr is not None
    with reader.stderr as stderr:
        assert stderr.read() == b""


def test_lines_are_in_the_log_as_soon_as_they_are_typed(command: Command) -> None:
    command("topic", "create", "orders")
    writer = command.start("write", "orders", "-v", stdin=subprocess.PIPE)
    assert writer.stdin is not None
    assert writer.stdout is not None
    for i in range(3):
        writer.stdin.write(b"line %d\n" % i)
        writer.stdin.flush()
        assert writer.stdout.readline() == b'{"topic":"orders","partition":0,"offset":%d}\n' % i
        assert len(command("read", "orders").rows) == i + 1
    assert finish(writer) == (0, b"", b"")


# ---- signals ----


def test_ctrl_c_ends_following_cleanly(command: Command) -> None:
    command.fill(count=2)
    out = command.store.parent / "out"
    with open(out, "wb") as stdout:
        reader = command.start("read", "orders", "--follow", "-f", "%s;", stdout=stdout)
    wait_for(out, 14)  # both are printed before the next append
    with logstore.open(command.store) as store:
        store["orders"].append(b"third")
    wait_for(out, 20)
    reader.send_signal(signal.SIGINT)
    assert finish(reader) == (130, b"", b"")
    assert out.read_bytes() == b'{"n":0};{"n":1};third;'


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_keeps_what_was_written_and_closes_the_store(
    command: Command, number: signal.Signals, code: int
) -> None:
    command("topic", "create", "orders")
    writer = command.start("write", "orders", "-v", stdin=subprocess.PIPE)
    assert writer.stdin is not None
    assert writer.stdout is not None
    writer.stdin.write(b"one\n")
    writer.stdin.flush()
    assert writer.stdout.readline()  # it is in the log, and the writer waits for more
    writer.send_signal(number)
    assert writer.wait(LONG) == code
    for stream in (writer.stdin, writer.stdout, writer.stderr):
        assert stream is not None
        stream.close()
    with logstore.open(command.store) as store:
        assert store.recovery.clean
        assert [r.value for r in store["orders"][0]] == [b"one"]


# ---- a store that another process holds ----


def test_who_writes_is_named_and_readers_work_beside_it(command: Command) -> None:
    command.fill()
    with logstore.open(command.store) as store:
        store["orders"].append(b"new", timestamp=1)
        code, _, err = finish(command.start("topic", "create", "x"))
        assert code == 3
        assert f"process {os.getpid()}" in err.decode()
        assert "readonly" not in err.decode()
        for arguments in (("topic", "ls"), ("topic", "show", "orders"), ("offsets",)):
            code, out, err = finish(command.start(*arguments))
            assert (code, err) == (0, b"")
            assert out
        code, out, _ = finish(command.start("read", "orders", "--count"))
        assert (code, out) == (0, b"4\n")
        code, out, _ = finish(command.start("topic", "rm", "orders"))
        assert code == 7  # it only shows what would be deleted
        assert finish(command.start("topic", "rm", "orders", "--yes"))[0] == 3


# ---- what is imported ----


def imported_by(command: Command, *arguments: str) -> set[str]:
    script = (
        "import sys; from logstore.cli import main; code = main(sys.argv[1:]); "
        "print(*sys.modules, file=sys.stderr); sys.exit(code)"
    )
    line = [sys.executable, "-c", script, "-s", str(command.store), *arguments]
    done = subprocess.run(line, capture_output=True, timeout=LONG, check=True)
    return set(done.stderr.decode().split())


def test_little_is_imported_before_it_is_needed(command: Command) -> None:
    command.fill()
    helped = imported_by(command, "--help")
    assert not {"logstore.store.store", "logstore._native", "json", "rich", "numpy"} & helped
    listed = imported_by(command, "topic", "ls", "-o", "table")
    heavy = {
        "rich",
        "numpy",
        "pyarrow",
        "asyncio",
        "logstore.upkeep.compaction",
        "logstore.upkeep.maintenance",
    }
    assert not heavy & listed
    assert "numpy" not in imported_by(command, "read", "orders", "--count")


def test_without_click_there_is_a_remedy() -> None:
    script = (
        "import sys; sys.modules['click'] = None\n"
        "from logstore.cli import main; sys.exit(main(['topic', 'ls']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=LONG)
    assert done.returncode == 1
    assert done.stderr.decode() == (
        'the logstore command needs click: pip install "logstore-engine[cli]"\n'
    )


def completed(line: str, store: Path | None = None) -> list[str]:
    """What bash is offered for the last word of a line."""
    script = "import sys; sys.argv = ['logstore']; from logstore.cli import main; sys.exit(main())"
    environment = {
        **os.environ,
        "_LOGSTORE_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
    }
    environment.pop("LOGSTORE", None)
    if store is not None:
        environment["LOGSTORE"] = str(store)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, timeout=LONG
    )
    assert done.returncode == 0
    assert done.stderr == b""
    return [offer.removeprefix("plain,") for offer in done.stdout.decode().split()]


def test_completion_of_commands() -> None:
    assert completed("logstore topic s") == ["show"]


def test_completion_of_topics(command: Command) -> None:
    command.fill("orders", partitions=2)
    command.fill("odd-ones")
    command.fill("clicks")
    assert completed("logstore read o", command.store) == ["odd-ones", "orders"]
    assert completed(f"logstore -s {command.store} read c") == ["clicks"]
    assert completed(f"logstore group reset -s {command.store} billing cl") == ["clicks"]


def test_completion_of_groups(command: Command) -> None:
    command.fill("orders", count=3)
    for group in ("billing", "audit", "bulk"):
        command("group", "reset", group, "orders", "--to-latest", "--yes")
    for verb in ("show", "rm", "reset", "rm-offsets", "copy"):
        assert completed(f"logstore group {verb} b", command.store) == ["billing", "bulk"]
    assert completed("logstore group rm billing a", command.store) == ["audit"]
    assert completed("logstore group show b", command.store / "nowhere") == []


def test_completion_of_settings() -> None:
    assert completed("logstore topic create orders -c retention.") == [
        "retention.ms=",
        "retention.bytes=",
    ]
    assert completed("logstore topic alter orders -c cleanup") == ["cleanup.policy="]


# ---- a terminal ----


def test_on_a_terminal_people_see_tables(command: Command) -> None:
    command.fill(count=5, partitions=2)
    code, text = on_a_terminal(command.line("topic", "ls"))
    assert code == 0
    assert [line.split() for line in text.splitlines() if "orders" in line] == [
        ["orders", "2", "5", text.split("orders")[1].split()[2], "B", "2026-02-02T02:40:00.000Z",
         "2026-02-02T02:40:00.004Z", "delete"]
    ]  # fmt: skip
    assert "PARTITIONS" in text
    assert "{" not in text


def test_brackets_and_escapes_in_data_are_no_markup_on_a_terminal(command: Command) -> None:
    with logstore.open(command.store) as store:
        store.create_topic("orders").append(b"\x1b[31m[red]x[/red]", key=b"[/]")
    code, text = on_a_terminal(command.line("read", "orders"))
    assert code == 0
    assert "\\x1b[31m[red]x[/red]" in text
    assert "\x1b" not in text


def test_a_full_disk_behind_stdout_is_told_in_one_line(command: Command) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    command.fill()
    for arguments in (("read", "orders"), ("topic", "ls")):
        with open("/dev/full", "wb") as full:
            process = command.start(*arguments, stdout=full)
        assert finish(process) == (6, b"", b"logstore: No space left on device\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_like_dev_null(
    command: Command, tmp_path: Path, closed: str
) -> None:
    """Else a file of the store gets the number of a stream."""
    command.fill()
    (tmp_path / "lines").write_text("one\n")
    line = command.line("write", "-p", 0, "orders", tmp_path / "lines")
    line = ["sh", "-c", f'exec "$@" {closed}', "sh", *line]
    ended = subprocess.run(line, capture_output=True, timeout=LONG, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
    with logstore.open(command.store, readonly=True) as store:
        assert [record.value for record in store["orders"][0]][-1] == b"one"
