"""docs/reference.md is generated from the docstrings and is up to date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_reference_is_up_to_date() -> None:
    ended = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "reference.py"), "--check"], check=False, timeout=300
    )
    assert ended.returncode == 0, "python docs/reference.py writes it anew"


def test_every_public_name_says_what_it_is() -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    sections = text.split("\n### ")[1:]
    empty = [section.splitlines()[0] for section in sections if len(section.splitlines()) < 3]
    assert empty == []
