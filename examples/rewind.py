"""Rewind by time: a group goes back to yesterday and does its work again, with the bug mended.

    python examples/rewind.py [directory]

The dry run shows what would move; the group is moved while it has no members; what was done before
stays where it was.
"""

from __future__ import annotations

import datetime
import sys
import tempfile
from pathlib import Path

import logstore
from logstore import Consumer, Groups, Record, Store

HOUR = 3_600_000
START = datetime.datetime(2026, 3, 2, 9, tzinfo=datetime.UTC)


def totals(store: Store, tax: float) -> float:
    """Add up what the group has not seen yet."""
    total = 0.0
    with Consumer(store, "sales", group_id="totals", timeout=0) as consumer:
        for record in consumer:
            assert record.value is not None
            total += int(record.value) * (1 + tax)
    return total


def run(directory: Path) -> None:
    begin = round(START.timestamp() * 1000)
    with logstore.open(directory) as store:
        sales = store.create_topic("sales", partitions=2)
        for hour in range(48):
            sales[hour % 2].extend([Record(b"100", timestamp=begin + hour * HOUR)])
        print(f"first time, wrong tax: {totals(store, 0.0):.0f}")
        print(f"nothing is left: {totals(store, 0.0):.0f}")
        groups = Groups(store)
        tuesday = START + datetime.timedelta(days=1)
        for move in groups.reset_offsets("totals", at=tuesday, dry_run=True):
            print(f"would move {move}")
        groups.reset_offsets("totals", at=tuesday)
        print(f"from Tuesday on again, right tax: {totals(store, 0.2):.0f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        run(Path(sys.argv[1] if len(sys.argv) > 1 else scratch))
