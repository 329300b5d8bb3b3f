"""The boot id: distinguishes a killed process from a machine that was restarted.

After a kill the page cache still holds every write; after a restart only synced writes are left.
"""

from __future__ import annotations

import functools

__all__ = ["boot_id"]


boot_override: str | None = None  # set by tests that simulate a power loss


def boot_id() -> str:
    """Return the id of the machine's current boot; empty if the system has none (macOS)."""
    return _boot_id() if boot_override is None else boot_override


@functools.cache
def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
