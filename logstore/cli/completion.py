"""Shell completion of the names of topics, groups and settings.

The store is the one that ``-s`` names earlier on the line, else $LOGSTORE, else the current
directory.  An error returns no completions, because a shell cannot show a message there.
"""

from __future__ import annotations

import contextlib
import os

import click

from logstore.cli.session import Session

__all__ = ["group_names", "setting_names", "topic_names"]


def _store(context: click.Context) -> str:
    session = context.find_object(Session) or Session()
    return session.store or os.environ.get("LOGSTORE") or "."


def topic_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Return the topics whose names start with `begun`.  Reads directory names and opens no log."""
    found = set()
    with contextlib.suppress(OSError), os.scandir(_store(context)) as entries:
        for entry in entries:
            topic, dash, number = entry.name.rpartition("-")
            if dash and number.isdigit() and topic.startswith(begun):
                found.add(topic)
    return sorted(found)


def group_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Return the groups that have committed offsets and whose names start with `begun`."""
    import logstore
    from logstore.coordinators.group_admin import Groups

    with (
        contextlib.suppress(logstore.LogStoreError, OSError),
        logstore.open(_store(context), readonly=True) as store,
    ):
        return sorted(name for name in Groups(store) if name.startswith(begun))
    return []


def setting_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Return ``name=`` for every setting whose name starts with `begun`."""
    from logstore.config import PartitionConfig

    return [f"{name}=" for name in PartitionConfig().as_dict() if name.startswith(begun)]
