"""Coverage: what a range of seeds must have seen, as shares of the seeds.

A range that misses one has not tested what it is for: it fails.
"""

from __future__ import annotations

from collections import Counter

__all__ = ["EXPECTED", "missing"]

# Percent of the seeds.
EXPECTED: dict[str, float] = {
    "leader change": 90,
    "isr below minimum": 40,
    "elr": 40,
    "elected from elr": 10,
    "restarted leader": 10,
    "truncation": 25,
    "truncation rounds": 0.5,
    "lossy restart": 10,
    "reassigned": 10,
    "indeterminate": 40,
    "acknowledged": 90,
    "refused": 40,
    # Rows of the leader.
    "L1 refused": 40,
    "L2 duplicate": 40,
    "L5 1": 1,
    "L5 6": 0.2,
    "L5 74": 1,
    "L5 75": 1,
    "L5 diverging": 25,
    "L6": 90,
    "L10": 1,
    "L13": 0.2,
    "L14": 25,
    "L16 out of range": 1,
    "L18": 1,
    # Rows of the follower.
    "F4": 25,
    "F5 6": 25,
    "F5 74": 1,
    "F5 75": 1,
    "F8": 1,
    "F8 restart": 1,
    "F9": 1,
    "F10": 1,
    "F12": 50,
    # Rules of the controller.
    "R2": 90,
    "R3": 5,
    "R4": 50,
    "R4 none": 1,
    "R5": 1,
    "R6": 5,
    "R7": 10,
    "R8": 5,
    "R10": 1,
    "lossy handled": 5,
    "controller moved": 5,
    "move cancelled": 0.3,
    # The life of a node.
    "N2 waits": 1,
    "N6": 10,
    "N7": 1,
    "N8": 1,
    "storm": 5,
    "replaced": 1,
    "sync failed": 0.3,
    "damage": 1,
}


def missing(seen: Counter[str], runs: int) -> list[str]:
    """Return what too few of the runs have seen, with both shares in percent.

    A share is compared only if at least ten runs should have it: a short range proves nothing about
    a rare row.
    """
    short = []
    for name, percent in EXPECTED.items():
        if runs * percent < 1000:
            continue
        found = 100 * seen[name] / runs
        if found < percent:
            short.append(f"{name}: {found:.2f} % of {runs} seeds, expected {percent} %")
    return short
