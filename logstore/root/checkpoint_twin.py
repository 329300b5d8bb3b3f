"""CheckpointTwin: what we last wrote into the root's checkpoints, with a checksum.

Kafka's checkpoints are plain text: a flipped digit looks like any other number, and a broker that
has owned the directory since leaves them changed without a word to us.  ``checkpoints.ls`` is
written before they are, and names the checksum of each as it was and as it will be; so whatever a
crash leaves in between is one of the two.  Anything else is not ours: the lower of both numbers
counts, and what we noted about the partitions is out of date.

An unreadable twin or checkpoint says nothing: everything is checked, and nobody is kept from
opening.
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
    """A checkpoint as it may be believed; `foreign`: someone else has written it since."""

    offsets: Offsets
    foreign: bool
    fault: str = ""  # why it, or the twin, says nothing


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointTwin:
    """Of each checkpoint: the checksums it may have, and the offsets it was written with."""

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
        """The twin; None when there is none.  One that cannot be read knows no checkpoint."""
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
            return cls({}, {})

    @property
    def readable(self) -> bool:
        """Whether it says anything."""
        return bool(self.checksums)

    @classmethod
    def reconcile(cls, twin: CheckpointTwin | None, directory: Directory, name: str) -> Reconciled:
        """A checkpoint's offsets, the lower one where it and the twin differ."""
        content: bytes | None = None
        with contextlib.suppress(FileNotFoundError):
            content = directory.read(name, 1 << 26)
        offsets = {} if content is None else parse_offsets(content)
        if isinstance(offsets, str):
            log.warning("%s cannot be read (%s): ignored", directory.path / name, offsets)
            return Reconciled({}, False, offsets)
        if twin is None:
            return Reconciled(offsets, False)
        if not twin.readable:
            return Reconciled({}, False, f"{cls.NAME} cannot be read")
        known = twin.checksums.get(name, ())
        if content is None:
            return Reconciled({}, False, "there is no such file" if known else "")
        ours = twin.offsets.get(name, {})
        lower = {key: min(offset, ours[key]) for key, offset in offsets.items() if key in ours}
        if _native.crc32c(content) in known:
            # As it is, or as it was before a crash came between the two.
            return Reconciled(lower if len(known) > 1 else offsets, False)
        return Reconciled(lower, True)
