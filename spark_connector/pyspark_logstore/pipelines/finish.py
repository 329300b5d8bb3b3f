"""finish: complete the commits of killed drivers, and delete their leftover files.

The next commit of any sink to the store does the same; this is for a store without further commits.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pyspark_logstore.commits import Committer
from pyspark_logstore.pipelines.reports import Progress, Report, quiet
from pyspark_logstore.prepared import prepared_names

__all__ = ["FinishReport", "finish"]


@dataclasses.dataclass(frozen=True)
class FinishReport(Report):
    """What was completed: (application, batch, records); and prepared files removed, and left."""

    finished: tuple[tuple[str, int, int], ...]
    removed: int
    left: int

    def __str__(self) -> str:
        lines = [f"{app}: batch {batch}, {count} records" for app, batch, count in self.finished]
        lines.append(f"{self.removed} prepared files removed, {self.left} left to their jobs")
        return "\n".join(lines)


def finish(
    store: str | Path,
    *,
    orphan_age: float = 86_400.0,
    lock_timeout: float = 60.0,
    progress: Progress = quiet,
) -> FinishReport:
    """Finish every decided commit; remove prepared files older than `orphan_age` seconds."""
    root = Path(store)
    before = sum(1 for _ in prepared_names(root))
    progress(f"looking for unfinished commits in {root}")
    done = Committer(root, lock_timeout=lock_timeout, orphan_age=orphan_age).finish()
    left = sum(1 for _ in prepared_names(root))
    return FinishReport(
        tuple((each.application, each.batch_id, each.records) for each in done), before - left, left
    )
