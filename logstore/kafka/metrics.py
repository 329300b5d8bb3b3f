"""metrics: the counters of a server, as numbers by name.

The names are Prometheus': ``requests_total{api="Fetch"}``.  The loop counts with plain integers;
`metrics` reads them from any thread, so two numbers of one call may be a request apart.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from logstore.kafka.apis import APIS
from logstore.kafka.errors import ErrorCode

if TYPE_CHECKING:
    from logstore.kafka.broker import Broker

__all__ = ["metrics"]

CLIENTS_MAX = 50  # names of software; the others are one number


def metrics(broker: Broker) -> dict[str, float]:
    """Return what a server has counted since its start."""
    connections = list(broker.connections)
    found: dict[str, float] = {
        "connections": len(connections),
        "connections_accepted_total": broker.accepted,
        "request_bytes_total": broker.received + sum(each.received for each in connections),
        "response_bytes_total": broker.sent + sum(each.sent for each in connections),
        'purgatory_size{kind="fetch"}': broker.waiting.count,
        "syncs_total": broker.syncs.count,
        "appends_synced_total": broker.syncs.appends,
        "memory_in_use_bytes": broker.memory.in_use_bytes,
        "memory_peak_bytes": broker.memory.peak_bytes,
        "memory_waiting": broker.memory.waiting,
        "worker_busy": broker.workers.busy,
        "worker_queue": broker.workers.queued,
        "loop_lag_seconds": broker.lag_seconds,
    }
    for key, count in list(broker.requests.items()):
        found[_name("requests_total", api=APIS[key].name)] = count
    for (key, code), count in list(broker.errors.items()):
        name = ErrorCode(code).name if code in list(ErrorCode) else str(code)
        found[_name("errors_total", api=APIS[key].name, error=name)] = count
    for reason, count in list(broker.closed_for.items()):
        found[_name("connections_closed_total", reason=reason)] = count
    clients = Counter(each.software or "unknown" for each in connections)
    for software, count in clients.most_common(CLIENTS_MAX):
        found[_name("clients", software=software)] = count
    others = sum(clients.values()) - sum(n for _, n in clients.most_common(CLIENTS_MAX))
    if others:
        found[_name("clients", software="other")] = others
    return found


def _name(name: str, **labels: str) -> str:
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"
