"""Exit codes: what a script may rely on.  An error is told once, in one line, on stderr."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from typing import Final

import click

from logstore.cli.text import printable

__all__ = ["CommandError", "as_advice", "exit_code", "message_of", "tell"]

OK: Final = 0
USAGE: Final = 1  # the command line, or what was fed in, cannot be understood
NOT_FOUND: Final = 2  # no such store, topic, partition, offset, file
BUSY: Final = 3  # another process holds the store; the topic exists; someone else was first
CORRUPT: Final = 4  # damage was found
TIMEOUT: Final = 5  # what was waited for did not come
FAILED: Final = 6  # the operating system said no: a full disk, no permission, an I/O error
DRY_RUN: Final = 7  # without --yes: there is something to change, and nothing was changed
INTERRUPTED: Final = 130
TERMINATED: Final = 143


class CommandError(Exception):
    """What a verb has to say for itself, and the code that it ends with."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(words)
        self.code = code


def exit_code(error: BaseException) -> int:
    """The code that an error ends the command with."""
    from logstore import errors

    if isinstance(error, CommandError):
        return error.code
    by_kind: tuple[tuple[tuple[type[BaseException], ...], int], ...] = (
        ((KeyboardInterrupt, click.Abort), INTERRUPTED),
        ((errors.LockedError, errors.TopicExistsError, errors.ConflictError), BUSY),
        ((errors.FencedError, FileExistsError), BUSY),
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


# What the library advises, and how to say that on a command line.
ADVICE = {
    "scan(on_corrupt='skip') reads": "--skip-corrupt reads",
    "repair(accept_loss=True)": "logstore repair --accept-loss",
    "repair() writes": "logstore repair writes",
    ", or open here with readonly=True": "",  # verbs choose that
    ": exist_ok=True takes it as it is": "",  # an option of a verb
    "logstore export() needs": "logstore export needs",
    "logstore import() needs": "logstore import needs",
}


def as_advice(words: str) -> str:
    """The words of the library for someone who has the command."""
    for theirs, ours in ADVICE.items():
        words = words.replace(theirs, ours)
    return words


def message_of(error: BaseException) -> str:
    """What to say of it, in one line."""
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
    """Say on stderr what went wrong; what it says may come from data."""
    for line in _lines(error):
        print(line, file=sys.stderr)


def _lines(error: BaseException) -> Iterator[str]:
    yield f"logstore: {printable(message_of(error))}"
    for note in getattr(error, "__notes__", ()):
        yield f"  {printable(note)}"
    if isinstance(error, click.UsageError) and error.ctx is not None:
        yield f"  try: {error.ctx.command_path} --help"
