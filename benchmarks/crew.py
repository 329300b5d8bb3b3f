"""Crew: threads that start together and share out the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Barrier, Thread
from time import perf_counter


def spread(work: Callable[[bytes], object], pieces: Sequence[bytes], threads: int) -> float:
    """Pieces a second, from the moment all threads are ready until the last one is done."""
    ready = Barrier(threads + 1)
    failures: list[BaseException] = []

    def run(share: Sequence[bytes]) -> None:
        ready.wait()
        try:
            for piece in share:
                work(piece)
        except BaseException as error:  # noqa: BLE001  handed to the caller below
            failures.append(error)

    crew = [
        Thread(target=run, args=(pieces[first::threads],), daemon=True) for first in range(threads)
    ]
    for thread in crew:
        thread.start()
    ready.wait()
    started = perf_counter()
    for thread in crew:
        thread.join()
    elapsed = perf_counter() - started
    if failures:
        raise failures[0]
    return len(pieces) / elapsed
