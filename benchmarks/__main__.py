"""`python -m benchmarks`: run the bars, print what was found."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

from benchmarks import engine, table
from benchmarks.bench import Bar, Bench, catalogue
from benchmarks.plot import write_plots
from benchmarks.progress import Progress
from benchmarks.sizes import FULL, QUICK
from benchmarks.workspace import Workspace, file_system

INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        bars = chosen(options.only)
    except ModuleNotFoundError as error:
        print(f"{error.name} is missing: pip install 'logstore-engine[bench]'", file=sys.stderr)
        return 2
    if options.list:
        for found in bars:
            print(f"{found.id:<4} {found.title}")
        return 0
    # kill(1) must not leave gigabytes behind: leave by way of the context managers.
    signal.signal(signal.SIGTERM, leave)
    try:
        with Workspace.open(options.dir) as workspace:
            return run(bars, workspace, options)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED


def leave(number: int, frame: FrameType | None) -> None:
    print(f"\nended by {signal.Signals(number).name}", file=sys.stderr)
    sys.exit(128 + number)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", metavar="P1,P5", help="run these bars only")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures there")
    parser.add_argument("--plots", metavar="DIR", type=Path, help="also draw them, as SVG files")
    parser.add_argument("--quick", action="store_true", help="small sizes: a smoke test")
    parser.add_argument("--dir", metavar="DIR", type=Path, help="where to write (and clean up)")
    parser.add_argument("--list", action="store_true", help="name the bars and stop")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a bar is not met")
    return parser.parse_args(arguments)


def chosen(only: str | None) -> list[Bar]:
    bars = catalogue()
    if only is None:
        return bars
    wanted = {id.strip().upper() for id in only.split(",")}
    unknown = wanted - {found.id for found in bars}
    if unknown:
        raise SystemExit(f"no such bar: {', '.join(sorted(unknown))} (see --list)")
    return [found for found in bars if found.id in wanted]


def run(bars: list[Bar], workspace: Workspace, options: argparse.Namespace) -> int:
    progress = Progress()
    sizes = QUICK if options.quick else FULL
    bench = Bench(workspace, sizes, progress, has_engine=engine.installed())
    if not bench.has_engine:
        progress.note("logstore cannot be imported: the peers' figures alone")
    machine = (
        f"Python {platform.python_version()}, {os.cpu_count()} CPUs, "
        f"{file_system(workspace.path)}, load {os.getloadavg()[0]:.1f}"
    )
    print(
        f"{machine}; best of {sizes.rounds} rounds or more after a warm-up"
        + (", quick sizes: the ratios mean little" if options.quick else "")
    )
    print(table.heading(), flush=True)
    rows: list[table.Row] = []
    broken: list[str] = []
    for found in bars:
        if found.needs_engine and not bench.has_engine:
            continue
        progress.start(f"{found.id} {found.title}")
        try:
            for figure in found.measure(bench):
                rows.append((found.id, figure))
                progress.clear()
                print(table.line(rows[-1]), flush=True)
        except Exception:  # noqa: BLE001  one broken bar must not cost the others' minutes
            progress.note(f"{found.id} broke:\n{traceback.format_exc()}")
            broken.append(found.id)
    progress.clear()
    print(table.summary(rows))
    if options.json is not None:
        table.write_json(options.json, rows)
    if options.plots is not None:
        titles = {found.id: found.title for found in bars}
        write_plots(options.plots, rows, titles, machine)
    if broken:
        print(f"broken: {', '.join(broken)}", file=sys.stderr)
        return 2
    return 1 if options.strict and any(figure.met is False for _, figure in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
