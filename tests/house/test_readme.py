"""What the README and the quick start show runs as it is written."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
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


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_a_page_is_clean_for_a_strict_type_checker(page: Path, tmp_path: Path) -> None:
    build = pytest.importorskip("mypy.api")
    (tmp_path / "page.py").write_text(
        "".join(
            f"def snippet_{number}() -> None:\n{textwrap.indent(snippet, '    ')}\n"
            for number, snippet in enumerate(snippets(page))
        )
    )
    out, _, code = build.run(
        ["--strict", "--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary",
         "--cache-dir", str(tmp_path / "cache"), str(tmp_path / "page.py")]
    )  # fmt: skip
    assert code == 0, out


def test_what_send_and_poll_return_is_typed(tmp_path: Path) -> None:
    build = pytest.importorskip("mypy.api")
    (tmp_path / "page.py").write_text(
        "from logstore import AsyncConsumer, Consumer, Producer, Transaction\n"
        "def typed(c: Consumer, p: Producer, tx: Transaction) -> None:\n"
        "    p.send('t', b'v').reslut()\n"
        "    tx.send('t', b'v').reslut()\n"
        "    c.poll()[0].ofset\n"
        "    for record in c:\n"
        "        record.offset + 'a'\n"
        "async def later(c: AsyncConsumer) -> None:\n"
        "    (await c.poll())[0].ofset\n"
        "    async for record in c:\n"
        "        record.ofset\n"
    )
    out, _, _ = build.run(
        ["--strict", "--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary",
         "--cache-dir", str(tmp_path / "cache"), str(tmp_path / "page.py")]
    )  # fmt: skip
    assert [int(line.split(":")[1]) for line in out.splitlines()] == [3, 4, 5, 7, 9, 11], out


def test_every_link_leads_somewhere() -> None:
    for page in [README, *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_page_is_listed() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name
