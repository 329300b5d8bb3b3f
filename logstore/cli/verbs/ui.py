"""`logstore ui`: a read-only web page that shows a store, served on loopback.

The server has one self-contained page and a few JSON endpoints.  No request changes the store.

Access control: the address contains a random key, so other users of the machine are refused.  The
Host header must name loopback, which stops DNS rebinding.  A request that the browser marks as
cross-site is refused.  The page inserts data as text only, and its content security policy runs
only its own script.

Every request is bounded in time, in records and in bytes of each field; an answer that was cut has
a flag for it.  One thing is not bounded: a regular expression with catastrophic backtracking, which
Python cannot interrupt.  Only a client that has the key can send one.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hmac
import itertools
import json
import secrets
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import TYPE_CHECKING, Any, cast

import click

import logstore
from logstore.cli import exits
from logstore.cli.bounds import Bound
from logstore.cli.served import cluster_of, find_listener
from logstore.cli.session import Integer, Session, pass_session, verb
from logstore.cli.verbs.read import Selection
from logstore.cli.verbs.topic import totals
from logstore.cli.verbs.upkeep import decision_row
from logstore.errors import LogStoreError, OffsetOutOfRangeError, RecordNotFoundError
from logstore.record import Record

if TYPE_CHECKING:
    from logstore import Partition, Store
    from logstore.where import Where

__all__ = ["UiServer", "ui_verb"]

SHOWN_MAX = 500  # messages in one answer
LOOKED_AT_SECONDS = 2.0  # time to search for one answer
FIELD_BYTES = 2048  # bytes of a key or a value in a list
WHOLE_BYTES = 1 << 20  # bytes of a key or a value of a single message
SEGMENTS_MAX = 2000  # segments of a partition in one answer
TAILS_MAX = 16
HEARTBEAT_SECONDS = 10.0


@verb("ui")
@click.option(
    "--port",
    type=Integer(0, 65535),
    default=8181,
    show_default=True,
    help="0: any free port.",
)
@click.option(
    "--open/--no-open", "show", default=None, help="Open a browser.  Default: only on a terminal."
)
@pass_session  # fmt: skip
def ui_verb(session: Session, port: int, show: bool | None) -> None:
    """Show the store in a browser: topics, segments, messages.  Read-only, on loopback.

    The address contains a key that keeps other users of this machine out.  Ctrl-C stops the server.
    """
    with session.reading() as store, _server(store, port) as server:
        row = {"url": server.url, "store": str(store.path)}
        session.output.one(row, words=[f"{store.path}: {server.url}", "Ctrl-C ends it"])
        session.output.flush()
        if show or (show is None and session.output.terminal):
            import webbrowser

            webbrowser.open(server.url)
        server.serve_forever(poll_interval=0.2)


def _server(store: Store, port: int) -> UiServer:
    try:
        return UiServer(store, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        words = f"port {port} is taken: --port 0 takes any that is free"
        raise exits.CommandError(exits.BUSY, words) from None


class UiServer(ThreadingHTTPServer):
    """The HTTP server of a store.  ``with`` closes it; `serve_forever` serves until `shutdown`."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, store: Store, port: int = 0) -> None:
        self.store = store
        self.key = secrets.token_urlsafe(16)
        self.ending = threading.Event()
        self.tails = threading.BoundedSemaphore(TAILS_MAX)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            text = f"cannot listen on 127.0.0.1:{port} for the page: {error.strerror}"
            raise OSError(error.errno, text) from error
        self.port: int = self.server_address[1]
        self.hosts = {f"{name}:{self.port}" for name in ("127.0.0.1", "localhost", "[::1]")}
        if self.port == 80:
            self.hosts |= {"127.0.0.1", "localhost"}

    @property
    def url(self) -> str:
        """Return the address, with its key."""
        return f"http://127.0.0.1:{self.port}/{self.key}/"

    def server_close(self) -> None:
        self.ending.set()
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error of a request, unless the client closed the connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


# ---- answers ----

Query = dict[str, str]


class _Refused(Exception):
    """A refused request: the HTTP status and the message."""

    def __init__(self, status: HTTPStatus, words: str) -> None:
        super().__init__(words)
        self.status = status


def _needed(query: Query, name: str) -> str:
    try:
        return query[name]
    except KeyError:
        raise _Refused(HTTPStatus.BAD_REQUEST, f"{name} is missing") from None


def _number(query: Query, name: str, default: int, most: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit()):
        raise _Refused(HTTPStatus.BAD_REQUEST, f"{name} must be a number, not {text!r}")
    return min(int(text), most)


def _where(query: Query) -> Where | None:
    text = query.get("where", "").strip()
    if not text:
        return None
    from logstore.where import Where

    return Where(text)


def _partitions(query: Query) -> tuple[int, ...]:
    text = query.get("partition", "all")
    return () if text in ("", "all") else (_number(query, "partition", 0, 1 << 31),)


def _field(data: bytes | None, most: int) -> dict[str, Any] | None:
    if data is None:
        return None
    return {"size": len(data), "base64": base64.b64encode(data[:most]).decode("ascii")}


