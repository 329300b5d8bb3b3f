"""The page of an audit: one HTML file with its plots inside, which needs nothing else."""

from __future__ import annotations

import datetime
import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyspark_logstore.pipelines.reports import units

if TYPE_CHECKING:
    from pyspark_logstore.pipelines.audit import HourAudit, TopicAudit

__all__ = ["audit_page"]

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 860, 180, 70, 24, 10
COLOURS = ("#3465a4", "#cc6600", "#4e9a06", "#75507b", "#a40000", "#8f5902")
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 960px; color: #222 }
table { border-collapse: collapse; margin: 1em 0 }
th, td { padding: .25em .8em; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
.bad { color: #a40000; font-weight: 600 }
code { background: #f3f3f3; padding: 0 .2em }
svg text { font: 11px system-ui, sans-serif; fill: #555 }
"""


def audit_page(reference: str, topics: Sequence[TopicAudit], hours: Sequence[HourAudit]) -> str:
    """The whole page."""
    names = [topic.topic for topic in topics]
    colours = {name: COLOURS[n % len(COLOURS)] for n, name in enumerate(names)}
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>Audit of {html.escape(', '.join(names))}</title><style>{STYLE}</style></head>",
        f"<body><h1>Audit of {html.escape(', '.join(names))}</h1>",
        f"<p>Keys are followed from <code>{html.escape(reference)}</code>. Hours are UTC.</p>",
        _table(reference, topics),
        "<h2>Records per hour</h2>",
        *(_bars(name, colours[name], hours, "records", "") for name in names),
        "<h2>Bytes per hour</h2>",
        *(_bars(name, colours[name], hours, "size_bytes", "B") for name in names),
    ]
    delayed = [n for n in names if any(h.topic == n and h.delay_p95_ms is not None for h in hours)]
    if delayed:
        parts.append(f"<h2>Delay behind {html.escape(reference)}, 95 % of keys</h2>")
        parts += [_bars(name, colours[name], hours, "delay_p95_ms", "ms") for name in delayed]
    return "\n".join([*parts, "</body></html>", ""])


def _table(reference: str, topics: Sequence[TopicAudit]) -> str:
    heads = ("topic", "partitions", "records", "bytes", "holes", "no key", "tombstones",
             "duplicate keys", "missing keys", "extra keys")  # fmt: skip
    rows = []
    for t in topics:
        cells = [t.partitions, t.records, units(t.size_bytes), t.holes, t.keyless, t.tombstones]
        line = "".join(f"<td>{cell}</td>" for cell in cells)
        line += _examined(t.duplicate_keys, t.duplicate_examples)
        if t.topic == reference:
            line += "<td>–</td><td>–</td>"
        else:
            line += _examined(t.missing_keys, t.missing_examples) + f"<td>{t.extra_keys}</td>"
        rows.append(f"<tr><td>{html.escape(t.topic)}</td>{line}</tr>")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _examined(count: int, examples: Sequence[str]) -> str:
    if not count:
        return "<td>0</td>"
    hint = html.escape("such as " + ", ".join(examples), quote=True)
    return f"<td class='bad' title='{hint}'>{count}</td>"


def _bars(topic: str, colour: str, hours: Sequence[HourAudit], field: str, unit: str) -> str:
    """A bar for every hour between the first and the last, also those without records."""
    mine: dict[datetime.datetime, Any] = {
        h.hour: getattr(h, field) for h in hours if h.topic == topic
    }
    if not mine:
        return f"<p>{html.escape(topic)}: no records</p>"
    first, last = min(h.hour for h in hours), max(h.hour for h in hours)
    count = int((last - first).total_seconds() // 3600) + 1
    top = max((value or 0 for value in mine.values()), default=0) or 1
    step = (WIDTH - LEFT) / count
    bars = []
    for hour, value in sorted(mine.items()):
        if value is None:
            continue
        x = LEFT + (hour - first).total_seconds() / 3600 * step
        height = max(0.5, value / top * (HEIGHT - BOTTOM - TOP))
        bars.append(
            f"<rect x='{x:.2f}' y='{HEIGHT - BOTTOM - height:.2f}' width='{max(0.5, step - 1):.2f}'"
            f" height='{height:.2f}' fill='{colour}'><title>{hour:%Y-%m-%d %H:00}: "
            f"{_figure(value, unit)}</title></rect>"
        )
    return (
        f"<figure><figcaption>{html.escape(topic)}</figcaption>"
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}' role='img'>"
        f"<line x1='{LEFT}' y1='{HEIGHT - BOTTOM}' x2='{WIDTH}' y2='{HEIGHT - BOTTOM}' "
        f"stroke='#999'/><text x='{LEFT - 6}' y='{TOP + 8}' text-anchor='end'>"
        f"{_figure(top, unit)}</text><text x='{LEFT}' y='{HEIGHT - 8}'>{first:%Y-%m-%d %H:00}"
        f"</text><text x='{WIDTH}' y='{HEIGHT - 8}' text-anchor='end'>{last:%Y-%m-%d %H:00}</text>"
        f"{''.join(bars)}</svg></figure>"
    )


def _figure(value: float, unit: str) -> str:
    if unit == "B":
        return units(value)
    return f"{value:,.0f}{' ' + unit if unit else ''}"
