"""EmbeddedTree: the metadata tree of nodes that share a process.  It needs no other service.

Invariant: sessions see a commit only when it is durable.  One thread makes all changes: it takes
all requests that wait, applies them to a copy of the tree, replaces the file once, publishes the
copy, and calls the callbacks.  So readers take no lock, and one fsync serves many commits.

``logstore.cluster`` has the paths that are not ephemeral: one line of JSON, with a checksum.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

from logstore.errors import ClosedError, CorruptMetadataError
from logstore.files.directory import Directory
from logstore.files.lock import DirectoryLock
from logstore.files.small_file import MISREAD, with_checksum, without_checksum
from logstore.replication.metadata import Op, Outcome, SessionState, Unknown, call_back
from logstore.replication.tree import (
    EMPTY,
    Changes,
    Node,
    Nodes,
    apply,
    ending_of,
    is_below,
    outcome_of,
    place,
)

__all__ = ["EmbeddedMetadata", "EmbeddedTree"]

log = logging.getLogger("logstore.metadata")


class _TreeLock(DirectoryLock):
    NAME = "logstore.cluster.lock"  # a store may have the .lock file of the same directory


class _Request(NamedTuple):
    """A commit of a session; or, without `done`, the end of the session."""

    session: EmbeddedMetadata
    ops: Sequence[Op] = ()
    done: Callable[[Outcome], None] | None = None


class EmbeddedTree:
    """A tree in a directory, or in memory only if there is no directory.

    Raise LockedError if another process or tree has the directory, and CorruptMetadataError if the
    file is damaged.  `close` ends all sessions.  Threads may share it.
    """

    NAME = "logstore.cluster"

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.nodes: Nodes = {"/": EMPTY}  # published; a dict is never changed after that
        self._lock: DirectoryLock | None = None
        self._directory = None if directory is None else Directory(directory, create=True)
        if self._directory is not None:
            try:
                self._lock = _TreeLock(self._directory, root=True)
                self.nodes = self._read(self._directory)
            except BaseException:
                self._release()
                raise
        self._sessions: list[EmbeddedMetadata] = []  # used by the thread only
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="logstore-metadata", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def session(self) -> EmbeddedMetadata:
        """Return a new session.  Its `start` opens it."""
        return EmbeddedMetadata(self)

    def close(self) -> None:
        """End all sessions and release the directory.  Not to be called from a callback."""
        if not self._closed:
            self._closed = True
            self._requests.put(None)
            self._thread.join()
            self._release()

    def submit(self, request: _Request) -> None:
        """Queue a request; raise ClosedError if the tree is closed."""
        if self._closed:
            raise ClosedError("the metadata tree is closed")
        self._requests.put(request)

    @property
    def calls_back_here(self) -> bool:
        """Whether the caller runs in the thread that calls the callbacks."""
        return threading.current_thread() is self._thread

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
        if self._directory is not None:
            self._directory.close()

    # ---- the file ----

    @classmethod
    def _read(cls, directory: Directory) -> Nodes:
        nodes = {"/": EMPTY}
        try:
            content = directory.read(cls.NAME)
        except FileNotFoundError:
            return nodes
        try:
            fields = json.loads(without_checksum(content))
            if fields["format"] != 1:
                raise ValueError(f"the format is {fields['format']!r}, not 1")
            # In this order a parent is before its children.
            for path, (data, version) in sorted(fields["nodes"].items()):
                contents = data.encode("utf-8", "surrogateescape")
                place(nodes, path, Node(contents, int(version), None, frozenset()))
        except MISREAD as error:
            raise CorruptMetadataError(str(error), path=directory.path / cls.NAME) from None
        return nodes

    def _write(self, directory: Directory, nodes: Nodes) -> None:
        # Contents are text as a rule.  Bytes that are no UTF-8 become lone surrogates.
        kept = {
            path: (node.data.decode("utf-8", "surrogateescape"), node.version)
            for path, node in nodes.items()
            if node.owner is None and path != "/"
        }
        body = json.dumps({"format": 1, "nodes": kept}, separators=(",", ":"))
        directory.replace(self.NAME, with_checksum(body.encode()))

    # ---- the thread ----

    def _run(self) -> None:
        while True:
            waiting = [self._requests.get()]
            while not self._requests.empty():
                waiting.append(self._requests.get())
            self._carry_out([each for each in waiting if each is not None])
            if None in waiting:
                self._carry_out([_Request(each) for each in self._sessions])
                return

    def _carry_out(self, requests: list[_Request]) -> None:
        nodes, answers, lasting = self._try(requests)
        if lasting and self._directory is not None:
            try:
                self._write(self._directory, nodes)
            except OSError as error:
                log.error("%s/%s: a commit failed: %s", self._directory.path, self.NAME, error)
                # The file may have the new contents until the next write.  Sessions end in memory.
                nodes, ends, _ = self._try([each for each in requests if each.done is None])
                commits = [each for each in requests if each.done is not None]
                answers = [*((each, Unknown(), []) for each in commits), *ends]
        self.nodes = nodes
        for request, outcome, paths in answers:
            self._answer(request, outcome, paths)

    def _try(
        self, requests: list[_Request]
    ) -> tuple[Nodes, list[tuple[_Request, Outcome, list[str]]], bool]:
        """Return the tree after all requests, their answers, and whether the file is affected."""
        nodes = dict(self.nodes)
        answers: list[tuple[_Request, Outcome, list[str]]] = []
        lasting = False
        for request in requests:
            outcome: Outcome = Unknown()
            changes: Changes = {}
            if request.done is None:
                changes = ending_of(nodes, request.session)
                request.session.state = "lost"
            elif request.session.state != "lost":
                outcome, changes = outcome_of(nodes, request.ops, request.session)
            old = {path: nodes.get(path) for path in changes}
            paths = apply(nodes, changes)
            lasting |= any(
                each is not None and each.owner is None
                for path in paths
                for each in (old[path], changes[path])
            )
            answers.append((request, outcome, paths))
        return nodes, answers, lasting

    def _answer(self, request: _Request, outcome: Outcome, paths: list[str]) -> None:
        session = request.session
        for path in paths:
            for each in self._sessions:
                each.note(path)
        if request.done is not None:
            if session.state != "lost" and session not in self._sessions:
                self._sessions.append(session)
            call_back(request.done, outcome)
        else:
            if session in self._sessions:
                self._sessions.remove(session)
            session.end()


class EmbeddedMetadata:
    """A session with an EmbeddedTree: see `Metadata` for its methods."""

    def __init__(self, tree: EmbeddedTree) -> None:
        self._tree = tree
        self._roots: tuple[str, ...] = ()
        self._changed: Callable[[str], None] | None = None
        self._moved: Callable[[SessionState], None] | None = None
        self._closed = False
        self._ended = threading.Event()
        self.state: SessionState = "suspended"

    def start(
        self,
        roots: Sequence[str],
        changed: Callable[[str], None],
        moved: Callable[[SessionState], None],
        *,
        timeout: float | None = None,
    ) -> None:
        """Open the session.  It never waits long: there is no other process."""
        self._check_open()
        started = threading.Event()

        def opened(outcome: Outcome) -> None:
            self._roots, self._changed, self._moved = tuple(roots), changed, moved
            self.state = "connected"
            started.set()

        self._tree.submit(_Request(self, (), opened))
        started.wait()

    def read(self, path: str) -> tuple[bytes, int] | None:
        node = self._tree.nodes.get(path) if is_below(path, self._roots) else None
        return None if node is None else (node.data, node.version)

    def children(self, path: str) -> list[str]:
        node = self._tree.nodes.get(path) if is_below(path, self._roots) else None
        return [] if node is None else sorted(node.names)

    def commit(self, ops: Sequence[Op], done: Callable[[Outcome], None]) -> None:
        self._check_open()
        self._tree.submit(_Request(self, tuple(ops), done))

    def sync(self, done: Callable[[], None]) -> None:
        def synced(outcome: Outcome) -> None:
            if self.state != "lost":
                done()

        self.commit((), synced)

    def expire(self) -> None:
        """End the session as a service ends one from which it hears nothing.  For tests."""
        self._tree.submit(_Request(self))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._changed = self._moved = None
        try:
            self._tree.submit(_Request(self))
        except ClosedError:
            return  # the tree has ended the session
        if not self._tree.calls_back_here:
            self._ended.wait()

    def note(self, path: str) -> None:
        """Call the watcher.  Called in the thread of the tree."""
        changed = self._changed
        if changed is not None and is_below(path, self._roots):
            call_back(changed, path)

    def end(self) -> None:
        """Call `moved`.  Called in the thread of the tree."""
        moved = self._moved
        self._changed = self._moved = None
        if moved is not None:
            call_back(moved, "lost")
        self._ended.set()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the metadata session is closed")
