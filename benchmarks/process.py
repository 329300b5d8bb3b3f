"""What the kernel says of a process (memory, bytes read), and processes to ask it in."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def resident_bytes() -> int:
    """VmRSS: what this process holds in memory now."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """VmHWM: the most it ever held, or held since `forget_peak`."""
    return _status_bytes("VmHWM")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def bytes_read() -> int:
    """rchar: what this process asked of read(2) and its kin so far, page cache or not."""
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, number = line.partition(":")
        if name == "rchar":
            return int(number)
    raise OSError("no rchar in /proc/self/io")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, number = line.partition(":")
        if name == field:
            return int(number.split()[0]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def isolated(function: Callable[..., Any], *arguments: object) -> Any:
    """The result of `function(*arguments)` in a new interpreter; None if it never returned.

    The function is importable by name and may end its process as it likes, `os._exit` included.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, arguments), daemon=True)
    process.start()
    sender.close()
    try:
        try:
            result = receiver.recv()
        except EOFError:
            result = None
        process.join()
    finally:
        process.kill()
        process.join()
        receiver.close()
    if process.exitcode != 0:
        raise RuntimeError(f"{function.__name__} ended with exit code {process.exitcode}")
    return result


def _answer(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is the parent's to report
    sender.send(function(*arguments))
    sender.close()


def exit_uncleanly() -> None:
    """End here and now: nothing is flushed, closed or marked clean."""
    os._exit(0)
