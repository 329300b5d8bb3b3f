"""The disk that keeps as little, or reorders as much, as POSIX allows.

Plays a recorded trace of calls, remembers for every file what a sync has covered and for every
directory which names, and gives the states that a power cut may leave.  Of all of them only the
six extreme ones are made: data as synced, as written, or lost although the file's size was kept;
names as synced or as changed.  That is enough to distinguish a protocol with a barrier from the
same protocol without it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from logstore.testing.io_calls import Operation


@dataclass(eq=False)
class File:
    now: bytearray = field(default_factory=bytearray)
    sized: bytearray = field(default_factory=bytearray)  # zeros where no sync came since it grew
    synced: bytes = b""


@dataclass(eq=False)
class Folder:
    now: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)


class Disk:
    """Begins empty.  Paths are those of a trace: below its root."""

    def __init__(self) -> None:
        self.root = Folder()

    def _at(self, path: str) -> tuple[Folder, str]:
        folder = self.root
        *above, name = Path(path).parts
        for part in above:
            inner = folder.now[part]
            assert isinstance(inner, Folder)
            folder = inner
        return folder, name

    def find(self, path: str) -> File | Folder | None:
        if not path or path == ".":
            return self.root
        folder, name = self._at(path)
        return folder.now.get(name)

    def play(self, call: Operation) -> bool:
        """Whether the disk is another one now."""
        if call.kind == "mark" or not call.performed:
            return False
        if call.kind == "open":
            if call.flags & os.O_CREAT and self.find(call.path) is None:
                folder, name = self._at(call.path)
                folder.now[name] = File()
                return True
            return False
        if call.kind == "mkdir":
            folder, name = self._at(call.path)
            folder.now[name] = Folder()
        elif call.kind in ("unlink", "rmdir"):
            folder, name = self._at(call.path)
            folder.now.pop(name, None)
        elif call.kind == "rename":
            folder, name = self._at(call.path)
            target, new = self._at(call.target or "")
            target.now[new] = folder.now.pop(name)
        elif call.kind in ("pwrite", "truncate", "allocate", "sync", "datasync"):
            self._on(self.find(call.path), call)
        else:
            return False
        return True

    def _on(self, node: File | Folder | None, call: Operation) -> None:
        if isinstance(node, Folder):
            node.synced = dict(node.now)
        elif node is None:
            return  # it was renamed or removed: no name leads to it
        elif call.kind == "pwrite":
            data = (call.data or b"")[: call.done]
            self._grow(node, call.position + len(data))
            node.now[call.position : call.position + len(data)] = data
        elif call.kind == "truncate":
            self._grow(node, call.size)
            del node.now[call.size :], node.sized[call.size :]
        elif call.kind == "allocate":
            self._grow(node, call.position + call.size)
        else:
            node.synced = bytes(node.now)
            node.sized[:] = node.now

    @staticmethod
    def _grow(node: File, size: int) -> None:
        missing = bytes(max(0, size - len(node.now)))
        node.now += missing
        node.sized += missing

    def states(self) -> Iterator[tuple[str, dict[str, bytes | None]]]:
        """(name, path -> contents, None for a directory) of the six extremes."""
        for names in ("synced", "now"):
            for data in ("synced", "sized", "now"):
                tree: dict[str, bytes | None] = {}
                self._fill(tree, "", self.root, names, data)
                yield f"names {names}, data {data}", tree

    def _fill(
        self, tree: dict[str, bytes | None], above: str, folder: Folder, names: str, data: str
    ) -> None:
        for name, node in getattr(folder, names).items():
            path = f"{above}{name}"
            if isinstance(node, Folder):
                tree[path] = None
                self._fill(tree, f"{path}/", node, names, data)
            else:
                tree[path] = bytes(getattr(node, data))


def power_cuts(
    operations: Sequence[Operation],
) -> Iterator[tuple[int, str, dict[str, bytes | None], int]]:
    """(operations done, which extreme, the tree, marks before) for every change of the disk."""
    disk, marks = Disk(), 0
    for number, call in enumerate(operations):
        changed = disk.play(call)
        if call.kind == "mark":
            marks += 1
            changed = True  # the same disk, and one more promise
        if changed:
            for name, tree in disk.states():
                yield number + 1, name, tree, marks


def put(tree: dict[str, bytes | None], root: Path) -> None:
    """Make a directory hold just that."""
    root.mkdir()
    for path, content in tree.items():
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)
