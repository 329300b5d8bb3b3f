"""The pages: snippets run as written, links and paths exist, lists are complete."""

from __future__ import annotations

import ast
import asyncio
import inspect
import logging
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import logstore
from logstore import errors, work_errors

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
ROOTS = (ROOT, ROOT / "logstore")  # of the paths in architecture.md
# The snippets of one page run one after the other, in one directory: as a reader would type them.
RUN = [
    README,
    *(
        DOCS / f"{name}.md"
        for name in (
            "quickstart",
            "reading-and-writing",
            "errors",
            "operations",
            "recipes",
            "delays",
        )
    ),
]

GUIDES = (
    *("consumers", "producers", "queues", "retention", "compaction"),
    *("testing", "testing-your-code"),
)


@pytest.fixture
def logging_as_it_was() -> Iterator[None]:
    """Remove the handlers and levels that a page sets."""
    loggers = [logging.getLogger(name) for name in (None, "logstore", "logstore.partition")]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.usefixtures("logging_as_it_was")
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_a_page_runs_as_written(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = snippets(page)
    assert found
    for number, snippet in enumerate(found):
        exec(compile(snippet, f"{page.name}, snippet {number}", "exec"), {})


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_runs_with_an_open_store(name: str, tmp_path: Path) -> None:
    """These pages leave out the lines that open a store, a log and a consumer."""
    (tmp_path / "traced").mkdir()
    with logstore.open(tmp_path / "store") as store:
        for topic in ("orders", "debits", "credits"):
            store.create_topic(topic)
        log = store["orders"][0]
        log.append(b"1 EUR", key=b"alice")
        with logstore.Consumer(store, "orders", group_id="guide", auto_commit=False) as consumer:
            consumer.poll(timeout=1)
            given = {"logstore": logstore, "store": store, "log": log, "consumer": consumer}
            given |= {"directory": tmp_path / "traced", "bill": print}
            for number, snippet in enumerate(snippets(DOCS / f"{name}.md")):
                code = snippet.replace("timeout=5)", "timeout=0.1)")
                compiled = compile(
                    code, f"{name}, {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
                )
                if "Bank(" not in code and (running := eval(compiled, given)) is not None:
                    asyncio.run(running)


@pytest.mark.parametrize("page", RUN[:3], ids=lambda page: page.name)  # others leave types out
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


def anchors(page: Path) -> set[str]:
    """The names that a site gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", text.lower())) for text in headings}


def test_every_link_leads_somewhere() -> None:
    for page in [README, ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")]:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                path, _, anchor = target.partition("#")
                linked = page.parent / path if path else page
                assert linked.exists(), f"{page.name}: {target}"
                assert not anchor or anchor in anchors(linked), f"{page.name}: {target}"


def test_the_readme_names_files_and_has_no_relative_link() -> None:
    """A package index shows the README without the files next to it."""
    text = README.read_text(encoding="utf-8")
    assert [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link] == []
    named = re.findall(r"`((?:docs|examples)/[\w./-]*|[A-Z]+\.md)`", text)
    assert len(named) > 4
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_page_is_listed_and_has_the_same_place_in_the_site() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1]
    listed = [page for page in re.findall(r"\((\S+\.md)\)", index) if "/" not in page]
    assert ["README.md", *listed] == re.findall(r": (\S+\.md)", site)
    assert {page.name for page in DOCS.glob("*.md")} == {"README.md", *listed}


def test_every_path_that_the_architecture_names_exists() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    paths = re.findall(r"`([a-z_]+/[\w./-]+)`", text)
    assert len(paths) > 50
    assert [path for path in paths if not any((root / path).exists() for root in ROOTS)] == []


def locks_of(node: ast.AST, owner: str) -> Iterator[str]:
    """``Class.attribute`` or ``module.name`` of every lock that outlives the call that makes it."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Assign(targets=[target], value=ast.Call(func=made)):
                is_lock = ast.unparse(made) in ("threading.Lock", "threading.RLock")
                if is_lock and (isinstance(target, ast.Attribute) or child.col_offset == 0):
                    yield f"{owner}.{ast.unparse(target).removeprefix('self.')}"
        yield from locks_of(child, child.name if isinstance(child, ast.ClassDef) else owner)


def test_every_lock_has_a_place_in_the_lock_order() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    order = text.split("## Lock order")[1].split("\nRules under locks")[0]
    listed = set(re.findall(r"`([\w.]+)`", order))
    missing = set()
    for path in (ROOT / "logstore").rglob("*.py"):
        package = path.relative_to(ROOT / "logstore").parts[0]
        for lock in locks_of(ast.parse(path.read_text("utf-8")), path.stem):
            # The page names the locks of an open log by their roles: view.lock, Durability._lock.
            name = lock.split(".")[1]
            of_a_log = package == "partition" and name in {each.split(".")[-1] for each in listed}
            if package not in ("testing", "cli") and not of_a_log:
                missing |= {lock} - listed
    assert missing == set()


def test_the_page_of_errors_lists_every_error() -> None:
    listed = set(
        re.findall(r"`(?:logstore\.)?(\w+Error)`", (DOCS / "errors.md").read_text("utf-8"))
    )
    both = vars(errors) | vars(work_errors)
    defined = {name for name, each in both.items() if inspect.isclass(each)}
    assert defined - listed == set()


def test_the_page_of_operations_lists_every_logger() -> None:
    sources = [*(ROOT / "logstore").rglob("*.py"), *(ROOT / "spark_connector").rglob("*.py")]
    used = {
        name
        for path in sources
        for name in re.findall(r'getLogger\("([\w.]+)"\)', path.read_text("utf-8"))
    }
    page = (DOCS / "operations.md").read_text("utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| (?:DEBUG|INFO|WARNING|ERROR)", page, re.MULTILINE)
    assert used - {"logstore"} == set(rows)


@pytest.mark.parametrize(
    "subject",
    [
        *("backup", "migrat", "upgrade", "retry", "dead letter", "metrics", "monitor", "logging"),
        *("multiple processes", "gunicorn", "encryption", "delete topic|deleting a topic"),
    ],
)
def test_a_search_for_a_subject_finds_a_page(subject: str) -> None:
    pages = [page.read_text("utf-8").lower() for page in DOCS.glob("*.md")]
    assert any(re.search(subject, text) for text in pages)
