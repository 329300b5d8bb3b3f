"""CleanShutdown: the marker that every partition below a root was closed cleanly, and its twin."""

from __future__ import annotations

import contextlib
import dataclasses

from logstore import _native
from logstore.files.directory import Directory

__all__ = ["CleanShutdown"]


@dataclasses.dataclass(frozen=True, slots=True)
class CleanShutdown:
    """How the last owner left a root.

    `clean`: the owner closed all partitions cleanly.  `foreign`: a broker owned the directory after
    logstore, so logstore's own side files of the partitions are out of date.

    A broker removes the marker when it starts and writes its own when it ends; it ignores the twin.
    Invariant: logstore writes the twin after the marker and removes it before the marker, each
    durably.  So a kill or a power cut of logstore leaves a marker without a twin, or none of both.
    A twin without a marker, or with another one, shows that a broker was here.  A broker that
    starts after a crash of logstore and then crashes leaves no trace in these files.
    """

    clean: bool
    foreign: bool

    NAMES = MARKER, TWIN = ".kafka_cleanshutdown", "logstore.clean"
    FOREIGN = b"foreign\n"  # a twin that matches no marker: a broker owned the directory
    # A broker writes the epoch of its registration; -1 means that there is none.
    OURS = b'{"version":0,"brokerEpoch":-1}'

    @classmethod
    def read(cls, directory: Directory) -> CleanShutdown:
        # The twin is read twice: a reader has no lock, and an owner may open or close in between.
        before = cls._content(directory, cls.TWIN)
        marker = cls._content(directory, cls.MARKER)
        twin = cls._content(directory, cls.TWIN)
        if marker is None:
            # A writer may open or close during this read: then the twin exists only once.
            return cls(clean=False, foreign=before is not None and twin is not None)
        if twin is None and marker == cls.OURS:
            return cls(clean=False, foreign=False)
        # A broker writes another marker; the twin then matches no longer.
        return cls(clean=True, foreign=twin != cls._twin_of(marker))

    @staticmethod
    def _content(directory: Directory, name: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return directory.read(name, 4096)
        return None

    @staticmethod
    def _twin_of(marker: bytes) -> bytes:
        return b"%08x\n" % _native.crc32c(marker)

    @classmethod
    def clear(cls, directory: Directory) -> None:
        """Remove the marker durably, and its twin before it, before anything is changed.

        A twin without a marker means that a broker removed the marker.  A crash of ours must never
        leave that, so the twin is removed first.
        """
        directory.unlink(cls.TWIN)
        if directory.exists(cls.MARKER):
            directory.sync()
            directory.unlink(cls.MARKER)
        directory.sync()

    @classmethod
    def clear_for_partition(cls, directory: Directory) -> None:
        """Remove the marker because one partition below the root is about to change.

        A twin that records a broker stays: the store needs it at its next open.
        """
        if not directory.exists(cls.MARKER):
            return
        if cls._content(directory, cls.TWIN) == cls.FOREIGN:
            directory.unlink(cls.MARKER)
            directory.sync()
        else:
            cls.clear(directory)

    @classmethod
    def write(cls, directory: Directory) -> None:
        """Write the marker and its twin.  The caller has made all partitions durable."""
        # A crash between the two leaves our marker without a twin, which `read` takes as not clean.
        directory.replace(cls.MARKER, cls.OURS)
        directory.replace(cls.TWIN, cls._twin_of(cls.OURS))
