"""`logstore serve`: Kafka's protocol in front of a store.

The process is the store's one writer; other processes read the directory with readonly=True.  It
serves until SIGTERM or Ctrl-C, then finishes the requests under way and closes the store.  A second
signal closes the connections at once.  SIGHUP opens the request log again; SIGUSR1 writes the
metrics to stderr.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import logging.handlers
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import click

import logstore
from logstore.cli import exits
from logstore.cli.output import forget_stdout
from logstore.cli.server_properties import ServerProperties, read_properties
from logstore.cli.session import InputFile, Integer, Session, durability_option, pass_session, verb
from logstore.cli.systemd import listening_sockets, notify, reloading, watchdog_seconds

if TYPE_CHECKING:
    from logstore.kafka.clustering.served_node import ServedNode
    from logstore.kafka.config import KafkaConfig
    from logstore.kafka.server import KafkaServer

__all__ = ["serve_verb"]

DEFAULT = "127.0.0.1:9092"
LOOK_SECONDS = 1.0  # how often the event loop is looked at


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
@durability_option("When a record is acknowledged.")
@click.option(
    "--node",
    "node_id",
    type=Integer(0, (1 << 31) - 1),
    metavar="N",
    help="The number of this node in a cluster; needs --zookeeper.",
)
@click.option(
    "--zookeeper",
    metavar="HOST:PORT[,...][/CHROOT]",
    help="Be a node of the cluster whose metadata is there.",
)
@click.option("--rack", metavar="NAME", help="The rack of this node: replicas are spread.")
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
    "--control-listen",
    "control",
    metavar="HOST:PORT",
    help="A second address for operators, with its own threads and limits; no records.",
)
@click.option(
    "--metrics",
    metavar="[HOST:]PORT",
    help="Serve /metrics for Prometheus and /health over HTTP.  Without a host: loopback.",
)
@click.option(
    "--ui", type=Integer(0, 65535), metavar="PORT", help="Serve the page of `logstore ui`, too."
)
@click.option(
    "--request-log",
    type=click.Path(dir_okay=False),
    help="Append a line of JSON for each request to this file; no record data.",
)
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="SPEC",
    help="Misbehave, to test clients: fail:Produce,error=NOT_LEADER_OR_FOLLOWER,times=3 or "
    "delay:Fetch,seconds=0.5 or drop:EndTxn,after=true.",
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
    node_id: int | None,
    zookeeper: str | None,
    rack: str | None,
    topics: tuple[str, ...],
    maintenance: bool,
    control: str | None,
    metrics: str | None,
    ui: int | None,
    request_log: str | None,
    faults: tuple[str, ...],
    ready_fd: int | None,
) -> None:
    """Serve the store to Kafka's clients, until Ctrl-C or SIGTERM.

    The store is created if it is missing.  Kafka's producers, consumers and tools connect to the
    address without a change.  On a foreign address every client may read and delete everything.
    """
    began = time.monotonic()
    # Before the store is opened: a wrong setting must not create a directory.
    properties = _properties(config_file, settings, advertise, zookeeper, node_id, rack)
    member = properties.member
    if topics and member:
        raise click.UsageError("--create-topic is for one node; in a cluster: kafka-topics, or "
                               "`logstore cluster create`")  # fmt: skip
    from logstore.kafka.config import KafkaConfig  # slow to import, as are those below
    from logstore.kafka.server import KafkaServer

    config = KafkaConfig.of(properties.listener)
    _check_descriptor(ready_fd)
    made = [_topic(text) for text in topics]
    _check_listener(config, faults)
    bound: list[str | socket.socket] = [*listening_sockets(), *(listen or properties.addresses)]
    bound = bound or [DEFAULT]
    if not os.path.lexists(session.path):
        with _busy_if_taken():
            _check_addresses(bound, control, metrics, ui)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(_Signals())
        store = stack.enter_context(
            session.writing(
                create=True,
                durability=durability,
                config=properties.topics,
                alone=member is None,
            )
        )
        for name, count in made:
            store.create_topic(name, partitions=count, exist_ok=True)
        handler = stack.enter_context(_request_log(request_log)) if request_log else None
        served = None
        if member is None:
            server = KafkaServer(store, bound, config=config, maintain=maintenance)
        else:
            from logstore.kafka.clustering.served_node import ServedNode

            with _busy_if_taken():
                served = ServedNode(
                    store,
                    node_id=member.node_id,
                    metadata=member.session,
                    listen=bound,
                    config=config,
                    node_config=member.settings,
                    maintain=maintenance,
                )
            server = served.server
        for spec in faults:
            server.faults.add(spec)
        stack.enter_context(_started(server if served is None else served))
        ready = {
            "ready": True,
            "listeners": {name: _shown(address) for name, address in server.addresses.items()},
            "pid": os.getpid(),
            "store": str(store.path),
        }
        if member is not None:
            ready |= {"node": member.node_id, "zookeeper": member.zookeeper}
        ready |= stack.enter_context(_neighbours(server, control, metrics, ui))
        ready["ms"] = round((time.monotonic() - began) * 1000)
        stack.enter_context(_named(store.path, ready))

        def announce() -> None:
            # It serves also if nobody reads the line: a pipe is closed, or a disk is full.
            try:
                if session.output.terminal:
                    session.output.one(ready, words=_words(store, durability, ready))
                else:
                    click.echo(json.dumps(ready))
                session.output.flush()
            except OSError as error:
                _complain(error)
                forget_stdout()
            try:
                _tell(ready_fd, ready)
            except OSError as error:
                _complain(error)

        close = server.close if served is None else served.close
        _serve(server, announce, handler, close, signals)


def _words(store: logstore.Store, durability: str, ready: dict[str, Any]) -> list[str]:
    """Return what a person at a terminal reads."""
    others = [f"{name} on {ready[name]}" for name in ("metrics", "ui") if name in ready]
    return [
        f"logstore {logstore.__version__} serves {store.path}: {len(store)} topics, "
        f"durability {durability}, node {store.identity.node_id} of cluster "
        f"{store.identity.cluster_id}",
        *others,
        f"ready on {', '.join(ready['listeners'].values())} after {ready['ms']} ms",
    ]


def _shown(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# ---- settings ----


def _properties(
    path: str | None,
    settings: tuple[str, ...],
    advertise: str | None,
    zookeeper: str | None,
    node_id: int | None,
    rack: str | None,
) -> ServerProperties:
    """Return the settings of the file, of ``-c`` and of the options; the last one counts."""
    given: dict[str, str] = {}
    if path is not None:
        try:
            given |= read_properties(Path(path).read_text("utf-8"))
        except UnicodeDecodeError as error:
            raise click.UsageError(f"{path} is no text in UTF-8: {error.reason}") from None
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"-c takes NAME=VALUE, not {text!r}")
        given[name.strip()] = value.strip()  # after the file: -c wins
    if advertise:
        given["advertised.listeners"] = advertise
    if zookeeper:
        given["zookeeper.connect"] = zookeeper
    if node_id is not None:
        given["node.id"] = str(node_id)
        if not given.get("zookeeper.connect"):
            raise click.UsageError("--node needs --zookeeper HOST:PORT, the metadata of a cluster")
    if rack:
        given["broker.rack"] = rack
    found = ServerProperties.of(given)
    if found.unused:
        where = "one node" if found.member is None else "a cluster on ZooKeeper"
        click.echo(f"not used by {where}: {', '.join(found.unused)}", err=True)
    return found


def _check_descriptor(descriptor: int | None) -> None:
    """Refuse a descriptor that is not open, before the store is opened."""
    if descriptor is not None:
        try:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        except (OSError, ValueError):
            raise click.UsageError(f"--ready-fd {descriptor}: no such descriptor") from None
        if flags & os.O_ACCMODE == os.O_RDONLY:
            raise click.UsageError(f"--ready-fd {descriptor}: it cannot be written to")


def _topic(text: str) -> tuple[str, int]:
    """Return the name and the number of partitions of a topic to make."""
    from logstore.store.topic import check_topic_name

    name, _, count = text.partition(":")
    if count and (not count.isdigit() or not int(count)):
        raise click.UsageError(f"--create-topic takes NAME[:PARTITIONS], not {text!r}")
    return check_topic_name(name), int(count or 1)


def _check_listener(config: KafkaConfig, faults: tuple[str, ...]) -> None:
    """Refuse what the listener would refuse, before the store is opened."""
    from logstore.kafka.faults import Faults
    from logstore.kafka.network.acceptor import parse_advertised

    if config.advertised_listeners:
        parse_advertised(config.advertised_listeners)
    rules = Faults()
    for spec in faults:
        rules.add(spec)


def _check_addresses(
    listen: list[str | socket.socket], control: str | None, metrics: str | None, ui: int | None
) -> None:
    """Bind all addresses together and release them, before a directory is made.

    Only then: of a store that another process serves, that process is named and not its address.
    """
    from logstore.kafka.network.acceptor import check_protocol, parse_address

    wanted = [(each, "") for each in listen if isinstance(each, str)]
    if control is not None:
        wanted.append((control, ""))
    if metrics is not None:
        wanted.append((metrics if ":" in metrics else f"127.0.0.1:{metrics}", " for the metrics"))
    if ui is not None:
        wanted.append((f"127.0.0.1:{ui}", " for the page"))
    with contextlib.ExitStack() as stack:
        for address, purpose in wanted:
            name, host, port = parse_address(address)
            check_protocol(name, name)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                stack.enter_context(socket.create_server((host, port), family=family))
            except OSError as error:
                text = f"cannot listen on {address}{purpose}: {error.strerror}"
                raise OSError(error.errno, text) from error


# ---- what runs ----


@contextlib.contextmanager
def _busy_if_taken() -> Iterator[None]:
    """Turn an address that is taken into exit code 3."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise exits.CommandError(exits.BUSY, str(error.strerror)) from None
        raise


