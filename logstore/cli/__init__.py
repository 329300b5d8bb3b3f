"""The `logstore` command: what people do with a store before, and besides, writing code.

Nothing heavy is imported before it is known which verb runs: the engine by the verbs that open a
store, rich by those that print a table on a terminal.  Verbs that only read open the store
readonly, beside whoever writes it.

One module for each family of verbs; `command` is the root that finds them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
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
        # The process ends here: without this the interpreter looks through all that was imported
        # for cycles, which takes a fifth of the time of a short command.
        gc.freeze()
    return code
