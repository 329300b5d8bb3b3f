"""Monitor: the metrics of a server over HTTP, for Prometheus and for health checks.

It runs in threads of its own, so that it can report an event loop that does not answer.  There is
no authentication: a page shows counters, names of topics and of client software, and no records.
"""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self, cast

from logstore.kafka.metrics import metrics_text
from logstore.kafka.network.acceptor import parse_address

if TYPE_CHECKING:
    from logstore.kafka.server import KafkaServer

__all__ = ["Monitor"]


class Monitor(ThreadingHTTPServer):
    """Serves ``/metrics`` and ``/health`` of a KafkaServer, until `close`.

    ``/health`` is ``ok`` with status 200; otherwise the reason with status 503.  `address` is
    ``host:port``; without a host it is loopback.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, server: KafkaServer, address: str) -> None:
        _, host, port = parse_address(address if ":" in address else f":{address}")
        self.kafka = server
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host or "127.0.0.1", port), _Handler)
        except OSError as error:
            text = f"cannot listen on {address} for the metrics: {error.strerror}"
            raise OSError(error.errno, text) from error
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.1}, name="logstore kafka monitor",
            daemon=True,
        )  # fmt: skip

    @property
    def address(self) -> str:
        """The address as ``host:port``."""
        host, port = self.socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def start(self) -> Self:
        """Answer requests from now on."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop, and close the socket."""
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that closed its connection."""


class _Handler(BaseHTTPRequestHandler):
    """One connection.  GET only."""

    server_version = "logstore"
    sys_version = ""
    timeout = 10  # seconds for a request

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: a scraper asks every few seconds."""

    def do_GET(self) -> None:
        kafka = cast(Monitor, self.server).kafka
        if self.path == "/metrics":
            kind = "text/plain; version=0.0.4; charset=utf-8"
            self._answer(200, metrics_text(kafka.metrics()), kind)
        elif self.path == "/health":
            trouble = kafka.trouble()
            self._answer(503 if trouble else 200, f"{trouble or 'ok'}\n")
        else:
            self._answer(404, "there are /metrics and /health\n")

    def _answer(self, status: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
