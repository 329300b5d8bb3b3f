"""Repair: the steps of a repair; Receipt: the file that lists them as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

from logstore.checking.partition_check import RECEIPT
from logstore.checking.problem import Problem
from logstore.files.directory import Directory
from logstore.log.segment_digest import digest_of

__all__ = ["Repair", "RepairStep"]


@dataclasses.dataclass(frozen=True, slots=True)
class RepairStep:
    """One change, and the problems that it corrects."""

    action: str  # "rebuild", "set-aside", "rewrite", "cut", "accept" or "open"
    path: Path
    what: str
    problems: tuple[Problem, ...]
    loses: tuple[range, ...] = ()  # offsets that no longer exist after the change

    def as_json(self) -> dict[str, Any]:
        """Return all of the step, in types of JSON."""
        return {
            "action": self.action,
            "path": str(self.path),
            "what": self.what,
            "loses": [[each.start, each.stop] for each in self.loses],
            "problems": [problem.as_json() for problem in self.problems],
        }

    def __str__(self) -> str:
        lost = sum(len(each) for each in self.loses)
        return f"{self.path}: {self.what}" + (f" ({lost} offsets are given up)" if lost else "")


@dataclasses.dataclass(slots=True)
class Repair:
    """The steps that a repair did; with ``dry_run``, the steps that it would do."""

    path: Path
    dry_run: bool
    steps: list[RepairStep]
    left: list[Problem]  # problems without a step, or with one that needs accept_loss
    receipt: Path | None = None

    def as_json(self) -> dict[str, Any]:
        """Return all of the repair, in types of JSON."""
        return {
            "path": str(self.path),
            "dry_run": self.dry_run,
            "steps": [step.as_json() for step in self.steps],
            "left": [problem.as_json() for problem in self.left],
            "receipt": None if self.receipt is None else str(self.receipt),
        }

    @property
    def _idle(self) -> str:
        errors = sum(problem.severity == "error" for problem in self.left)
        if not errors:
            return "nothing to do"
        return f"nothing is mended: {errors} errors are left, and these cost records or more"

    def __str__(self) -> str:
        said = "would do" if self.dry_run else "did"
        lines = [f"{said}: {step}" for step in self.steps] or [self._idle]
        return "\n".join([*lines, *(f"left: {problem}" for problem in self.left)])


class Receipt:
    """The file ``logstore.repair-<n>.json`` in the repaired directory.

    It is written, with "finished": false, before the first change, and replaced after each step.
    So after a crash it lists every finished step.
    """

    def __init__(self, directory: Directory, done: Repair, accept_loss: bool) -> None:
        self._directory = directory
        taken = set(filter(RECEIPT.match, directory.names()))
        number = 1
        while (name := f"logstore.repair-{number}.json") in taken:
            number += 1
        self._name = name
        self.path = directory.path / self._name
        self._content: dict[str, Any] = {
            "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "path": str(directory.path),
            "accept_loss": accept_loss,
            "planned": [step.as_json() for step in done.steps],
            "left": [problem.as_json() for problem in done.left],
            "done": [],
        }

    def note(
        self,
        step: RepairStep,
        before: tuple[int, int] | None,
        after: tuple[int, int] | None,
    ) -> None:
        """Add a finished step; `before` and `after` are size and CRC-32C of its file, if any."""
        done = {"action": step.action, "path": str(step.path), "before": before, "after": after}
        self._content["done"].append(done)
        self.write(finished=False)

    def write(self, *, finished: bool) -> None:
        text = json.dumps({**self._content, "finished": finished}, indent=1)
        self._directory.replace(self._name, text.encode() + b"\n")


def file_digest(directory: Directory, name: str) -> tuple[int, int] | None:
    return digest_of(directory, name)