@contextlib.contextmanager
def _started(server: KafkaServer | ServedNode) -> Iterator[None]:
    with _busy_if_taken():
        server.start()
    try:
        yield
    finally:
        server.close()


@contextlib.contextmanager
def _neighbours(
    server: KafkaServer, control: str | None, metrics: str | None, ui: int | None
) -> Iterator[dict[str, Any]]:
    """Start the control listener, the metrics and the page; yield their addresses by name."""
    addresses: dict[str, Any] = {}
    with contextlib.ExitStack() as stack, _busy_if_taken():
        if control is not None:
            from logstore.kafka.control import ControlServer

            other = stack.enter_context(ControlServer(server.store, control, config=server.config))
            addresses["control"] = other.bootstrap_servers
        if metrics is not None:
            from logstore.kafka.monitor import Monitor

            monitor = Monitor(server, metrics)
            stack.callback(monitor.close)
            addresses["metrics"] = monitor.start().address
        if ui is not None:
            from logstore.cli.verbs.ui import UiServer

            page = stack.enter_context(UiServer(server.store, ui))
            threading.Thread(target=page.serve_forever, name="logstore ui", daemon=True).start()
            stack.callback(page.shutdown)
            addresses["ui"] = page.url
        yield addresses


@contextlib.contextmanager
def _named(store: Path, ready: dict[str, Any]) -> Iterator[None]:
    """Have `doctor` and `ui` find the listener.  The address of the page has a key: left out."""
    from logstore.cli.served import forget_listener, name_listener

    shown = ("listeners", "pid", "control", "metrics", "node", "zookeeper")
    name_listener(store, {name: ready[name] for name in shown if name in ready})
    try:
        yield
    finally:
        forget_listener(store)


