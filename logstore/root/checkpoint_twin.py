"""CheckpointTwin: a copy of the offsets that logstore wrote into the root's checkpoints.

Kafka's checkpoints are plain text without a checksum: a flipped digit is a valid number, and a
broker that owns the directory for a while changes them.  The twin, ``checkpoints.ls``, makes both
visible.

Invariant: the twin is written before the checkpoints, with the checksum of each file before and
after the change.  So after a crash each checkpoint has one of the two checksums.  A checkpoint with
another checksum is a broker's or damaged: then the lower offset of checkpoint and twin counts, and
logstore's own state of the partitions is out of date.

A twin or checkpoint that cannot be read is ignored: recovery checks all records, and open succeeds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import NamedTuple

from logstore import _native
from logstore.files.directory import Directory
from logstore.files.small_file import MISREAD, with_checksum, without_checksum
from logstore.root.catalogue import Catalogue
from logstore.root.checkpoints import TopicPartition, parse_offsets

__all__ = ["CheckpointTwin", "Reconciled"]

log = logging.getLogger("logstore.checkpoint")

Offsets = dict[TopicPartition, int]


class Reconciled(NamedTuple):
    """The offsets of a checkpoint that may be used; `foreign`: a broker has written it since."""

    offsets: Offsets
    foreign: bool
    fault: str = ""  # why the checkpoint or the twin cannot be used


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointTwin:
    """For each checkpoint: the checksums it may have, and the offsets it was written with."""

    checksums: Mapping[str, tuple[int, ...]]
    offsets: Mapping[str, Offsets]

    NAME = "checkpoints.ls"

    @property
    def has_catalogue(self) -> bool:
        """Whether the root had a catalogue of topics when the twin was written, or before.

        The twin has the catalogue's name with no checksums: a user may edit the catalogue.
        """
        return Catalogue.NAME in self.checksums

    def write(self, directory: Directory) -> None:
        files = {
            name: {
                "checksums": self.checksums[name],
                "offsets": [[*key, offset] for key, offset in sorted(self.offsets[name].items())],
            }
            for name in self.checksums
        }
        body = json.dumps(files, separators=(",", ":")).encode()
        directory.replace(self.NAME, with_checksum(body))

    @classmethod
    def read(cls, directory: Directory) -> CheckpointTwin | None:
        """Return the twin; None if there is no file, an empty one if it cannot be read."""
        try:
            content = directory.read(cls.NAME, 1 << 27)
        except FileNotFoundError:
            return None
        try:
            files = json.loads(without_checksum(content))
            return cls(
                {name: tuple(map(int, file["checksums"])) for name, file in files.items()},
                {
                    name: {(str(t), int(n)): int(offset) for t, n, offset in file["offsets"]}
                    for name, file in files.items()
                },
            )
        except MISREAD as error:
            log.warning("%s cannot be read (%s): ignored", directory.path / cls.NAME, str(error))
            # Not None: a damaged twin must not make the checkpoints count as if there were no twin.
            return cls({}, {})

    @property
    def readable(self) -> bool:
        """Whether the file could be read."""
        return bool(self.checksums)

    @classmethod
    def reconcile(cls, twin: CheckpointTwin | None, directory: Directory, name: str) -> Reconciled:
        """Return the offsets of a checkpoint; the lower one if it and the twin differ."""
        content: bytes | None = None
        with contextlib.suppress(FileNotFoundError):
            content = directory.read(name, 1 << 26)
        offsets = {} if content is None else parse_offsets(content)
        if isinstance(offsets, str):
            log.warning("%s cannot be read (%s): ignored", directory.path / name, offsets)
            return Reconciled({}, False, offsets)
        # A directory of a broker that logstore has not written yet: the checkpoint alone counts.
        if twin is None:
            return Reconciled(offsets, False)
        if not twin.readable:
            return Reconciled({}, False, f"{cls.NAME} cannot be read")
        known = twin.checksums.get(name, ())
        if content is None:
            return Reconciled({}, False, "there is no such file" if known else "")
        # A row that only one of the two has is left out: without a row more of the log is read.
        ours = twin.offsets.get(name, {})
        lower = {key: min(offset, ours[key]) for key, offset in offsets.items() if key in ours}
        if _native.crc32c(content) in known:
            # The new contents, or the old ones if a crash prevented the change.
            return Reconciled(lower if len(known) > 1 else offsets, False)
        return Reconciled(lower, True)
