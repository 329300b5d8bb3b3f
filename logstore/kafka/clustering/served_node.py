"""ServedNode: a node of a cluster with its listener.

The listener's address is bound first, because the registration names it.  Clients that connect
before the node is registered wait in the backlog.  At the end the node gives its leaderships away
while it still serves; then the listener is closed, then the store.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from logstore.closeable import Closeable
from logstore.config import ConfigError
from logstore.kafka.clustering.coordinating import Coordinating
from logstore.kafka.clustering.peers import TcpPeers
from logstore.kafka.config import KafkaConfig
from logstore.kafka.network.acceptor import bind, parse_address, parse_advertised
from logstore.kafka.server import KafkaServer
from logstore.replication.config import NodeConfig
from logstore.replication.metadata import Metadata
from logstore.replication.node import Node
from logstore.store.store import Store

__all__ = ["ServedNode"]


class ServedNode(Closeable):
    """A member of a cluster that serves Kafka's clients.  It owns the store."""

    def __init__(
        self,
        store: Store,
        *,
        node_id: int,
        metadata: Callable[[], Metadata],
        listen: str | Sequence[str | socket.socket] = "127.0.0.1:0",
        config: KafkaConfig | Mapping[str, Any] | None = None,
        node_config: NodeConfig | Mapping[str, Any] | None = None,
        maintain: bool = False,
    ) -> None:
        settings = KafkaConfig.of(config)
        listeners = bind(
            [listen] if isinstance(listen, str) else listen, settings.socket_listen_backlog_size
        )
        host, port = listeners[0].address
        if settings.advertised_listeners:
            host, port = parse_advertised(settings.advertised_listeners)
        node_settings = NodeConfig.of(node_config)
        self._addresses = _peer_addresses(node_settings.logstore_peer_addresses)
        peers = TcpPeers(node_id, self._address, node_settings.replica_socket_timeout_ms / 1000)
        self.node = Node(
            store,
            node_id=node_id,
            metadata=metadata,
            peers=peers,
            config=node_settings,
            host=host,
            port=port,
        )
        self._coordinating = Coordinating(self.node, peers)
        self.server = KafkaServer(
            store,
            [each.socket for each in listeners],
            config=settings,
            maintain=maintain,
            node=self.node,
        )
        # A client without a connection asks the nodes that it knows for the leaders.
        self.node.when_in_doubt(self.server.abort)

    def _address(self, node: int) -> tuple[str, int] | None:
        found = self._addresses.get(node)
        if found is not None:
            return found
        registered = self.node.image.nodes.get(node)
        return None if registered is None else (registered.host, registered.port)

    def start(self, timeout: float = 30.0) -> Self:
        """Register, then serve.  Return when clients can connect."""
        self.node.start(timeout)
        self._coordinating.start()
        try:
            self.server.start()
        except BaseException:
            self._coordinating.close()
            self.node.close()
            raise
        return self

    def __enter__(self) -> Self:
        return self.start()

    def close(self) -> None:
        """Give the leaderships away, close the listener, then the store."""
        self.node.step_down()
        self.server.close()
        self._coordinating.close()
        self.node.close()

    def kill(self) -> None:
        """End as if the process were killed: nothing is written, and nobody is told."""
        self.server.abort()
        self.node.kill()
        self.server.close(0)
        self._coordinating.close()


def _peer_addresses(text: str) -> dict[int, tuple[str, int]]:
    """Return the addresses of ``2=host:port,3=host:port``."""
    found = {}
    for each in filter(None, (part.strip() for part in text.split(","))):
        number, equals, address = each.partition("=")
        if not equals or not number.isdigit():
            raise ConfigError(f"logstore.peer.addresses has NODE=HOST:PORT, not {each!r}")
        _, host, port = parse_address(address)
        found[int(number)] = host, port
    return found
