"""Output: print rows as a table, JSON, JSON lines or CSV.

A row maps names to JSON values.  JSON and CSV print these values unchanged.  A table is for people:
it shows sizes with units and times as dates.  On a terminal rich draws the table; elsewhere plain
columns are printed and rich is not imported.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from logstore.cli import exits
from logstore.cli.text import json_text, printable, size_text
from logstore.times import time_text

__all__ = ["FORMATS", "Column", "Output", "forget_stdout"]

FORMATS = ("table", "json", "jsonl", "csv")

BUFFER_BYTES = 1 << 16

Row = Mapping[str, Any]


class Column(NamedTuple):
    """One column of a table: the name of its value, its heading, and how to show the value."""

    name: str
    heading: str
    show: Callable[[Any], str] = str
    right: bool = False


def plain(name: str, heading: str | None = None) -> Column:
    """Return a column of text."""
    return Column(name, heading or name.replace("_", " "), _words)


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


def number(name: str, heading: str | None = None) -> Column:
    """Return a column of numbers."""
    show = lambda value: "-" if value is None else f"{value:,}"  # noqa: E731
    return Column(name, heading or name.replace("_", " "), show, right=True)


def size(name: str, heading: str | None = None) -> Column:
    """Return a column of sizes in bytes."""
    show = lambda value: "-" if value is None else size_text(value)  # noqa: E731
    return Column(name, heading or name.replace("_", " "), show, right=True)


def moment(name: str, heading: str | None = None) -> Column:
    """Return a column of times in milliseconds."""
    show = lambda value: "-" if value is None else time_text(value)  # noqa: E731
    return Column(name, heading or name.replace("_", " "), show)


def known_time(time_ms: int) -> int | None:
    """Return a time for JSON: None for the log's -1, which means no time."""
    return time_ms if time_ms >= 0 else None


class Output:
    """Prints the rows of a verb.  The default is a table on a terminal, else JSON lines."""

    def __init__(self, kind: str | None = None) -> None:
        self.terminal = sys.stdout.isatty()
        self.kind = kind or ("table" if self.terminal else "jsonl")
        self.stream = _stdout()  # buffered: a row is one write of many, not one system call

    def line(self, text: str) -> None:
        """Print a line.  The caller escapes text that comes from data."""
        self.stream.write(text.encode("utf-8", "backslashreplace") + b"\n")

    def note(self, text: str) -> None:
        """Print a line on stderr, after the rows printed so far."""
        self.flush()
        print(printable(text), file=sys.stderr)

    def flush(self) -> None:
        """Write the buffered rows to stdout."""
        self.stream.flush()

    def dry_run(self, text: str = "nothing was changed: repeat it with --yes") -> int:
        """Print that nothing was changed, and return the exit code for it."""
        self.note(text)
        return exits.DRY_RUN

    def rows(self, rows: Iterable[Row], columns: Sequence[Column], *, empty: str = "") -> None:
        """Print rows.  If a table would have no rows, note `empty` instead."""
        if self.kind == "jsonl":
            for row in rows:
                self.line(json_text(row))
        elif self.kind == "json":
            self.line(json_text(list(rows), indent=2))
        elif self.kind == "csv":
            self._csv(rows)
        else:
            shown = [[printable(c.show(row.get(c.name))) for c in columns] for row in rows]
            if shown:
                self._table(shown, columns)
            elif empty:
                self.note(empty)

    def one(self, row: Row, *, words: Iterable[str] | None = None) -> None:
        """Print one row as an object.  In table format print the lines of `words` instead."""
        if self.kind == "table":
            if words is not None:
                for text in words:
                    self.line(printable(text))
            else:
                self._pairs(row)
        elif self.kind == "csv":
            self._csv([row])
        else:
            self.line(json_text(row, indent=2 if self.kind == "json" else None))

    def _pairs(self, row: Row) -> None:
        width = max(map(len, row), default=0)
        for name, value in row.items():
            text = value if isinstance(value, str) else json_text(value)
            self.line(f"{printable(name):<{width}}  {printable(text)}")

    def _csv(self, rows: Iterable[Row]) -> None:
        import csv

        stream, head = io.StringIO(newline=""), False
        writer = csv.writer(stream, lineterminator="\n")
        for row in rows:
            if not head:
                writer.writerow(row)
                head = True
            writer.writerow([_csv_cell(value) for value in row.values()])
            self.stream.write(stream.getvalue().encode("utf-8", "backslashreplace"))
            stream.seek(0)  # one row at a time, so that memory is bounded
            stream.truncate()

    def _table(self, shown: list[list[str]], columns: Sequence[Column]) -> None:
        if self.terminal and self._rich_table(shown, columns):
            return
        headings = [column.heading.upper() for column in columns]
        widths = [max(map(len, cells)) for cells in zip(headings, *shown, strict=True)]
        for cells in (headings, *shown):
            parts = [
                cell.rjust(width) if column.right else cell.ljust(width)
                for cell, width, column in zip(cells, widths, columns, strict=True)
            ]
            self.line("  ".join(parts).rstrip())

    def _rich_table(self, shown: list[list[str]], columns: Sequence[Column]) -> bool:
        try:
            from rich import box
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text
        except ImportError:
            return False
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        for column in columns:
            justify: Any = "right" if column.right else "left"
            table.add_column(column.heading.upper(), justify=justify, overflow="fold")
        for cells in shown:
            # Text, because rich would read brackets in a plain string as markup.
            table.add_row(*(Text(cell) for cell in cells))
        self.flush()
        Console(file=sys.stdout).print(table)
        return True


def _stdout() -> BinaryIO:
    """Return a binary stream to stdout, buffered even with PYTHONUNBUFFERED set."""
    try:
        return open(sys.stdout.fileno(), "wb", buffering=BUFFER_BYTES, closefd=False)
    except (OSError, ValueError):
        return sys.stdout.buffer  # in a test: stdout without a descriptor


def _csv_cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, bool | dict | list | tuple):
        return json_text(value)
    return printable(value) if isinstance(value, str) else value


def forget_stdout() -> None:
    """Redirect stdout to /dev/null, so that flushing its buffer at exit does not raise."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError):
        pass
    finally:
        os.close(nowhere)