def _message(record: Record, most: int = FIELD_BYTES) -> dict[str, Any]:
    return {
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": _field(record.key, most),
        "value": _field(record.value, most),
        "headers": [
            [_field(name.encode("utf-8", "surrogateescape"), 256), _field(data, most)]
            for name, data in record.headers[:100]
        ],
    }


def _store(store: Store, query: Query) -> dict[str, Any]:
    topics, faults = [], []
    for name in store:
        try:
            topics.append(totals(store[name]))
        except (LogStoreError, OSError) as error:
            faults.append({"topic": name, "error": str(error)})
    return {
        "path": str(store.path.absolute()),
        "version": logstore.__version__,
        "now": time.time_ns() // 1_000_000,
        "topics": topics,
        "faults": faults,
        "listener": find_listener(store.path),
    }


def _topic(store: Store, query: Query) -> dict[str, Any]:
    topic = store[_needed(query, "topic")]
    return {
        "topic": topic.name,
        "id": str(topic.id) if topic.id else None,
        "now": time.time_ns() // 1_000_000,
        "config": topic.config.changed(),
        "retention_ms": topic.config.retention_ms,
        "retention_bytes": topic.config.retention_bytes,
        "cleanup_policy": topic.config.cleanup_policy,
        "partitions": [_partition(log) for log in topic],
    }


def _partition(log: Partition) -> dict[str, Any]:
    decisions = {each.base_offset: each for each in log.enforce(dry_run=True)}
    segments = []
    every = log.segments
    for segment in every[-SEGMENTS_MAX:]:
        decision = decisions.get(segment.base_offset)
        segments.append(
            {
                "base_offset": segment.base_offset,
                "end_offset": segment.end_offset,
                "size_bytes": segment.size_bytes,
                "min_timestamp": segment.min_timestamp,
                "max_timestamp": segment.max_timestamp,
                "sealed": segment.sealed,
                "retention": decision_row(decision, by_settings=True) if decision else None,
            }
        )
    return {
        "partition": log.number,
        "start_offset": log.start_offset,
        "end_offset": log.end_offset,
        "durable_offset": log.durable_offset,
        "last_stable_offset": log.last_stable_offset,
        "size_bytes": sum(segment.size_bytes for segment in every),
        "segments": segments,
        "segments_left_out": max(0, len(every) - SEGMENTS_MAX),
    }


