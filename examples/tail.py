"""Tail a log: print its last records, then whatever is appended, as ``tail -f`` does for files.

    python examples/tail.py data/orders-0            until Ctrl-C
    python examples/tail.py data/orders-0 --last 5 --idle 2

The reader takes no lock: whoever writes the log goes on, in this process or in another.
"""

from __future__ import annotations

import argparse
import datetime
import sys

from logstore import Partition, Record


def line(record: Record) -> str:
    when = datetime.datetime.fromtimestamp(record.timestamp / 1000, datetime.UTC)
    value = "null" if record.value is None else record.value.decode("utf-8", "backslashreplace")
    return f"{record.offset:>8}  {when:%H:%M:%S.%f}  {value}"


def main() -> int:
    parser = argparse.ArgumentParser(description="follow a partition")
    parser.add_argument("path", help="a partition's directory, such as data/orders-0")
    parser.add_argument("--last", type=int, default=10, help="records to begin with (10)")
    parser.add_argument("--idle", type=float, help="stop when nothing came for so many seconds")
    wanted = parser.parse_args()

    with Partition.open(wanted.path, readonly=True) as log:
        # Not end_offset - n: a compacted log has gaps, and tail() counts records.
        last = log.tail(wanted.last)
        for record in last:
            print(line(record))
        start = last[-1].offset + 1 if last else log.end_offset
        try:
            for record in log.scan(start, follow=True, timeout=wanted.idle):
                print(line(record), flush=True)
        except KeyboardInterrupt:
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
