"""ClusterUnderTest: nodes in processes of their own on loopback, and every fault as a method.

::

    with ClusterUnderTest(directory, nodes=3, zookeeper=servers) as cluster:
        produce_to(cluster.bootstrap_servers)
        cluster.kill(cluster.tree.await_leader("orders").leader)

Clients connect to the nodes themselves.  A node connects to another node, and to each ZooKeeper
server, through a `Link` of its own, so that a test can cut one pair of nodes, in one way or in
both, or a node from its metadata only.  A node finds the links of its peers in the setting
``logstore.peer.addresses``.

Without `zookeeper` every node is a cluster of its own and has no links.

The processes and the links end with `close`.  The directories of the nodes are kept.  One thread
uses the object; its `links` and its `tree` may be used by others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from logstore.testing.cluster_tree import ClusterTree
from logstore.testing.link import Link, Links
from logstore.testing.node_process import HOST, NodeProcess, free_ports

__all__ = ["ClusterUnderTest", "ZooKeeperServers"]

PEER_ADDRESSES = "logstore.peer.addresses"
FILLER = "filler"
PIECE = bytes(1 << 16)

# Short times: a fail-over takes as long as a session.
DEFAULTS: Mapping[str, str] = {
    "zookeeper.session.timeout.ms": "3000",
    "replica.lag.time.max.ms": "2000",
    "replica.fetch.wait.max.ms": "200",
    "replica.fetch.backoff.ms": "200",
    "offsets.topic.num.partitions": "2",
    "transaction.state.log.num.partitions": "2",
}


class ZooKeeperServers(Protocol):
    """The servers of a ZooKeeper, by number; a test brings them."""

    @property
    def ports(self) -> Mapping[int, int]: ...

    def launch(self, number: int) -> None: ...

    def await_serving(self, number: int) -> None: ...

    def kill(self, number: int) -> None: ...


class ClusterUnderTest:
    """A cluster whose nodes, network, disks and metadata can fail.  See the module."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        nodes: int = 3,
        *,
        zookeeper: ZooKeeperServers | None = None,
        settings: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        linked: bool = True,
        disk_bytes: Mapping[int, int] | None = None,
    ) -> None:
        """Start the nodes and wait until they are ready.

        `settings` and `arguments` are those of every node.  `linked`: whether nodes reach each
        other and ZooKeeper through links.  `disk_bytes`: the nodes whose disk is a tmpfs of that
        size; PermissionError unless this process may mount one.
        """
        self.directory = Path(directory)
        self.numbers = range(1, nodes + 1)
        self.zookeeper = zookeeper
        self.links: dict[tuple[int, int], Link] = {}  # (from, to)
        self.metadata_links: dict[tuple[int, int], Link] = {}  # (node, server)
        self._linked = linked and zookeeper is not None
        self._down: set[int] = set()  # ZooKeeper servers that a test has killed
        # Several clusters of a test run share a ZooKeeper.
        self._root = f"/test-{uuid.uuid4().hex[:12]}"
        self._closing = contextlib.ExitStack()
        self._tree: ClusterTree | None = None
        self._ports = dict(zip(self.numbers, free_ports(nodes), strict=True))
        self.nodes: dict[int, NodeProcess] = {}
        with contextlib.ExitStack() as closing:
            self._links = closing.enter_context(Links())
            for number, size in (disk_bytes or {}).items():
                closing.enter_context(_small_disk(self.home(number), size))
            if zookeeper is not None:
                self._tree = ClusterTree(self._direct(), self._root)
                closing.callback(self._tree.close)
            if self._linked:
                self._make_links()
            for number in self.numbers:
                self.home(number).mkdir(parents=True, exist_ok=True)
                command = self._command(number, {**DEFAULTS, **(settings or {})}, arguments)
                self.nodes[number] = NodeProcess(number, command, self.log(number))
                closing.callback(self.nodes[number].close)
            for node in self.nodes.values():
                node.begin()
            for node in self.nodes.values():
                node.await_ready()
            self._closing = closing.pop_all()

    def __repr__(self) -> str:
        return f"<ClusterUnderTest {list(self.nodes.values())}>"

    def close(self) -> None:
        """End the processes with SIGKILL, close the links, unmount the disks."""
        self._closing.close()

    def __enter__(self) -> ClusterUnderTest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what there is ----

    @property
    def bootstrap_servers(self) -> str:
        """The addresses of all nodes, for Kafka's clients."""
        return ",".join(map(self.address, self.numbers))

    @property
    def tree(self) -> ClusterTree:
        """The metadata tree; only with ZooKeeper."""
        assert self._tree is not None, "a cluster without ZooKeeper has no tree"
        return self._tree

    def address(self, number: int) -> str:
        """Return the address of a node for clients."""
        return f"{HOST}:{self._ports[number]}"

    def home(self, number: int) -> Path:
        """Return the directory of a node; with `disk_bytes` it is its disk."""
        return self.directory / f"node-{number}"

    def log(self, number: int) -> Path:
        """Return the file with what a node wrote to stderr."""
        return self.directory / f"node-{number}.log"

    def store(self, number: int) -> Path:
        """Return the directory of the store of a node."""
        return self.home(number) / "store"

    @property
    def up(self) -> list[int]:
        """The nodes that run and are not paused."""
        return [n for n, node in self.nodes.items() if node.running and not node.paused]

    # ---- processes ----

    def kill(self, number: int) -> None:
        """SIGKILL a node."""
        self.nodes[number].kill()

    def start(self, number: int) -> None:
        """Start a node that is down, and wait until it is ready."""
        self.nodes[number].start()

    def pause(self, number: int) -> None:
        """SIGSTOP a node."""
        self.nodes[number].pause()

    def resume(self, number: int) -> None:
        """SIGCONT a node."""
        self.nodes[number].resume()

    def terminate(self, number: int) -> None:
        """SIGTERM a node: a controlled shutdown.  RuntimeError unless its exit status is 0."""
        self.nodes[number].terminate()

    def terminate_all(self) -> None:
        """SIGTERM all nodes at once, and wait for them."""
        running = [node for node in self.nodes.values() if node.running]
        for node in running:
            node.signal(signal.SIGTERM)
        for node in running:
            node.await_end()

    # ---- the network ----

    def isolate(self, number: int) -> None:
        """Cut a node from all other nodes and from the metadata.  Clients still reach it."""
        for other in self.numbers:
            if other != number:
                self.cut(number, other)
        self.cut_metadata(number)

    def cut(self, source: int, target: int, *, one_way: bool = False) -> None:
        """Let nothing pass between two nodes; `one_way`: only nothing from source to target.

        One way of the network is a part of two links: requests of the source to the target, and
        answers of the source to requests of the target.
        """
        self._check_linked()
        self.links[source, target].drop("there" if one_way else "both")
        self.links[target, source].drop("back" if one_way else "both")

    def cut_metadata(self, number: int) -> None:
        """Cut a node from every ZooKeeper server."""
        for link in self._of_metadata(number):
            link.drop()

    def cut_peers(self, number: int) -> None:
        """Cut a node from all other nodes, and not from the metadata."""
        for other in self.numbers:
            if other != number:
                self.cut(number, other)

    def slow(self, source: int, target: int, ms: float) -> None:
        """Delay what passes between two nodes, in either way."""
        self._check_linked()
        self.links[source, target].delay(ms / 1000)
        self.links[target, source].delay(ms / 1000)

    def reset(self, source: int, target: int) -> None:
        """Reset the connections of two nodes, and new ones too."""
        self._check_linked()
        self.links[source, target].reset()
        self.links[target, source].reset()

    def heal(self) -> None:
        """Let everything pass on every link."""
        for link in (*self.links.values(), *self.metadata_links.values()):
            link.heal()

    # ---- the metadata ----

    def expire_session(self, number: int) -> None:
        """Cut a node from the metadata until its session has ended; it runs all the time."""
        before = self.tree.nodes()
        assert number in before, f"node {number} is not registered: {before}"
        self.cut_metadata(number)
        self.tree.wait(
            lambda: number not in self.tree.nodes(), f"the session of node {number} does not end"
        )
        for link in self._of_metadata(number):
            link.heal()

    def kill_zookeeper(self, *servers: int) -> None:
        """SIGKILL ZooKeeper servers; all of them if none is named."""
        zookeeper = self._zookeeper()
        for number in servers or sorted(set(zookeeper.ports) - self._down):
            zookeeper.kill(number)
            self._down.add(number)

    def restart_zookeeper(self) -> None:
        """Start the ZooKeeper servers that are down, and wait until they serve."""
        zookeeper = self._zookeeper()
        for number in sorted(self._down):
            zookeeper.launch(number)
        for number in sorted(self._down):
            zookeeper.await_serving(number)
        self._down.clear()

    # ---- disks ----

    def fill_disk(self, number: int) -> None:
        """Fill the disk of a node that has one of its own, see `disk_bytes`."""
        assert self.home(number).is_mount(), f"node {number} shares its disk with this process"
        descriptor = os.open(self.home(number) / FILLER, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            for size in (len(PIECE), 4096, 1):
                with contextlib.suppress(OSError):
                    while os.write(descriptor, PIECE[:size]):
                        pass
        finally:
            os.close(descriptor)

    def free_disk(self, number: int) -> None:
        """Undo `fill_disk`."""
        (self.home(number) / FILLER).unlink()

    def flip_bit(
        self, number: int, topic: str, partition: int = 0, *, segment: int = -1, place: float = 0.5
    ) -> tuple[Path, int]:
        """Flip a bit in a segment of a node that is down; return the file and the position.

        `segment` counts the segments by base offset; `place` is a part of its length.
        """
        self._check_down(number)
        files = sorted((self.store(number) / f"{topic}-{partition}").glob("*.log"))
        path = files[segment]
        data = bytearray(path.read_bytes())
        # A preallocated file ends in zeros that are not part of the log.
        position = int(len(data.rstrip(b"\0")) * place)
        data[position] ^= 1 << (position % 8)
        path.write_bytes(data)
        return path, position

    def wipe(self, number: int) -> None:
        """Delete the store of a node that is down."""
        self._check_down(number)
        shutil.rmtree(self.store(number))

    # ---- making ----

    def _direct(self) -> str:
        return ",".join(f"{HOST}:{port}" for port in self._zookeeper().ports.values())

    def _make_links(self) -> None:
        for source in self.numbers:
            for target in self.numbers:
                if source != target:
                    link = self._links.link(self.address(target), f"{source} to {target}")
                    self.links[source, target] = link
            for server, port in self._zookeeper().ports.items():
                link = self._links.link(f"{HOST}:{port}", f"{source} to ZooKeeper {server}")
                self.metadata_links[source, server] = link

    def _command(
        self, number: int, settings: Mapping[str, str], arguments: Sequence[str]
    ) -> list[str]:
        command = [sys.executable, "-m", "logstore", "-s", str(self.store(number)), "serve"]
        command += ["--listen", self.address(number), *arguments]
        if self.zookeeper is None:
            return command
        servers = self._direct()
        given = dict(settings)
        if self._linked:
            servers = ",".join(link.address for link in self._of_metadata(number))
            given[PEER_ADDRESSES] = ",".join(
                f"{target}={link.address}"
                for (source, target), link in self.links.items()
                if source == number
            )
        command += ["--node", str(number), "--zookeeper", servers + self._root]
        for name, value in given.items():
            command += ["-c", f"{name}={value}"]
        return command

    # ---- conditions ----

    def _zookeeper(self) -> ZooKeeperServers:
        assert self.zookeeper is not None, "this cluster has no ZooKeeper"
        return self.zookeeper

    def _of_metadata(self, number: int) -> Iterable[Link]:
        self._check_linked()
        return [link for (node, _), link in self.metadata_links.items() if node == number]

    def _check_linked(self) -> None:
        assert self._linked, "this cluster has no links"

    def _check_down(self, number: int) -> None:
        assert not self.nodes[number].running, f"node {number} runs"


@contextlib.contextmanager
def _small_disk(path: Path, size: int) -> Iterator[None]:
    """Mount a tmpfs of some size.  PermissionError if this process may not."""
    path.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "logstore-test", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise PermissionError(f"cannot mount a tmpfs of {size} bytes: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
