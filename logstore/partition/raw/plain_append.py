"""append_plain: one batch of a client, in the fewest steps.

Plain: one uncompressed batch without a producer, which the topic's settings let be written as it
is, for a log whose next append writes to the active segment only.  C checks and writes it in one
call.  Everything else is for RawAppender, which has the reason if the batch is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logstore.errors import IndeterminateAppendError
from logstore.partition.active_log import ActiveLog

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["append_plain"]


def append_plain(
    active: ActiveLog, raw: Buffer, *, leader_epoch: int | None = None
) -> range | None:
    """Append a plain batch and return its offsets; None if it is not plain: nothing is appended.

    Does not wait: None also if another thread has the log's lock.  Does not sync.  `leader_epoch`:
    None also unless it is the epoch that the log has begun.  For a thread that gets no
    KeyboardInterrupt.  Raise IndeterminateAppendError if the batch may be in the log, and
    DiskFullError or OSError if it is not.
    """
    view, leadership = active.view, active.leadership
    rules, lock = view.plain_rules, view.lock
    if rules is None or not lock.acquire(blocking=False):
        return None
    try:
        epoch = leadership.epoch
        if not active.ready or (leader_epoch is not None and leader_epoch != epoch):
            return None
        active.next_offset()  # settles the batches of producers
        writer = active.writer
        assert writer is not None
        now = -1 if active.ask_time is None else active.ask_time()
        first = writer.append_plain(raw, epoch, rules, now)
        end = writer.next_offset
    except IndeterminateAppendError as error:
        active.fail(error)
        raise
    finally:
        lock.release()
    if first is None:
        return None
    if view.followers:
        view.wake_followers()
    return range(first, end)
