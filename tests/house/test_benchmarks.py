"""The benchmarks' own reckoning: a plot shows what was measured.  `make bench` judges the bars."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from benchmarks.figure import OURS, Figure
from benchmarks.plot import grouped, write_plots

SVG = "{http://www.w3.org/2000/svg}"


def figure(name: str, value: float | None, unit: str, **peers: float) -> Figure:
    return Figure(name=name, value=value, unit=unit, peers=peers)


def test_figures_of_one_bar_and_unit_share_a_plot(tmp_path: Path) -> None:
    rows = [
        ("P1", figure("append, against A", 4.0, "M/s", A=1.0)),
        ("P1", figure("append, against B", 4.0, "M/s", B=2.0)),
        ("P2", figure("write", 3.0, "GB/s", bare=4.0)),
        ("P2", figure("read", 5.0, "GB/s", bare=6.0)),
        ("P3", figure("alone", 1.0, "ms")),  # nothing to compare with
        ("P4", figure("not installed", None, "ms", peer=1.0)),
    ]
    assert grouped(rows) == {
        ("P1", "M/s"): {OURS: 4.0, "A": 1.0, "B": 2.0},
        ("P2", "GB/s"): {
            f"{OURS}: write": 3.0,
            f"{OURS}: read": 5.0,
            "bare: write": 4.0,
            "bare: read": 6.0,
        },
    }
    write_plots(tmp_path / "plots", rows, {"P1": "append <fast>"}, "a machine")
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [
        "p1-m-s.svg",
        "p2-gb-s.svg",
    ]
    drawn = ElementTree.parse(tmp_path / "plots" / "p1-m-s.svg").getroot()
    texts = [text.text for text in drawn.iter(f"{SVG}text")]
    assert texts == ["P1  append <fast>, M/s", OURS, "4.00", "B", "2.00", "A", "1.00", "a machine"]
    widths = [float(rect.get("width", 0)) for rect in drawn.iter(f"{SVG}rect")][1:]
    assert widths[1] / widths[0] == 0.5 and widths[2] / widths[0] == 0.25
