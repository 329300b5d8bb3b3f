"""Settings: the size of a simulated cluster and its faults, drawn from the seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from random import Random

from logstore.testing.simulation.network import MS

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run; some runs are calm and some have every fault."""

    steps: int = 1500
    nodes: int = 3
    replicas: int = 3
    min_isr: int = 2
    partitions: int = 1
    fsync: bool = True  # else the replicas acknowledge what the page cache has
    lag_ms: int = 1500  # replica.lag.time.max.ms
    session_ms: int = 2000
    fetch_wait_ms: int = 300
    backoff_ms: int = 400
    produce_timeout_ms: int = 900
    tick_ms: int = 250
    loss: float = 0.0
    duplication: float = 0.01
    late: float = 0.05
    answers_lost: float = 0.02  # commits whose answer is lost
    slow_tree: float = 0.05
    scattered: float = 0.0
    slow_syncs: float = 0.05
    chances: float = 0.02  # how often a shell does something legal and unusual
    nemesis: float = 1.0  # acts, as a share of the usual number
    producers: int = 3
    consumers: int = 2

    @classmethod
    def drawn(cls, random: Random, **given: object) -> Settings:
        """Draw what is not given."""
        nodes = random.choice((3, 3, 4, 5))
        replicas = min(nodes, random.choice((2, 3, 3, 3, 4)))
        lag_ms = random.choice((400, 1500, 3000, 8000))
        drawn: dict[str, object] = {
            "nodes": nodes,
            "replicas": replicas,
            "min_isr": random.choice((1, 2, 2)),
            "partitions": random.choice((1, 1, 2, 3)),
            "fsync": random.random() < 0.6,
            "lag_ms": lag_ms,
            "tick_ms": max(200, min(500, lag_ms // 2)),
            "loss": random.choice((0.0, 0.02, 0.1)),
            "answers_lost": random.choice((0.02, 0.1, 0.4)),
            "slow_tree": random.choice((0.05, 0.3)),
            "scattered": random.choice((0.0, 0.0, 0.3)),
            "nemesis": random.choice((0.5, 1.0, 1.0, 2.0)),
        }
        unknown = set(given) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"no such setting: {', '.join(sorted(unknown))}")
        return cls(**{**drawn, **given})  # type: ignore[arg-type]

    def sync_delay(self, random: Callable[[], float]) -> int:
        """Return how long a sync takes."""
        if random() < self.slow_syncs:
            return int(random() * 300 * MS)
        return 500 + int(random() * 4 * MS)
