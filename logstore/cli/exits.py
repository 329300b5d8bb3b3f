"""Exit codes and error messages of the command.  Scripts may rely on the codes.

An error is printed once, in one line, on stderr.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from typing import Final

import click

from logstore.cli.text import printable

__all__ = ["CommandError", "as_advice", "exit_code", "message_of", "tell"]

OK: Final = 0
USAGE: Final = 1  # the command line or the input cannot be parsed
NOT_FOUND: Final = 2  # no such store, topic, partition, offset, file
BUSY: Final = 3  # another process holds the store; the topic exists; a conflict
CORRUPT: Final = 4  # damage was found
TIMEOUT: Final = 5  # a wait timed out
FAILED: Final = 6  # an error of the operating system: full disk, permission, I/O
DRY_RUN: Final = 7  # without --yes: there are changes to make, and none was made
INTERRUPTED: Final = 130
TERMINATED: Final = 143


class CommandError(Exception):
    """An error of a verb, with its message and its exit code."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(words)
        self.code = code


def exit_code(error: BaseException) -> int:
    """Return the exit code for an error."""
    from logstore import errors

    if isinstance(error, CommandError):
        return error.code
    # The first match counts: FileNotFoundError and TimeoutError are also OSErrors.
    by_kind: tuple[tuple[tuple[type[BaseException], ...], int], ...] = (
        ((KeyboardInterrupt, click.Abort), INTERRUPTED),
        ((errors.LockedError, errors.TopicExistsError, errors.ConflictError), BUSY),
        ((errors.FencedError, errors.DivergedError, errors.NotLeaderError, FileExistsError), BUSY),
        ((errors.NodeIdInUseError, errors.ClusterMismatchError), BUSY),
        ((errors.ClusterMemberError, errors.NotEnoughReplicasError), BUSY),
        ((errors.CorruptLogError,), CORRUPT),
        ((errors.UnknownTopicError, errors.NotALogError, FileNotFoundError), NOT_FOUND),
        ((NotADirectoryError, LookupError), NOT_FOUND),
        ((TimeoutError,), TIMEOUT),
        ((OSError, errors.ClosedError, errors.UnsupportedFormatError), FAILED),
        ((click.ClickException, ValueError, TypeError, ImportError), USAGE),
    )
    for kinds, code in by_kind:
        if isinstance(error, kinds):
            return code
    return FAILED


# Advice in the library's messages, and the same advice for a command line.
ADVICE = {
    "scan(on_corrupt='skip') reads": "--skip-corrupt reads",
    "repair(accept_loss=True)": "logstore repair --accept-loss",
    "repair() writes": "logstore repair writes",
    "allow_truncate=True": "--allow-truncate",
    "trim=True": "--trim",
    ", or open here with readonly=True": "",  # the verb chooses the mode
    ": exist_ok=True takes it as it is": "",  # a verb has an option for it
    "logstore export() needs": "logstore export needs",
    "logstore import() needs": "logstore import needs",
}


def as_advice(words: str) -> str:
    """Return a message of the library with its advice rewritten for the command line."""
    for theirs, ours in ADVICE.items():
        words = words.replace(theirs, ours)
    return words


def message_of(error: BaseException) -> str:
    """Return the message of an error, in one line."""
    return as_advice(_message_of(error))


def _message_of(error: BaseException) -> str:
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_message_of(each) for each in error.exceptions)
    if isinstance(error, OSError) and error.errno is not None:
        words = error.strerror or errno.errorcode.get(error.errno, str(error.errno))
        return f"{error.filename}: {words}" if error.filename else words
    return str(error) or type(error).__name__


def tell(error: BaseException) -> None:
    """Print an error on stderr.  Text that comes from data is escaped."""
    for line in _lines(error):
        print(line, file=sys.stderr)


def _lines(error: BaseException) -> Iterator[str]:
    yield f"logstore: {printable(message_of(error))}"
    for note in getattr(error, "__notes__", ()):
        yield f"  {printable(note)}"
    if isinstance(error, click.UsageError) and error.ctx is not None:
        yield f"  try: {error.ctx.command_path} --help"
