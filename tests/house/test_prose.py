"""The prose of the project: how often it uses words that a reader has to read twice.

Docstrings, comments and docs name their subject and use Kafka's and POSIX's words.  A file does not
say, tell or believe anything; a record is deleted and does not go; an offset is after another and
not behind it.  Each area has a ceiling of such words per 1,000 words.  A ceiling may only fall:
when the count is well below it, the test asks for the lower number.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

WORDS = (
    *("say", "says", "said", "tell", "tells", "told", "speak", "speaks", "spoke", "spoken"),
    *("vouch", "vouches", "believe", "believes", "believed", "whoever", "whatever", "wherever"),
    *("nobody", "somebody", "someone", "anybody", "anyone", "behind", "beside", "anew", "sound"),
    *("goes", "comes", "lies"),
)
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
C_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)

# Words of the list per 1,000 words, in each area.
GOAL = 1.0
CEILINGS = dict.fromkeys(("logstore", "spark_connector", "native", "tests", "docs"), GOAL)
SLACK = 0.5  # how far below its ceiling a count may be before the ceiling has to follow

AREAS = {
    "logstore": ("logstore/**/*.py",),
    "spark_connector": ("spark_connector/**/*.py",),
    "native": ("native/core/*.[ch]", "native/python/*.[ch]"),
    "tests": ("tests/**/*.py",),
    "docs": ("docs/*.md", "README.md", "CONTRIBUTING.md"),
}
GENERATED = {"docs/reference.md"}


def prose_of_python(source: str) -> Iterator[str]:
    """Every docstring and every comment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def prose_of(path: Path) -> str:
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        return "\n".join(prose_of_python(text))
    if path.suffix == ".md":
        return FENCED.sub("", text)
    return "\n".join(C_COMMENT.findall(text))


def count(prose: str) -> tuple[int, Counter[str]]:
    """How many words there are, and how often each of the list."""
    words = [word.lower() for word in WORD.findall(prose)]
    return len(words), Counter(word for word in words if word in WORDS)


@pytest.mark.parametrize("area", AREAS)
def test_the_ceiling_holds(area: str) -> None:
    total = 0
    found: Counter[str] = Counter()
    places: Counter[str] = Counter()
    for pattern in AREAS[area]:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            if name in GENERATED:
                continue
            words, hits = count(prose_of(path))
            total += words
            found += hits
            places[name] += hits.total()
    assert total, f"no prose was read in {area}"
    rate = 1000 * found.total() / total
    ceiling = CEILINGS[area]
    assert rate <= ceiling, (
        f"{area}: {rate:.2f} such words per 1,000, the ceiling is {ceiling}; "
        f"most often {found.most_common(5)}, most of them in {places.most_common(5)}"
    )
    reached = ceiling <= GOAL
    assert reached or rate > ceiling - SLACK, (
        f"{area}: {rate:.2f} per 1,000: lower its ceiling of {ceiling}"
    )


def test_words_are_found_in_docstrings_comments_and_docs_and_nowhere_else() -> None:
    source = '"""A file tells."""\nx = "tells"  # behind it\ndef f():\n    """Whoever."""\n'
    assert count("\n".join(prose_of_python(source)))[1] == {"tells": 1, "behind": 1, "whoever": 1}
    assert count("".join(C_COMMENT.findall('/* tells */ char *s = "tells";')))[1] == {"tells": 1}
    assert count(FENCED.sub("", "It tells.\n```\ntells\n```\n"))[1] == {"tells": 1}
