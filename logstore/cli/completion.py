"""What the shell offers when a word is begun: topics, groups, settings.

The store is the one that ``-s`` has named so far on the line, else $LOGSTORE's, else the directory
one stands in.  Whatever goes wrong offers nothing: a shell has no place for a message.
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
    """The topics that begin so, by the names of directories: no log is opened."""
    found = set()
    with contextlib.suppress(OSError), os.scandir(_store(context)) as entries:
        for entry in entries:
            topic, dash, number = entry.name.rpartition("-")
            if dash and number.isdigit() and topic.startswith(begun):
                found.add(topic)
    return sorted(found)


def group_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """The groups that begin so and have committed something."""
    import logstore
    from logstore.coordinators.group_admin import Groups

    with (
        contextlib.suppress(logstore.LogStoreError, OSError),
        logstore.open(_store(context), readonly=True) as store,
    ):
        return sorted(name for name in Groups(store) if name.startswith(begun))
    return []


def setting_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """``name=`` of every setting that begins so."""
    from logstore.config import PartitionConfig

    return [f"{name}=" for name in PartitionConfig().as_dict() if name.startswith(begun)]
