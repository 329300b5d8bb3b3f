"""systemd's protocols for a service: notifications, the watchdog, sockets that it opened.

Each does nothing if systemd did not start the process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time

__all__ = ["listening_sockets", "notify", "reloading", "watchdog_seconds"]

FIRST_FD = 3  # SD_LISTEN_FDS_START


def notify(state: str) -> None:
    """Send a state such as ``READY=1`` to systemd."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.setblocking(False)  # the event loop calls this, too
        out.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)


def reloading() -> str:
    """Return the state that a service sends before it loads its settings again."""
    return f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}"


def watchdog_seconds() -> float | None:
    """Return how often to send ``WATCHDOG=1``: at half of the time-out.  None: not wanted."""
    text = os.environ.get("WATCHDOG_USEC", "")
    pid = os.environ.get("WATCHDOG_PID")
    if not text.isdigit() or int(text) == 0 or pid not in (None, str(os.getpid())):
        return None
    return int(text) / 2_000_000


def listening_sockets() -> list[socket.socket]:
    """Return the sockets that systemd opened for this process (socket activation).

    A second call returns none.
    """
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdigit():
        return []
    found = []
    for descriptor in range(FIRST_FD, FIRST_FD + int(count)):
        os.set_inheritable(descriptor, False)
        found.append(socket.socket(fileno=descriptor))
    return found
