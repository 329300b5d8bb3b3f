"""A topic that is much larger than the memory a verb may take: nothing is collected on the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import logstore
from tests.cli.conftest import LONG, Command, on_a_terminal

MIB = 1 << 20
VALUE_BYTES = 1000
GROWTH_MAX = 24 * MIB  # read windows, batches on their way, numpy itself


def fill(command: Command, size_bytes: int) -> None:
    with logstore.open(command.store, durability="os") as store:
        store.create_topic("one").append(b"x")
        with store.create_topic("big", config={"segment.bytes": 64 * MIB})[0].writer() as out:
            for number in range(size_bytes // (VALUE_BYTES * 1000)):
                out.extend(
                    [b"%06d" % number + os.urandom(VALUE_BYTES // 2 - 6).hex().encode()] * 1000
                )


# VmHWM belongs to what is executed; the kernel's ru_maxrss would count this process, too.
SCRIPT = """
import sys
from logstore.cli import main
code = main(sys.argv[1:])
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")), file=sys.stderr)
sys.exit(code)
"""


def peak_bytes(command: Command, *arguments: str, stdin: Path | None = None) -> int:
    """Return the peak memory of a command whose output is /dev/null."""
    line = [sys.executable, "-c", SCRIPT, "-s", str(command.store), *arguments]
    with open(stdin or os.devnull, "rb") as given:
        done = subprocess.run(
            line, stdin=given, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=10 * LONG
        )
    assert done.returncode == 0, (arguments, done.stderr)
    return int(done.stderr.split()[-1]) * 1024


def check(command: Command, tmp_path: Path, size_bytes: int) -> None:
    fill(command, size_bytes)
    lines = tmp_path / "lines"
    with open(lines, "wb") as file:
        for number in range(size_bytes // (VALUE_BYTES * 1000)):
            file.write((b"%06d:" % number + b"y" * (VALUE_BYTES - 8) + b"\n") * 1000)
    small = tmp_path / "small"
    small.write_bytes(b"k:v\n")
    export = ("export", "{}", "-", "--format", "jsonl")
    for verb in (
        ("read", "{}"),
        ("read", "{}", "--count"),
        ("read", "{}", "--count", "--where", 'value contains "zzz"'),
        export,
        ("du", "{}", "--ratio"),
    ):
        base = peak_bytes(command, *(word.format("one") for word in verb))
        grown = peak_bytes(command, *(word.format("big") for word in verb)) - base
        assert grown <= GROWTH_MAX, f"{verb} took {grown / MIB:.0f} MiB more"
    base = peak_bytes(command, "write", "one", "-K:", stdin=small)
    grown = peak_bytes(command, "write", "one", "-K:", stdin=lines) - base
    assert grown <= GROWTH_MAX, f"write took {grown / MIB:.0f} MiB more"
    assert (
        command("read", "one", "--count").text
        == f"{size_bytes // (VALUE_BYTES * 1000) * 1000 + 2}\n"
    )


def test_memory_is_bounded(command: Command, tmp_path: Path) -> None:
    check(command, tmp_path, 48 * MIB)


@pytest.mark.slow  # a minute or two, and 3 GiB of disk
def test_memory_is_bounded_at_a_gibibyte_and_progress_is_shown(
    command: Command, tmp_path: Path
) -> None:
    check(command, tmp_path, 1024 * MIB)
    line = command.line("read", "big", "--count", "--where", 'value contains "zzz"')
    code, text = on_a_terminal(line)
    assert code == 0
    assert text.endswith("0\n")
    assert "counting" in text
    assert "records/s" in text
