"""Plots: the figures of one bar that share a unit, as bars of an SVG file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

from benchmarks.figure import OURS
from benchmarks.table import Row, number

WIDTH, LEFT, RIGHT, ROW, TOP, FOOT = 760, 310, 80, 26, 34, 24
LESS_IS_BETTER = ("us", "ms", "s", "MiB")
COLOURS = {True: "#1f6feb", False: "#9aa4b2"}


def write_plots(folder: Path, rows: Iterable[Row], titles: dict[str, str], machine: str) -> None:
    """A file for each bar and unit that has something to compare; older files of others stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for (id, unit), lengths in grouped(rows).items():
        if len(lengths) < 2:
            continue
        name = re.sub(r"[^a-z0-9]+", "-", f"{id} {unit}".lower()).strip("-")
        text = picture(f"{id}  {titles.get(id, '')}", unit, lengths, machine)
        (folder / f"{name}.svg").write_text(text, encoding="utf-8")


def grouped(rows: Iterable[Row]) -> dict[tuple[str, str], dict[str, float]]:
    """Bar and unit -> entrant -> its figure; the work is named where one entrant has several."""
    works: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for id, figure in rows:
        if figure.value is None or not figure.peers:
            continue
        entrants = works.setdefault((id, figure.unit), {})
        what = figure.name.partition(", against ")[0]
        for name, value in ((OURS, figure.value), *figure.peers.items()):
            entrants.setdefault(name, {})[what] = value
    return {
        bar: {
            f"{name}: {what}" if len(set(figures.values())) > 1 else name: value
            for name, figures in entrants.items()
            for what, value in figures.items()
        }
        for bar, entrants in works.items()
    }


def picture(title: str, unit: str, lengths: dict[str, float], machine: str) -> str:
    height = TOP + ROW * len(lengths) + FOOT
    longest = max(lengths.values()) or 1.0
    less = " (less is better)" if unit in LESS_IS_BETTER else ""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="10" y="20" font-weight="600">{escape(title)}, {escape(unit)}{less}</text>',
    ]
    for place, (name, value) in enumerate(sorted(lengths.items(), key=lambda each: -each[1])):
        y = TOP + ROW * place
        width = max(1.0, (WIDTH - LEFT - RIGHT) * value / longest)
        colour = COLOURS[name.startswith(OURS)]
        lines += [
            f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(shortened(name))}</text>',
            f'<rect x="{LEFT}" y="{y + 3}" width="{width:.1f}" height="{ROW - 8}" '
            f'fill="{colour}"/>',
            f'<text x="{LEFT + width + 6:.1f}" y="{y + 15}">{number(value)}</text>',
        ]
    foot = f'<text x="10" y="{height - 8}" font-size="10" fill="#666">{escape(machine)}</text>'
    return "\n".join([*lines, foot, "</svg>", ""])


def shortened(name: str) -> str:
    return name if len(name) <= 50 else f"{name[:49]}…"
