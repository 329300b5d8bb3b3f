"""ClusterMember: the node of a cluster that a store is, in logstore.member.

What is appended to the log of a member without its cluster is cut when the node starts again: the
leader does not have it.  So a directory with this file is opened only as a node, or readonly.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import NamedTuple

from logstore.files.directory import Directory
from logstore.files.small_file import MISREAD, with_checksum, without_checksum

__all__ = ["ClusterMember"]


class ClusterMember(NamedTuple):
    """The ids of a cluster and of a node."""

    cluster_id: str
    node_id: int

    @classmethod
    def read(cls, root: str | os.PathLike[str]) -> ClusterMember | None:
        """Return the member that a directory is; None if it is a store of its own.

        The ids of a damaged file are not known: it still says that there is a cluster.
        """
        try:
            directory = Directory(root)
        except FileNotFoundError:
            return None
        try:
            content = directory.read(MEMBER_NAME)
        except FileNotFoundError:
            return None
        finally:
            directory.close()
        try:
            fields = json.loads(without_checksum(content))
            return cls(str(fields["cluster"]), int(fields["node"]))
        except MISREAD:
            return cls("of an unknown name", -1)

    def write(self, directory: Directory) -> None:
        """Make a directory that of this member."""
        fields = {"format": 1, "cluster": self.cluster_id, "node": self.node_id}
        body = json.dumps(fields, separators=(",", ":"))
        directory.replace(MEMBER_NAME, with_checksum(body.encode()))

    @staticmethod
    def remove(directory: Directory) -> None:
        """Make a directory that of a store of its own."""
        with contextlib.suppress(FileNotFoundError):
            directory.unlink(MEMBER_NAME)
        directory.sync()


MEMBER_NAME = "logstore.member"
