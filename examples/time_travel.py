"""Time travel: what did the world look like then, and what changed since?

    python examples/time_travel.py [directory]

A log of price changes answers three questions that a table of current prices cannot: the price of
everything at a moment, the history of one thing, and a recomputation with a corrected rule.
"""

from __future__ import annotations

import datetime
import sys
import tempfile
from pathlib import Path

import logstore
from logstore import Record, Topic

DAY = datetime.timedelta(days=1)
MONDAY = datetime.datetime(2026, 3, 2, 9, tzinfo=datetime.UTC)
CHANGES = [  # day, what, price
    (0, "tea", 300), (0, "milk", 120), (1, "tea", 320), (2, "bread", 280), (2, "milk", None),
    (3, "tea", 310), (4, "milk", 130), (4, "bread", 260),
]  # fmt: skip


def prices_at(topic: Topic, when: datetime.datetime) -> dict[str, int]:
    """Everything that happened before `when`; found by the time index, not by reading on."""
    log = topic[0]
    state: dict[str, int] = {}
    for record in log.scan(stop=log.offset_for_time(when)):
        assert record.key is not None
        if record.value is None:
            state.pop(record.key.decode(), None)  # a tombstone: not for sale any more
        else:
            state[record.key.decode()] = int(record.value)
    return state


def run(directory: Path) -> None:
    with logstore.open(directory) as store:
        topic = store.create_topic("prices", exist_ok=True)
        topic.extend(
            Record(
                None if price is None else b"%d" % price,
                key=what.encode(),
                timestamp=int((MONDAY + day * DAY).timestamp() * 1000),
            )
            for day, what, price in CHANGES
        )
        for day in (1, 3, 5):
            when = MONDAY + day * DAY - datetime.timedelta(hours=1)
            print(f"{when:%A %H:%M}: {prices_at(topic, when)}")
        tea = [int(record.value) for record in topic[0] if record.key == b"tea" and record.value]
        print(f"tea cost {tea}")
        assert prices_at(topic, MONDAY + 10 * DAY) == {"tea": 310, "milk": 130, "bread": 260}

        # Rewind and recompute: the same events, read again from Wednesday with another rule.
        wednesday = MONDAY + 2 * DAY
        gross = store.create_topic("prices-gross", exist_ok=True)
        gross.extend(
            Record(
                None if record.value is None else b"%d" % round(int(record.value) * 1.07),
                key=record.key,
                timestamp=record.timestamp,
            )
            for record in topic[0].scan(topic[0].offset_for_time(wednesday))
        )
        print(f"recomputed from {wednesday:%A} on: {len(list(gross[0]))} changes")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        run(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
