"""A model of a disk: the changes of every recorded call, and which of them are durable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from logstore.testing.io_calls import Operation

Tree = dict[str, bytes | None]  # contents by path below the root; None is a directory

SECTOR: Final = 512


class File:
    """The durable contents of a file, and the changes since."""

    __slots__ = ("durable", "pending", "version")

    def __init__(self, durable: bytes = b"") -> None:
        self.durable = durable
        self.pending: list[Change] = []
        self.version = 0  # of `durable`

    def now(self) -> bytes:
        return applied(self.durable, self.pending)


class Folder:
    """The names in a directory: current, and durable in each of the two models."""

    __slots__ = ("committed", "durable", "now", "pending")

    def __init__(self) -> None:
        self.now: dict[str, Node] = {}
        self.durable: dict[str, Node] = {}  # unordered: as of the last sync
        self.pending: list[_Renaming] = []  # unordered: changes since then
        self.committed: dict[str, Node] = {}  # ordered: as of the last commit of the journal


Node = File | Folder


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """A write, or with no data a change of size."""

    step: int
    file: File
    position: int
    data: bytes | None
    size: int  # the new size, if `data` is None
    grows: bool = False  # allocate: never shortens the file


@dataclass(frozen=True, slots=True, eq=False)
class _Renaming:
    """A name that is created, removed or renamed."""

    step: int
    folder: Folder
    old: str | None
    new: str | None
    node: Node

    def apply(self, names: dict[str, Node]) -> None:
        # In a crash state the name may belong to another node: changes before this one did not
        # last.
        if self.old is not None and names.get(self.old) is self.node:
            del names[self.old]
        if self.new is not None:
            names[self.new] = self.node


def applied(content: bytes, changes: Sequence[Change]) -> bytes:
    if not changes:
        return content
    result = bytearray(content)
    for change in changes:
        if change.data is None:
            if change.size >= len(result):
                result.extend(bytes(change.size - len(result)))
            elif not change.grows:
                del result[change.size :]
        else:
            end = change.position + len(change.data)
            if change.position > len(result):
                result.extend(bytes(change.position - len(result)))  # a hole reads as zeros
            result[change.position : end] = change.data
    return bytes(result)


class Disk:
    def __init__(self, initial: Tree) -> None:
        self.root = Folder()
        self.files: dict[int, Node] = {}  # by descriptor
        self.journal: list[_Renaming] = []
        self.step = 0
        for path in sorted(initial):
            content = initial[path]
            self._enter(path, Folder() if content is None else File(content))

    def _enter(self, path: str, node: Node) -> None:
        folder, name = self._place(path)
        folder.now[name] = folder.durable[name] = folder.committed[name] = node

    def _place(self, path: str) -> tuple[Folder, str]:
        above, _, name = path.rpartition("/")
        folder = self.find(above)
        assert isinstance(folder, Folder), path
        return folder, name

    def find(self, path: str) -> Node | None:
        node: Node | None = self.root
        for name in path.split("/") if path else ():
            if not isinstance(node, Folder):
                return None
            node = node.now.get(name)
        return node

    def play(self, call: Operation, step: int) -> bool:
        """Apply a call; return whether it changes the possible crash states."""
        self.step = step
        if not call.performed:
            return False
        kind = call.kind
        if kind in ("pwrite", "truncate", "allocate", "datasync", "sync"):
            node = self.files.get(call.fd)
            if node is None:
                node = self.find(call.path)
            if node is None:
                return False  # opened before the recording and deleted since then
            return self._on_file(node, call)
        if kind == "open":
            return self._open(call)
        if kind == "close":
            self.files.pop(call.fd, None)
            return False
        if kind in ("rename", "unlink", "rmdir", "mkdir"):
            folder, name = self._place(call.path)
            if kind == "mkdir":
                self._change(folder, None, name, Folder())
            elif kind == "rename":
                assert call.target is not None
                self._change(folder, name, call.target.rpartition("/")[2], folder.now[name])
            else:
                self._change(folder, name, None, folder.now[name])
            return True
        return False

    def _open(self, call: Operation) -> bool:
        node = self.find(call.path)
        created = node is None
        if node is None:
            folder, name = self._place(call.path)
            node = File()
            self._change(folder, None, name, node)
        self.files[call.result] = node
        return created

    def _on_file(self, node: Node, call: Operation) -> bool:
        if isinstance(node, Folder):
            assert call.kind == "sync", call
            return self._sync_folder(node)
        if call.kind == "pwrite":
            assert call.data is not None, "record with data=True"
            node.pending.append(Change(self.step, node, call.position, call.data, 0))
        elif call.kind == "truncate":
            node.pending.append(Change(self.step, node, 0, None, call.size))
        elif call.kind == "allocate":
            end = call.position + call.size
            node.pending.append(Change(self.step, node, 0, None, end, grows=True))
        else:
            # An fsync of a file also commits the journal up to its creation, as ext4 and xfs do.
            self._commit([c.step for c in self.journal if c.node is node])
            if not node.pending:
                return False
            node.durable, node.pending = node.now(), []
            node.version += 1
        return True

    def _sync_folder(self, folder: Folder) -> bool:
        self._commit([c.step for c in self.journal if c.folder is folder])
        changed = bool(folder.pending)
        folder.durable, folder.pending = dict(folder.now), []  # the "unordered" model
        return changed

    def _commit(self, steps: list[int]) -> None:
        """Make the journal durable up to the last of these steps."""
        if not steps:
            return
        last = max(steps)
        for change in self.journal:
            if change.step <= last:
                change.apply(change.folder.committed)
        self.journal = [change for change in self.journal if change.step > last]

    def _change(self, folder: Folder, old: str | None, new: str | None, node: Node) -> None:
        change = _Renaming(self.step, folder, old, new, node)
        change.apply(folder.now)
        folder.pending.append(change)
        self.journal.append(change)

    def folders(self) -> list[Folder]:
        """Return every folder that can be in a crash state."""
        found: list[Folder] = [self.root]
        for folder in found:
            for node in self._shown(folder):
                if isinstance(node, Folder) and node not in found:
                    found.append(node)
        return found

    def _shown(self, folder: Folder) -> Iterator[Node]:
        yield from folder.durable.values()
        # A folder or file may be removed now, and back after a crash: look at all three views.
        yield from folder.committed.values()
        for change in folder.pending:
            yield change.node

    def pending_files(self, folders: list[Folder]) -> list[File]:
        found: dict[int, File] = {}
        for folder in folders:
            for node in self._shown(folder):
                if isinstance(node, File) and node.pending:
                    found[id(node)] = node
        return list(found.values())
