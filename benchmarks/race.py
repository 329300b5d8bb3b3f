"""Race: entrants take turns, round after round, and the best round of each counts.

A shared machine is noisy, and its noise only ever slows one down: the best of several rounds is
the steadiest figure there is, and taking turns (A B, B A, ...) lets a slow minute hit everyone.
The first round is a warm-up and is thrown away.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping

Run = Callable[[], float]
"""Does the whole work once; returns its rate (units a second) over the timed part only."""


def race(
    entrants: Mapping[str, Run],
    *,
    rounds: int,
    settle: Callable[[], None] | None = None,
    step: Callable[[str], None] | None = None,
) -> dict[str, float]:
    """The best rate of each entrant.  `settle` runs before every turn, outside the clock."""
    best: dict[str, float] = {}
    order = list(entrants)
    gc.collect()
    gc.freeze()  # a million values are not worth traversing inside somebody's timed part
    try:
        for number in range(rounds + 1):
            for name in order:
                if step is not None:
                    step(f"round {number} of {rounds}, {name}")
                if settle is not None:
                    settle()
                rate = entrants[name]()
                if number:
                    best[name] = max(rate, best.get(name, 0.0))
            order.reverse()
    finally:
        gc.unfreeze()
    return best
