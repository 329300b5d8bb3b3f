"""Metadata: a small versioned tree that all nodes of a cluster share.

Every implementation has a *mirror*: a copy of the tree in memory, which may be older than the tree
by any time.  `read` and `children` look at the mirror only, so they never wait.  `commit` changes
the tree under conditions and answers later.

What callers rely on, and what one test suite checks for every implementation:

* Commits are linearizable and atomic: all ops of one commit are done, in order, or none.
* The version of a path is 0 after Create and grows by 1 with every Set.  Delete and Create start
  again at 0, so a version identifies contents only for a path that is never deleted.
* The mirror never goes back, and has the session's own commits when they are answered.
* After every change of the mirror the watcher is called; one call may stand for several changes.
* An ephemeral path is deleted when its session has ended, not before.  A session that has ended
  commits nothing more.
* After Unknown the same conditional ops may be committed again: the second try succeeds, or is
  refused because the version has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeVarTuple

__all__ = [
    "ANY",
    "Check",
    "Commit",
    "Committed",
    "Create",
    "Delete",
    "Metadata",
    "Op",
    "Outcome",
    "Refused",
    "SessionState",
    "Set",
    "Unknown",
    "Why",
    "call_back",
]

log = logging.getLogger("logstore.metadata")

Arguments = TypeVarTuple("Arguments")

ANY = -1  # as a version: any version, but the path must exist

SessionState = Literal["connected", "suspended", "lost"]
# "no parent": the parent is ephemeral, and an ephemeral path can have no children.
Why = Literal["version", "exists", "missing", "not empty", "no parent"]


class Create(NamedTuple):
    """Create a path; parents that are missing are created too, empty and not ephemeral."""

    path: str
    data: bytes
    ephemeral: bool = False


class Set(NamedTuple):
    """Replace the contents of a path if it has this version."""

    path: str
    data: bytes
    version: int


class Delete(NamedTuple):
    """Delete a path without children if it has this version."""

    path: str
    version: int = ANY


class Check(NamedTuple):
    """Do nothing, but refuse the commit unless the path has this version."""

    path: str
    version: int


Op = Create | Set | Delete | Check


class Committed(NamedTuple):
    """All ops are done.  `versions` has one version for each op: -1 for Delete.

    That of a Check is the version it asked for.
    """

    versions: tuple[int, ...]


class Refused(NamedTuple):
    """No op is done: op number `op` (from 0) failed its condition, and those before it did not."""

    op: int
    why: Why


class Unknown(NamedTuple):
    """The connection broke.  The ops may be done, may be done later, or never."""


Outcome = Committed | Refused | Unknown


class Commit(NamedTuple):
    """A commit that a machine asks for.  `tag` comes back with its outcome."""

    ops: Sequence[Op]
    tag: object


class Metadata(Protocol):
    """One session with the tree.

    Callbacks are called from a thread of the implementation, one at a time; they must not wait.  A
    callback that raises is logged, and the others are called.  After `close` no callback is called,
    and `start`, `commit` and `sync` raise ClosedError.
    """

    @property
    def state(self) -> SessionState:
        """`lost` is final: the ephemeral paths of this session are deleted, or will be."""

    def start(
        self,
        roots: Sequence[str],
        changed: Callable[[str], None],
        moved: Callable[[SessionState], None],
        *,
        timeout: float | None = None,
    ) -> None:
        """Open the session and mirror everything at and below `roots`.

        Return when the mirror has all that was acknowledged to anybody before the call.  Then call
        ``changed(path)`` for every path that was created, set or deleted in the mirror, also by
        this session, and `moved` with every new state.
        Raise MetadataUnavailableError after `timeout` seconds.
        """

    def read(self, path: str) -> tuple[bytes, int] | None:
        """Return the contents and the version that the mirror has, or None.

        Paths that are not at or below the roots are never in the mirror.
        """

    def children(self, path: str) -> list[str]:
        """Return the names below a path in the mirror, in order."""

    def commit(self, ops: Sequence[Op], done: Callable[[Outcome], None]) -> None:
        """Do all ops or none.  Call `done` once, when the mirror has them too.

        Commits are done in the order of the calls, but one with a Create may be done after later
        ones.  While the session is suspended they wait.  A session that is lost answers Unknown.
        """

    def sync(self, done: Callable[[], None]) -> None:
        """Call `done` when the mirror has all that was acknowledged to anybody before this call.

        If the session is lost first, `done` is never called.
        """

    def close(self) -> None:
        """End the session: its ephemeral paths are deleted at once.

        Commits that are not answered yet are answered, as Unknown if need be, before it returns.
        """


def call_back(callback: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
    """Call a callback; log what it raises, because the thread must go on."""
    try:
        callback(*arguments)
    except Exception:
        log.exception("a callback of the metadata tree failed")