def _messages(store: Store, query: Query) -> dict[str, Any]:
    """Return a page of messages, and the offset of the next page in each partition."""
    topic = store[_needed(query, "topic")]
    most = _number(query, "limit", 100, SHOWN_MAX)
    where = _where(query)
    positions = _positions(query.get("at", ""))
    start = Bound.parse(query.get("from") or "start")
    chosen = Selection(topic, partitions=_partitions(query), start=start, where=where)
    found: list[Record] = []
    looked = 0
    until = time.monotonic() + LOOKED_AT_SECONDS
    ends: dict[int, int] = {}
    logs = chosen.logs
    share = max(1, most // max(1, len(logs)))  # a large partition must not fill the page
    for log in logs:
        number = log.number
        at = positions.get(number, -1)
        first, stop = chosen.stretch(log)
        first = max(log.start_offset, at) if at >= 0 else first
        ends[number] = stop
        scan = log.scan(min(first, stop), stop, on_corrupt="skip", on_lost="skip")
        position = first
        full = len(found) + share
        for record in scan:
            if len(found) >= full or (looked % 1024 == 1023 and time.monotonic() > until):
                break
            looked += 1
            position = record.offset + 1
            if where is None or where(record):
                found.append(record)
        else:
            position = max(first, stop)
        positions[number] = position
    found.sort(key=lambda record: (record.timestamp, record.partition or 0, record.offset))
    return {
        "messages": [_message(record) for record in found],
        "next": positions,
        "more": any(positions[number] < end for number, end in ends.items()),
        "looked_at": looked,
    }


def _positions(text: str) -> dict[int, int]:
    """Parse ``0:17,1:4``: the start offset of a page, by partition."""
    positions = {}
    for pair in filter(None, text.split(",")):
        number, colon, offset = pair.partition(":")
        if not (colon and number.isdigit() and offset.isdigit() and pair.isascii()):
            raise _Refused(HTTPStatus.BAD_REQUEST, f"at must be partition:offset, not {pair!r}")
        positions[int(number)] = int(offset)
    return positions


def _last(store: Store, query: Query) -> dict[str, Any]:
    """Return the newest messages: what the page shows first."""
    topic = store[_needed(query, "topic")]
    most = _number(query, "limit", 100, SHOWN_MAX)
    chosen = Selection(topic, partitions=_partitions(query))
    ends = {log.number: log.end_offset for log in chosen.logs}
    found = chosen.last(most)
    return {
        "messages": [_message(record) for record in found],
        "next": ends,
        "more": False,
        "looked_at": len(found),
    }


def _one(store: Store, query: Query) -> dict[str, Any]:
    topic = store[_needed(query, "topic")]
    log = topic[_number(query, "partition", 0, 1 << 31)]
    return _message(log[_number(query, "offset", 0, 1 << 62)], WHOLE_BYTES)


def _cluster(store: Store, query: Query) -> dict[str, Any]:
    """Return the nodes and the partitions that miss a replica; nothing for a store alone."""
    return {"cluster": cluster_of(find_listener(store.path))}


_ANSWERS: dict[str, Callable[[Store, Query], dict[str, Any]]] = {
    "api/store": _store,
    "api/cluster": _cluster,
    "api/topic": _topic,
    "api/messages": _messages,
    "api/last": _last,
    "api/message": _one,
}


# ---- http ----

_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class _Handler(BaseHTTPRequestHandler):
    """One connection.  GET only."""

    server_version = "logstore"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds to wait for a request on an open connection

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: addresses contain the key."""

    @property
    def ui(self) -> UiServer:
        return cast(UiServer, self.server)

    def do_GET(self) -> None:
        try:
            path, query = self._allowed()
            if path == "":
                self._page()
            elif path == "api/tail":
                self._tail(query)
            elif path in _ANSWERS:
                self._json(_ANSWERS[path](self.ui.store, query))
            else:
                raise _Refused(HTTPStatus.NOT_FOUND, "there is nothing here")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        except _Refused as error:
            self._json({"error": str(error)}, error.status)
        except (LogStoreError, OSError, IndexError, ValueError) as error:
            self._json({"error": exits.message_of(error)}, _status_of(error))

    def _allowed(self) -> tuple[str, Query]:
        """Return the path after the key, and the query.  Raises _Refused if a check fails."""
        if self.headers.get("Host", "").lower() not in self.ui.hosts:
            raise _Refused(HTTPStatus.MISDIRECTED_REQUEST, "this address is for 127.0.0.1 only")
        site = self.headers.get("Sec-Fetch-Site", "none")
        address = urllib.parse.urlsplit(self.path)
        key, _, path = address.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(key.encode("utf-8", "replace"), self.ui.key.encode()):
            raise _Refused(HTTPStatus.FORBIDDEN, "the key in the address is missing or wrong")
        if site not in ("same-origin", "none") and path != "":
            raise _Refused(HTTPStatus.FORBIDDEN, "another site asks")
        pairs = urllib.parse.parse_qsl(address.query, keep_blank_values=True, max_num_fields=50)
        return path, dict(pairs)

    def _head(self, kind: str, size: int | None, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        if size is not None:
            self.send_header("Content-Length", str(size))

    def _json(self, answer: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        body = json.dumps(answer).encode()
        self._head("application/json", len(body), status)
        self.end_headers()
        self.wfile.write(body)

    def _page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        page = resources.files("logstore.cli.verbs").joinpath("ui.html").read_text("utf-8")
        body = page.replace("{{nonce}}", nonce).encode()
        self._head("text/html; charset=utf-8", len(body))
        self.send_header("Content-Security-Policy", _POLICY.format(nonce=nonce))
        self.end_headers()
        self.wfile.write(body)

    # ---- live ----

    def _tail(self, query: Query) -> None:
        """Send new messages as server-sent events until the browser disconnects."""
        topic = self.ui.store[_needed(query, "topic")]
        chosen = Selection(
            topic, partitions=_partitions(query), start=Bound("end"), where=_where(query)
        )
        if not self.ui.tails.acquire(blocking=False):
            raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, f"{TAILS_MAX} tails are open already")
        try:
            self.close_connection = True
            self._head("text/event-stream", None)
            self.send_header("Connection", "close")
            self.end_headers()
            records = self._following(chosen)
            # After the first `next` the ends are fixed: every record appended later is sent.
            first = next(records, None)
            self._send("hello", {})
            quiet_from = time.monotonic()
            for record in itertools.chain([first], records):
                if record is not None:
                    self._send("message", _message(record))
                    quiet_from = time.monotonic()
                elif time.monotonic() - quiet_from > HEARTBEAT_SECONDS:
                    self.wfile.write(b": still here\n\n")  # fails if the browser has disconnected
                    quiet_from = time.monotonic()
        finally:
            self.ui.tails.release()

    def _following(self, chosen: Selection) -> Iterator[Record | None]:
        with contextlib.suppress(LogStoreError):  # the store was closed, or the topic deleted
            for record in chosen.follow(None):
                if self.ui.ending.is_set():
                    return
                yield record

    def _send(self, event: str, content: dict[str, Any]) -> None:
        self.wfile.write(f"event: {event}\ndata: {json.dumps(content)}\n\n".encode())


def _status_of(error: BaseException) -> HTTPStatus:
    if isinstance(error, OffsetOutOfRangeError | RecordNotFoundError):
        return HTTPStatus.NOT_FOUND
    code = exits.exit_code(error)
    if code == exits.NOT_FOUND:
        return HTTPStatus.NOT_FOUND
    if code == exits.USAGE:
        return HTTPStatus.BAD_REQUEST
    return HTTPStatus.INTERNAL_SERVER_ERROR
