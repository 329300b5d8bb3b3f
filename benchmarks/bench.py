"""Bench: what a bar is given to measure with, and the catalogue of all bars."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks.figure import OURS, Figure
from benchmarks.progress import Progress
from benchmarks.race import Run, Turn, medians, race
from benchmarks.sizes import Sizes
from benchmarks.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Bench:
    workspace: Workspace
    sizes: Sizes
    progress: Progress
    has_engine: bool  # False: logstore cannot be imported, so only peers run

    def race(
        self, entrants: Mapping[str, Run], *, writes: bool = False, rounds: int | None = None
    ) -> dict[str, float]:
        """Best rates by name.  `writes`: wait for the disk before every turn.

        Entrants whose name starts with our own are left out when there is no engine.
        """
        if not self.has_engine:
            entrants = {k: v for k, v in entrants.items() if not k.startswith(OURS)}
        return race(
            entrants,
            rounds=rounds or self.sizes.rounds,
            settle=self.workspace.settle if writes else None,
            step=self.progress.step,
        )

    def left_out(self, id: str, reason: str | None) -> bool:
        """Report why a bar cannot be measured here; False if `reason` is None."""
        if reason is not None:
            self.progress.note(f"{id} is left out: {reason}")
        return reason is not None

    def medians(
        self, entrants: Mapping[str, Turn], *, writes: bool = False, rounds: int | None = None
    ) -> dict[str, tuple[float, ...]]:
        """Medians by name: for servers, whose slow turns are their own and not the machine's."""
        return medians(
            entrants,
            rounds=min(rounds or self.sizes.wire_rounds, self.sizes.wire_rounds),
            settle=self.workspace.settle if writes else None,
            step=self.progress.step,
        )


Measure = Callable[[Bench], Iterator[Figure]]


@dataclass(frozen=True, slots=True)
class Bar:
    id: str
    title: str
    measure: Measure
    needs_engine: bool  # no peer of its own to show without logstore

    @property
    def place(self) -> tuple[str, int]:
        """The order of the bars: by letter, then by number."""
        return self.id[0], int(self.id[1:])


_catalogue: dict[str, Bar] = {}


def bar(id: str, title: str, *, needs_engine: bool = False) -> Callable[[Measure], Measure]:
    """Register a bar: `@bar("P10", "compaction, 10 M records")` on a generator of figures."""

    def register(measure: Measure) -> Measure:
        assert id not in _catalogue, f"{id} is measured twice"
        _catalogue[id] = Bar(id, title, measure, needs_engine)
        return measure

    return register


def catalogue() -> list[Bar]:
    """Every bar of every module in `benchmarks.bars`, in order."""
    from benchmarks import bars

    for module in pkgutil.iter_modules(bars.__path__):
        importlib.import_module(f"{bars.__name__}.{module.name}")
    return sorted(_catalogue.values(), key=lambda found: found.place)
