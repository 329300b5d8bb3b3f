"""Table: the figures as lines of text, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks.figure import Figure

NAME_WIDTH = 52
COLUMNS = f"{{:<4}} {{:<{NAME_WIDTH}}} {{:>9}} {{:<11}} {{:>8}} {{:<11}} {{:<8}} {{}}"

Row = tuple[str, Figure]
"""A bar's id and one of its figures."""


def heading() -> str:
    columns = COLUMNS.format("id", "what", "ours", "unit", "ratio", "bar", "", "peers")
    return f"{columns}\n{'-' * len(columns)}"


def line(row: Row) -> str:
    id, figure = row
    return COLUMNS.format(
        id,
        figure.name,
        number(figure.value),
        figure.unit,
        "-" if figure.ratio is None else f"{figure.ratio:.2f} x",
        str(figure.limit or "-"),
        {True: "met", False: "NOT MET", None: "-"}[figure.met],
        ", ".join(f"{name} {number(value)}" for name, value in figure.peers.items()),
    ).rstrip()


def number(value: float | None) -> str:
    """Three significant digits, never an exponent."""
    if value is None:
        return "-"
    for digits, bound in ((0, 100), (1, 10), (2, 1), (3, 0.1)):
        if abs(value) >= bound:
            return f"{value:,.{digits}f}"
    return f"{value:.4f}"


def summary(rows: Iterable[Row]) -> str:
    verdicts = [figure.met for _, figure in rows]
    judged = [met for met in verdicts if met is not None]
    text = f"{sum(judged)} of {len(judged)} met"
    silent = len(verdicts) - len(judged)
    return f"{text}, {silent} not judged" if silent else text


def write_json(path: Path, rows: Iterable[Row]) -> None:
    found = [
        {
            "id": id,
            "name": figure.name,
            "value": figure.value,
            "unit": figure.unit,
            "peers": dict(figure.peers),
            "ratio": figure.ratio,
            "bar": None if figure.limit is None else str(figure.limit),
            "met": figure.met,
        }
        for id, figure in rows
    ]
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
