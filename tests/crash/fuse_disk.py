"""A disk in one file of a FUSE filesystem, which remembers every write and every flush.

A loop device on that file is a block device like any other: what a filesystem on it asks of the
disk arrives here in sequence.  Writes up to the last flush are durable, and of those after it any
part may be: `Journal.image` builds what a power cut would leave.

Implements the kernel's protocol (linux/fuse.h, 7.31), as far as one file needs it.  Linux, root.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import select
import socket
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path

DISK = "disk"
MAX_WRITE = 1 << 17
IN_HEADER = struct.Struct("<IIQQIIII")
OUT_HEADER = struct.Struct("<IiQ")
ATTRIBUTES = struct.Struct("<6Q10I")
ENTRY = struct.Struct("<4Q2I")
WRITE_IN = struct.Struct("<QQIIQII")
READ_IN = struct.Struct("<QQIIQII")

LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE = 1, 2, 3, 4, 14, 15, 16
STATFS, RELEASE, FSYNC, FLUSH, INIT, OPENDIR = 17, 18, 20, 25, 26, 27
RELEASEDIR, FSYNCDIR, ACCESS, INTERRUPT, DESTROY, BATCH_FORGET = 29, 30, 34, 36, 38, 42
NO_REPLY = (FORGET, BATCH_FORGET, INTERRUPT)
ENOENT, ENOSYS = 2, 38


@dataclass
class Journal:
    """The disk as it began, and what was done to it: writes, flushes (None) and marks (int)."""

    start: bytes
    entries: list[tuple[int, bytes] | int | None] = field(default_factory=list)

    def image(self, flush: int, others: list[int]) -> bytes:
        """All writes before entry `flush`, and of those after it the ones that are named."""
        disk = bytearray(self.start)
        for entry in self.entries[:flush]:
            if isinstance(entry, tuple):
                disk[entry[0] : entry[0] + len(entry[1])] = entry[1]
        for number in others:
            entry = self.entries[number]
            assert isinstance(entry, tuple)
            disk[entry[0] : entry[0] + len(entry[1])] = entry[1]
        return bytes(disk)

    def flushes(self) -> list[int]:
        """Where the flushes are."""
        return [number for number, entry in enumerate(self.entries) if entry is None]

    def writes_between(self, first: int, last: int) -> list[int]:
        """Where writes are."""
        return [n for n in range(first, last) if isinstance(self.entries[n], tuple)]


class Server:
    """Answers the kernel and, over a socket, the process that runs the workload.

    Two words are understood there: ``mark N`` puts a mark after everything so far, ``end FILE``
    writes the journal to a file.  Each is answered with ``ok``.
    """

    def __init__(self, disk: bytes, mount_point: Path, control: socket.socket) -> None:
        self.disk = bytearray(disk)
        self.journal = Journal(disk)
        self.control = control
        self.fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        mount(
            "disk",
            mount_point,
            "fuse",
            f"fd={self.fuse},rootmode=40000,user_id=0,group_id=0,allow_other",
        )

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([self.fuse, self.control], [], [])
            if self.fuse in ready:
                try:
                    request = os.read(self.fuse, MAX_WRITE + 4096)
                except OSError:
                    return  # unmounted
                self.answer(request)
            elif self.control in ready:
                words = self.control.recv(4096).split()
                if not words:
                    return
                if words[0] == b"mark":
                    self.journal.entries.append(int(words[1]))
                else:
                    with open(words[1], "wb") as file:
                        pickle.dump(self.journal, file)
                self.control.send(b"ok")

    def answer(self, request: bytes) -> None:
        _, opcode, unique, node, *_ = IN_HEADER.unpack_from(request)
        if opcode in NO_REPLY:
            return
        error, body = self.act(opcode, node, request[IN_HEADER.size :])
        header = OUT_HEADER.pack(OUT_HEADER.size + len(body), -error, unique)
        with contextlib.suppress(OSError):  # the request was given up
            os.write(self.fuse, header + body)

    def act(self, opcode: int, node: int, body: bytes) -> tuple[int, bytes]:
        if opcode == WRITE:
            _, offset, size, *_ = WRITE_IN.unpack_from(body)
            data = body[WRITE_IN.size : WRITE_IN.size + size]
            self.disk[offset : offset + size] = data
            self.journal.entries.append((offset, data))
            return 0, struct.pack("<II", size, 0)
        if opcode == READ:
            _, offset, size, *_ = READ_IN.unpack_from(body)
            return 0, bytes(self.disk[offset : offset + size])
        if opcode == FSYNC:
            self.journal.entries.append(None)
            return 0, b""
        if opcode == INIT:
            _, _, read_ahead, _ = struct.unpack_from("<4I", body)
            big_writes = 1 << 5
            return 0, struct.pack("<4I2H2I2H8I", 7, 31, read_ahead, big_writes, 16, 12, MAX_WRITE,
                                  1, 32, 0, *[0] * 8)  # fmt: skip
        if opcode == LOOKUP:
            if body.rstrip(b"\0") != DISK.encode():
                return ENOENT, b""
            return 0, ENTRY.pack(2, 0, 3600, 3600, 0, 0) + self.attributes(2)
        if opcode in (GETATTR, SETATTR):
            return 0, struct.pack("<QII", 3600, 0, 0) + self.attributes(node)
        if opcode in (OPEN, OPENDIR):
            return 0, struct.pack("<QII", 0, 0, 0)
        if opcode == STATFS:
            return 0, struct.pack("<5Q4I6I", 0, 0, 0, 0, 0, 4096, 255, 4096, 0, *[0] * 6)
        if opcode in (RELEASE, RELEASEDIR, FLUSH, FSYNCDIR, ACCESS, DESTROY):
            return 0, b""
        return ENOSYS, b""

    def attributes(self, node: int) -> bytes:
        mode = stat.S_IFDIR | 0o700 if node == 1 else stat.S_IFREG | 0o600
        size = 0 if node == 1 else len(self.disk)
        return ATTRIBUTES.pack(
            *(node, size, size // 512, 0, 0, 0), *(0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)
        )


_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: Path, kind: str, options: str = "") -> None:
    """mount(2)."""
    if _libc.mount(source.encode(), os.fsencode(target), kind.encode(), 0, options.encode()):
        number = ctypes.get_errno()
        raise OSError(number, f"mount {kind}: {os.strerror(number)}", str(target))


def unmount(target: Path) -> None:
    """umount2(2)."""
    if _libc.umount2(os.fsencode(target), 0):
        number = ctypes.get_errno()
        raise OSError(number, f"umount: {os.strerror(number)}", str(target))
