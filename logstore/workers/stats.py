"""WorkerStats and Running: what workers do at the moment."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from logstore.coordinators.offset_records import TopicPartition
from logstore.record import Record

__all__ = ["Running", "WorkerStats"]


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerStats:
    """Numbers of one Workers.  Totals count from its start."""

    running: int  # handlers
    waiting: int  # records that were read and wait for a handler
    retrying: int  # records that failed and are tried again
    leaving: int  # records whose outputs wait for their transaction
    stuck: int  # handlers that are over their time
    done: int
    failed: int  # attempts
    skipped: int
    per_second: float  # finished records, over the last second or more
    oldest_running_seconds: float
    lag: int  # offsets from the committed ones to the ends of the partitions
    stopped: Mapping[TopicPartition, str]  # partitions that cannot be read, each with the reason
    last_error: str  # of the handler that failed last; "" if none did

    def __str__(self) -> str:
        return (
            f"{self.running} running, {self.waiting} waiting, {self.retrying} retrying, "
            f"{self.done} done, {self.skipped} skipped, {self.failed} failed, "
            f"{self.per_second:.0f}/s, lag {self.lag}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """A handler that runs."""

    record: Record
    started_at: float  # on the clock of the store
    seconds: float  # since then
    thread: str  # the name of its thread or task
    stack: str
