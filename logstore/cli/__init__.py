"""The `logstore` command: inspect and change a store without writing code.

Start-up is short because modules are imported late: the module of a verb when the verb runs, the
engine when a verb opens a store, rich when a table is printed on a terminal.  Verbs that only read
open the store readonly, so they work while another process writes to it.

`command` is the root command.  Each family of verbs has a module in `verbs`.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]

COLLECT_AFTER = 50_000  # new objects before a garbage collection


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Without `arguments` the command line is sys.argv, and the caller exits the process afterwards.
    """
    if arguments is None:
        # At Python's default of 700 objects the imports alone cause dozens of collections: 5 ms.
        gc.set_threshold(COLLECT_AFTER)
        _open_standard_streams()
    try:
        from logstore.cli.command import run
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        print(
            'the logstore command needs click: pip install "logstore-engine[cli]"', file=sys.stderr
        )
        return 1
    code = run(arguments)
    if arguments is None:
        # The process exits now.  Without this the interpreter searches every imported object for
        # cycles first, which takes a fifth of the time of a short command.
        gc.freeze()
    return code


def _open_standard_streams() -> None:
    """Open /dev/null for standard streams that are closed, as a shell does by ``>&-``.

    Else their numbers are those of the next files, such as the segments of a store.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the least number that is free: all below are open
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
