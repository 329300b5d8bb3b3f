"""Findings: the list of problems that the checks of one partition share.

`CheckedView` names the members of an open partition that the checks use.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from logstore.checking.problem import Problem, ProblemKind
from logstore.files.directory import Directory
from logstore.log.producer_files import Producers
from logstore.log.segment import Segment

__all__ = ["CheckedView", "Findings"]


class CheckedView(Protocol):
    """The members of an open partition that a check uses: see `LogView` and `ReadOnlyView`."""

    lock: threading.RLock

    @property
    def directory(self) -> Directory: ...
    @property
    def segments(self) -> Sequence[Segment]: ...
    @property
    def start_offset(self) -> int: ...
    @property
    def generation(self) -> int: ...
    def look(self) -> object: ...
    def moved_since(self, generation: int) -> bool: ...
    def check_usable(self) -> None: ...
    def known_producers(self) -> Producers: ...


class Findings:
    """The problems of one directory, in the order in which they were found."""

    def __init__(self, directory: Directory) -> None:
        self.problems: list[Problem] = []
        self._directory = directory

    def note(
        self,
        kind: ProblemKind,
        path: Path | str,
        detail: str,
        *,
        position: int = -1,
        end_position: int = -1,
        offsets: range | None = None,
    ) -> None:
        """Add a problem.  A `path` that is a str is the name of a file of the directory."""
        if isinstance(path, str):
            path = self._directory.path / path
        self.problems.append(Problem(kind, path, detail, position, end_position, offsets))

    def has(self, name: str) -> bool:
        """Return whether a problem of this file is in the list."""
        path = self._directory.path / name
        return any(p.path == path for p in self.problems)

    def read(self, name: str) -> bytes | None:
        """Return the contents of a small file; None if it does not exist or cannot be read."""
        try:
            return self._directory.read(name)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.note(ProblemKind.UNREADABLE_FILE, name, str(error))
            return None
