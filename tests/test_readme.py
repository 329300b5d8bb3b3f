"""What the README and the quick start show runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
# The snippets of one page run one after the other, in one directory: as a reader would type them.
RUN = [README, ROOT / "docs" / "quickstart.md"]


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_a_page_runs_as_written(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = snippets(page)
    assert found
    for number, snippet in enumerate(found):
        exec(compile(snippet, f"{page.name}, snippet {number}", "exec"), {})


def test_every_link_leads_somewhere() -> None:
    for page in [README, *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_page_is_listed() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name
