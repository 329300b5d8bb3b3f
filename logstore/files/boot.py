"""The boot id: tells a killed process from a machine that was restarted."""

from __future__ import annotations

import functools

__all__ = ["boot_id"]


boot_override: str | None = None  # a test that simulates power cuts names another boot


def boot_id() -> str:
    """Names the current boot of the machine; empty where that cannot be told."""
    return _boot_id() if boot_override is None else boot_override


@functools.cache
def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
