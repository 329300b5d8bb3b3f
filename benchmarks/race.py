"""Race: entrants take turns, round after round, and the best round of each counts.

A shared machine is noisy, and its noise only ever slows one down: the best of several rounds is
the steadiest figure there is, and taking turns (A B, B A, ...) lets a slow minute hit everyone.
The first round is a warm-up and is thrown away.  Rounds go on past the least number of them while
somebody still gets better: then the machine was busy, and nobody's best has been seen yet.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from statistics import median

Run = Callable[[], float]
"""Does the whole work once; returns its rate (units a second) over the timed part only."""

Turn = Callable[[], tuple[float, ...]]
"""Does the whole work once; returns some numbers about it."""

GAIN = 1.02  # a best this much above the last one is news
PATIENCE = 2  # rounds without news that end the race
MOST = 4  # times the least number of rounds


def race(
    entrants: Mapping[str, Run],
    *,
    rounds: int,
    settle: Callable[[], None] | None = None,
    step: Callable[[str], None] | None = None,
) -> dict[str, float]:
    """The best rate of each entrant.  `settle` runs before every turn, outside the clock."""
    best: dict[str, float] = {}
    gc.collect()
    gc.freeze()  # a million values are not worth traversing inside somebody's timed part
    try:
        quiet = 0
        for number, order in enumerate(turns(entrants, MOST * rounds)):
            news = False
            for name in order:
                if step is not None:
                    step(f"round {number}, {name}")
                if settle is not None:
                    settle()
                rate = entrants[name]()
                if number:
                    news = news or rate > GAIN * best.get(name, 0.0)
                    best[name] = max(rate, best.get(name, 0.0))
            quiet = 0 if news else quiet + 1
            if number >= rounds and quiet >= PATIENCE:
                break
    finally:
        gc.unfreeze()
    return best


def medians(
    entrants: Mapping[str, Turn],
    *,
    rounds: int,
    settle: Callable[[], None] | None = None,
    step: Callable[[str], None] | None = None,
) -> dict[str, tuple[float, ...]]:
    """The median of each number of each entrant, after a warm-up unless there is one round only."""
    taken: dict[str, list[tuple[float, ...]]] = {name: [] for name in entrants}
    for number, order in enumerate(turns(entrants, rounds), start=rounds == 1):
        if number > rounds:
            break
        for name in order:
            if step is not None:
                step(f"round {number}, {name}")
            if settle is not None:
                settle()
            result = entrants[name]()
            if number:
                taken[name].append(result)
    return {name: tuple(map(median, zip(*results, strict=True))) for name, results in taken.items()}


def turns(entrants: Mapping[str, object], rounds: int) -> Iterator[list[str]]:
    """Who runs after whom: one way, then the other; the warm-up comes on top of `rounds`."""
    order = list(entrants)
    for _ in range(rounds + 1):
        yield order
        order = order[::-1]
