"""`logstore serve`: Kafka's protocol in front of a store.

The process is the store's one writer; other processes read the directory with readonly=True.  It
serves until SIGTERM or Ctrl-C, then finishes the requests under way and closes the store.  A second
signal closes the connections at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

import logstore
from logstore.cli import exits
from logstore.cli.session import InputFile, Session, pass_session, verb

if TYPE_CHECKING:
    from logstore.kafka.config import KafkaConfig
    from logstore.kafka.server import KafkaServer

__all__ = ["read_properties", "serve_verb"]

# Names of a broker's server.properties that mean nothing for one node: accepted and not used.
IGNORED = (
    *("broker.id", "node.id", "process.roles", "log.dir", "log.dirs", "broker.rack"),
    *("zookeeper.", "controller.", "inter.broker.", "offsets.topic.", "transaction.state.log."),
    *("replica.", "num.network.threads", "num.recovery.threads", "num.replica.", "socket.send."),
    *("socket.receive.", "group.coordinator.", "share.", "metadata.", "quota.", "background."),
    *("listener.security.protocol.map", "default.replication.factor", "min.insync.replicas"),
)
LISTENERS = "listeners"


@verb("serve")
@click.option(
    "--listen",
    multiple=True,
    metavar="HOST:PORT",
    help="The address to listen on; several are possible.  Default 127.0.0.1:9092.",
)
@click.option(
    "--advertise",
    metavar="HOST:PORT",
    help="The address that clients are sent to, behind port mapping.",
)
@click.option("--config-file", type=InputFile(), help="A server.properties, with Kafka's names.")
@click.option(
    "-c",
    "--config",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="One setting; before those of the file.",
)
@click.option(
    "--durability",
    type=click.Choice(["fsync", "os"]),
    default="fsync",
    show_default=True,
    help="When a record is acknowledged.",
)
@click.option(
    "--create-topic",
    "topics",
    multiple=True,
    metavar="NAME[:PARTITIONS]",
    help="Make a topic unless it is there.",
)
@click.option(
    "--maintenance/--no-maintenance",
    default=True,
    show_default=True,
    help="Retention, compaction and flush.ms, as the topics' settings have them.",
)
@click.option(
    "--ready-fd",
    type=int,
    metavar="N",
    help="Write the line of readiness to this descriptor and close it.",
)
@pass_session  # fmt: skip
def serve_verb(
    session: Session,
    listen: tuple[str, ...],
    advertise: str | None,
    config_file: str | None,
    settings: tuple[str, ...],
    durability: str,
    topics: tuple[str, ...],
    maintenance: bool,
    ready_fd: int | None,
) -> None:
    """Serve the store to Kafka's clients, until Ctrl-C or SIGTERM.

    The store is created if it is missing.  Kafka's producers, consumers and tools connect to the
    address without a change.  On a foreign address every client may read and delete everything.
    """
    began = time.monotonic()
    config, addresses = _configured(config_file, settings, advertise)
    with session.writing(create=True, durability=durability) as store:
        for text in topics:
            _create(store, text)
        bound = listen or addresses or ("127.0.0.1:9092",)
        with _started(store, bound, config, maintenance) as server:
            ready = {
                "ready": True,
                "listeners": {n: f"{h}:{p}" for n, (h, p) in server.addresses.items()},
                "pid": os.getpid(),
                "store": str(store.path),
                "ms": round((time.monotonic() - began) * 1000),
            }
            words = [
                f"logstore {logstore.__version__} serves {store.path}: {len(store)} topics, "
                f"durability {durability}, node {store.identity.node_id} of cluster "
                f"{store.identity.cluster_id}",
                f"ready on {server.bootstrap_servers} after {ready['ms']} ms",
            ]

            def announce() -> None:
                if session.output.terminal:
                    session.output.one(ready, words=words)
                else:
                    click.echo(json.dumps(ready))
                session.output.flush()
                _tell(ready_fd, ready)

            _serve(server, announce)


def _configured(
    path: str | None, settings: tuple[str, ...], advertise: str | None
) -> tuple[KafkaConfig, tuple[str, ...]]:
    """Return the settings of the listener and the addresses that the file has."""
    from logstore.kafka.config import KafkaConfig

    given: dict[str, str] = {}
    if path is not None:
        given |= read_properties(Path(path).read_text("utf-8"))
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"-c takes NAME=VALUE, not {text!r}")
        given[name.strip()] = value.strip()
    if advertise:
        given["advertised.listeners"] = advertise
    addresses = tuple(each.strip() for each in given.pop(LISTENERS, "").split(",") if each.strip())
    unused = sorted(name for name in given if name.startswith(IGNORED))
    for name in unused:
        del given[name]
    if unused:
        click.echo(f"not used by one node: {', '.join(unused)}", err=True)
    return KafkaConfig.of(given), addresses


def read_properties(text: str) -> dict[str, str]:
    r"""Return the settings of a server.properties: ``name=value``, ``#``, ``\`` at a line's end."""
    found: dict[str, str] = {}
    line = ""
    for piece in text.splitlines():
        line += piece.strip() if line else piece.lstrip()
        if line.startswith(("#", "!")) or not line:
            line = ""
            continue
        if line.endswith("\\"):
            line = line[:-1]
            continue
        name, separator, value = line.partition("=")
        if not separator:
            name, separator, value = line.partition(":")
        if not separator:
            raise click.UsageError(f"a setting is name=value, not {line!r}")
        found[name.strip()] = value.strip()
        line = ""
    return found


def _create(store: logstore.Store, text: str) -> None:
    name, _, count = text.partition(":")
    if count and not count.isdigit():
        raise click.UsageError(f"--create-topic takes NAME[:PARTITIONS], not {text!r}")
    store.create_topic(name, partitions=int(count or 1), exist_ok=True)


@contextlib.contextmanager
def _started(
    store: logstore.Store, addresses: tuple[str, ...], config: KafkaConfig, maintenance: bool
) -> Iterator[KafkaServer]:
    from logstore.kafka.server import KafkaServer

    server = KafkaServer(store, addresses, config=config, maintain=maintenance)
    try:
        server.start()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise exits.CommandError(exits.BUSY, str(error.strerror)) from None
        raise
    try:
        yield server
    finally:
        _notify("STOPPING=1")
        server.close()


def _serve(server: KafkaServer, announce: Callable[[], None]) -> None:
    """Announce that the server is ready, and wait for a signal."""
    stop = threading.Event()
    signals = 0

    def caught(number: int, frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        stop.set()
        if signals > 1:
            server.abort()

    before = {number: signal.signal(number, caught) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        announce()
        _notify(f"READY=1\nSTATUS=ready on {server.bootstrap_servers}")
        while not stop.wait(1.0):
            pass
        server.close()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if signals > 1:
        raise exits.CommandError(exits.INTERRUPTED, "connections were closed at once")


def _tell(descriptor: int | None, ready: dict[str, Any]) -> None:
    if descriptor is not None:
        with os.fdopen(descriptor, "w") as out:
            out.write(json.dumps(ready) + "\n")


def _notify(state: str) -> None:
    """Tell systemd, if it started us."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