class _RequestLog(logging.handlers.WatchedFileHandler):
    """The file of the request log.  If lines cannot be written, this is told once, not each."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._told:
            self._told = True
            click.echo(f"logstore: --request-log loses lines: {sys.exc_info()[1]}", err=True)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what is left in the buffer
            super().close()


@contextlib.contextmanager
def _request_log(path: str) -> Iterator[logging.handlers.WatchedFileHandler]:
    """Write the request log to a file, in a thread of its own: the loop does not wait for it."""
    file = _RequestLog(path)
    lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
    listener = logging.handlers.QueueListener(lines, file)
    enqueue = logging.handlers.QueueHandler(lines)
    logger = logging.getLogger("logstore.kafka.request")
    logger.addHandler(enqueue)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    listener.start()
    try:
        yield file
    finally:
        logger.removeHandler(enqueue)
        listener.stop()
        file.close()


class _Signals:
    """The signals of a server.  Caught from `catch` on; those before end the start.

    A handler only queues its number: `SimpleQueue.put` may interrupt any call.  The handlers stay
    until the ``with`` block ends, so that no signal interrupts the close of the store.
    """

    NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

    def __init__(self) -> None:
        self.caught: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.ends = 0  # how many of them end the server
        self._server: KafkaServer | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def catch(self, server: KafkaServer) -> None:
        """Queue the signals from now on; the second one that ends the server aborts it."""
        self._server = server
        for number in self.NUMBERS:
            self._before[number] = signal.signal(number, self._signalled)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self.caught.put(number)
        if number in (signal.SIGTERM, signal.SIGINT):
            self.ends += 1
            if self.ends > 1 and self._server is not None:
                self._server.abort()


def _serve(
    server: KafkaServer,
    announce: Callable[[], None],
    request_log: logging.handlers.WatchedFileHandler | None,
    close: Callable[[], object],
    signals: _Signals,
) -> None:
    """Announce that the server is ready, and act on signals until one ends it."""
    signals.catch(server)
    announce()
    status = f"STATUS=ready on {server.bootstrap_servers}"
    notify(f"READY=1\n{status}")
    seconds = watchdog_seconds()
    if seconds is not None:
        server.call_every(seconds, lambda: notify("WATCHDOG=1"))
    for number in _until_ended(server, signals.caught):
        if number == signal.SIGUSR1:
            _print_metrics(server)
        else:
            notify(reloading())
            if request_log is not None:
                request_log.reopenIfNeeded()
            notify(f"READY=1\n{status}")
    notify("STOPPING=1")
    close()
    if signals.ends > 1:
        raise exits.CommandError(exits.INTERRUPTED, "connections were closed at once")


def _until_ended(server: KafkaServer, caught: queue.SimpleQueue[int]) -> Iterator[int]:
    """Yield the signals that do not end the server, until one does."""
    while True:
        try:
            number = caught.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            if server.ended:
                words = "the event loop ended by an error of its own"
                raise exits.CommandError(exits.FAILED, words) from None
            continue
        if number in (signal.SIGTERM, signal.SIGINT):
            return
        yield number


def _print_metrics(server: KafkaServer) -> None:
    from logstore.kafka.metrics import metrics_text

    click.echo(metrics_text(server.metrics()), err=True, nl=False)


def _complain(error: OSError) -> None:
    click.echo(f"logstore: cannot tell that it is ready: {error.strerror}", err=True)


def _tell(descriptor: int | None, ready: dict[str, Any]) -> None:
    if descriptor is not None:
        with os.fdopen(descriptor, "w") as out:
            out.write(json.dumps(ready) + "\n")
