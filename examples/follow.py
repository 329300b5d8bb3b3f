"""Copy a store into another directory, and keep the copy level: ``Follow``.

    python examples/follow.py data copy                          until Ctrl-C
    python examples/follow.py kafka://localhost:9092 copy --once

The writer of the source goes on meanwhile.  The copy has the same batches with the same offsets,
so a reader of the copy continues with the offsets that it has.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time

from logstore import DivergedError, Follow, FollowStatus, KafkaSource


def line(status: FollowStatus) -> str:
    return (
        f"{len(status.partitions)} partitions, {status.copied_records} records copied, "
        f"{status.lag_records} behind, {status.lag_seconds:.1f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="copy a store")
    parser.add_argument("source", help="a directory, or kafka://host:port")
    parser.add_argument("target", help="a directory that nothing else writes")
    parser.add_argument("--once", action="store_true", help="end when the copy is level")
    wanted = parser.parse_args()

    kafka = wanted.source.startswith("kafka://")
    source = KafkaSource(wanted.source) if kafka else wanted.source
    with Follow(source, wanted.target) as follow:
        # Not KeyboardInterrupt: a step that was begun is finished.
        signal.signal(signal.SIGINT, lambda *_: follow.stop())
        shown = time.monotonic()

        def show() -> None:
            nonlocal shown
            if time.monotonic() - shown >= 1:
                shown = time.monotonic()
                print(line(follow.status()), flush=True)

        try:
            print(line(follow.catch_up() if wanted.once else follow.run(tick=show)))
        except DivergedError as error:
            print(error, file=sys.stderr)
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
