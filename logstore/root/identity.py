"""NodeIdentity: node and cluster id of a root directory, in meta.properties."""

from __future__ import annotations

import dataclasses
import time

from logstore.errors import NotALogError
from logstore.files.directory import Directory
from logstore.log.topic_id import new_uuid, uuid_text

__all__ = ["NodeIdentity"]


@dataclasses.dataclass(frozen=True, slots=True)
class NodeIdentity:
    """The node that a log directory belongs to: ``meta.properties``."""

    cluster_id: str
    node_id: int
    directory_id: str

    NAME = "meta.properties"
    MAX_BYTES = 65536

    @classmethod
    def new(cls) -> NodeIdentity:
        return cls(uuid_text(new_uuid()), 1, uuid_text(new_uuid()))

    def write(self, directory: Directory) -> None:
        lines = (
            "#",
            f"#{time.strftime('%a %b %d %H:%M:%S UTC %Y', time.gmtime())}",
            f"cluster.id={self.cluster_id}",
            f"directory.id={self.directory_id}",
            f"node.id={self.node_id}",
            "version=1",
        )
        directory.replace(self.NAME, ("\n".join(lines) + "\n").encode())

    @classmethod
    def read(cls, directory: Directory) -> NodeIdentity | None:
        """Return the identity, of version 0 or 1; None if there is no file.

        Raise NotALogError if the node id is not a number, or if the file is longer than MAX_BYTES:
        an identity of its first bytes could lack the cluster id.
        """
        try:
            content = directory.read(cls.NAME, cls.MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        if len(content) > cls.MAX_BYTES:
            raise NotALogError(f"{directory.path / cls.NAME} is longer than {cls.MAX_BYTES} bytes")
        settings = {}
        for line in content.decode("utf-8", "replace").splitlines():
            name, equals, value = line.partition("=")
            if equals and not line.lstrip().startswith(("#", "!")):
                settings[name.strip()] = value.strip()
        # Version 0 of a ZooKeeper broker has broker.id.
        node = settings.get("node.id", settings.get("broker.id", "-1"))
        try:
            return cls(settings.get("cluster.id", ""), int(node), settings.get("directory.id", ""))
        except ValueError:
            raise NotALogError(
                f"{directory.path / cls.NAME}: node.id must be a number, not {node!r}"
            ) from None
