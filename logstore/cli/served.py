"""The side file that `logstore serve` writes: where the listener of a store is.

``logstore.served`` in the root is JSON: pid, listeners, the address of the metrics.  It is a hint
for `doctor` and `ui`, which run in other processes.  A killed server leaves it; so it counts only
while the process that it names holds the store's lock.  It is not synced.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
from pathlib import Path
from typing import Any

from logstore.files.directory import Directory
from logstore.files.lock import DirectoryLock, has_writer
from logstore.kafka.metrics import PREFIX

__all__ = ["find_listener", "forget_listener", "name_listener"]

NAME = "logstore.served"
BYTES_MAX = 64 << 10
ASK_SECONDS = 1.0


def name_listener(store: Path, about: dict[str, Any]) -> None:
    """Write the file.  A failure is ignored: the file is a hint, and half of it is no JSON."""
    with contextlib.suppress(OSError):
        (store / NAME).write_text(json.dumps(about) + "\n", "utf-8")


def forget_listener(store: Path) -> None:
    """Remove the file.  Called while this process holds the store's lock."""
    with contextlib.suppress(OSError):
        os.unlink(store / NAME)


def find_listener(store: Path) -> dict[str, Any] | None:
    """Return what `name_listener` wrote, if that process serves the store now.

    If it has an address for metrics, ``connections``, ``requests`` and ``requests_per_second``
    since its start are added.
    """
    try:
        with (store / NAME).open("rb") as file:
            about = json.loads(file.read(BYTES_MAX))
        holder = (store / DirectoryLock.NAME).read_text("ascii").split()
        directory = Directory(store)
    except (OSError, ValueError):
        return None
    try:
        if not isinstance(about, dict) or holder[:1] != [str(about.get("pid"))]:
            return None
        if not has_writer(directory):
            return None
    finally:
        directory.close()
    if about.get("metrics"):
        about |= _asked(str(about["metrics"]))
    return about


def _asked(address: str) -> dict[str, float]:
    """Return the load of a server, from its metrics; nothing if it does not answer."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=ASK_SECONDS)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    finally:
        connection.close()

    def total(name: str) -> float:
        found = re.findall(rf"^{PREFIX}{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    requests, seconds = total("requests_total"), total("up_seconds")
    return {
        "connections": int(total("connections")),
        "requests": int(requests),
        "requests_per_second": round(requests / seconds, 1) if seconds else 0.0,
    }
