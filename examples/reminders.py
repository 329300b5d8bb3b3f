"""Reminders: records that are delivered later, moved, cancelled, and survive a restart.

    python examples/reminders.py [directory]

The clock is moved by hand, so that a week takes a moment.  With the clock of the machine,
``with scheduler:`` delivers in a thread.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import logstore
from logstore import ManualClock, Scheduler

HOUR = 3_600_000


def run(directory: Path) -> None:
    clock = ManualClock()
    with logstore.open(directory, clock=clock) as store:
        reminders = store.create_topic("reminders")[0]
        scheduler = Scheduler.of(store)
        scheduler.schedule("reminders", b"water the plants", deliver_after="7d")
        call = scheduler.schedule("reminders", b"call Alice", key=b"alice", deliver_after="30m")
        lunch = scheduler.schedule("reminders", b"lunch", deliver_after="4h")
        meeting = scheduler.schedule("reminders", b"meeting", deliver_after="2h")

        scheduler.reschedule(call, deliver_after="3h")
        scheduler.cancel(meeting)
        print("waiting:", [record.value.decode() for record in scheduler.pending() if record.value])

        clock.advance(5 * HOUR)
        print("delivered in 5 hours:", scheduler.run_once())
        print("lunch can be cancelled:", scheduler.cancel(lunch))

    with logstore.open(directory, clock=clock) as store:  # after a restart the log has the rest
        reminders = store["reminders"][0]
        clock.advance(7 * 24 * HOUR)
        Scheduler.of(store).run_once()
        got = [record.value or b"" for record in reminders.scan(isolation="read_committed")]
        print("in order:", ", ".join(value.decode() for value in got))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            run(Path(temporary))
