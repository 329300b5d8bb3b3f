"""The threads in which a store recovers, syncs and closes its partitions, several at a time."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence

from logstore.errors import (
    LogStoreError,
)
from logstore.partition.partition import Partition
from logstore.recovery.report import RecoveryProgress
from logstore.root.checkpoints import TopicPartition
from logstore.store.descriptors import make_room_for_files
from logstore.store.recovery_report import StoreRecovery
from logstore.store.topic import Topic
from logstore.waking import uninterrupted

__all__ = ["at_once", "recover_partitions"]

log = logging.getLogger("logstore.store")

RECOVERY_THREADS = min(8, 2 * (os.cpu_count() or 1))


def at_once(tasks: Sequence[Callable[[], object]], *, plenty: bool = True) -> None:
    """Run tasks in a few threads; when all have ended, raise the first error.

    `plenty`: the process may open enough files for several threads; otherwise one is used.
    """
    threads = RECOVERY_THREADS if plenty else 1
    if len(tasks) < 2 or threads < 2:
        for task in tasks:
            task()
        return
    import concurrent.futures  # not needed after a clean shutdown

    def run() -> None:
        # The `with` waits for all tasks, so that no task runs on after the first error.
        with concurrent.futures.ThreadPoolExecutor(threads, "logstore") as pool:
            futures = [pool.submit(task) for task in tasks]
        for future in futures:
            future.result()

    uninterrupted(run)  # an executor waits by conditions, which an interrupt breaks


def recover_partitions(
    wanted: Sequence[tuple[Topic, int]],
    open_partition: Callable[[Topic, int, RecoveryProgress], Partition],
    report: StoreRecovery,
    progress: RecoveryProgress | None,
) -> None:
    """Open partitions after a crash.  The report gets the errors of those that fail."""
    plenty = make_room_for_files(len(wanted))
    checked: dict[TopicPartition, tuple[int, int]] = {}

    def open_one(topic: Topic, number: int) -> None:
        def moved(done: int, total: int) -> None:
            # Several threads: each has its own key, and one assignment to a dict is atomic.
            checked[topic.name, number] = (done, total)
            if progress is not None:
                sums = list(checked.values())
                progress(sum(done for done, _ in sums), sum(total for _, total in sums))

        name = f"{topic.name}-{number}"
        try:
            partition = open_partition(topic, number, moved)
        except (LogStoreError, OSError) as error:
            log.warning("%s cannot be opened: %s", name, str(error))
            report.failed[name] = error
            return
        # Without the lock of the topic: the store is being opened, and no other thread has it.
        topic._hold(partition)
        if not partition.recovery.clean:
            report.partitions[name] = partition.recovery

    tasks = [functools.partial(open_one, topic, number) for topic, number in wanted]
    at_once(tasks, plenty=plenty)
