"""queue.Queue: one thread puts, another gets; nothing is kept."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from time import perf_counter


def send(values: Sequence[bytes]) -> float:
    line: queue.Queue[bytes | None] = queue.Queue()

    def take() -> None:
        while line.get() is not None:
            pass

    taker = threading.Thread(target=take)
    taker.start()
    put = line.put
    started = perf_counter()
    for value in values:
        put(value)
    put(None)
    taker.join()
    return len(values) / (perf_counter() - started)
