"""What a user gets from an index: an sdist that builds, a wheel that runs in an empty environment.

The checkout is copied first: setuptools remembers file lists in `*.egg-info`, and would happily
ship from memory a header that MANIFEST.in has forgotten.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import logstore

ROOT = Path(__file__).resolve().parent.parent.parent

QUICK_START = """
import sys
from logstore import Partition
with Partition.open(sys.argv[1]) as log:
    log.append(b"12 EUR", key=b"alice")
    print([(r.offset, r.key, r.value) for r in log], log.durable_offset)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command, away from this checkout and from our own environment."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LOGSTORE"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source") / "logstore"
    made = shutil.ignore_patterns(
        ".*", "build", "dist", "target", "*.egg-info", "*.so", "__pycache__"
    )
    shutil.copytree(ROOT, source, ignore=made)
    out = tmp_path_factory.mktemp("sdist")
    run(
        sys.executable,
        *("-m", "build", "--sdist", "--no-isolation", "--outdir", out, "."),
        cwd=source,
    )
    (archive,) = out.glob("logstore_engine-*.tar.gz")
    return archive


def test_the_sdist_holds_all_that_a_build_and_a_test_run_need(sdist: Path) -> None:
    with tarfile.open(sdist) as tar:
        shipped = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    needed = {"setup.py", "pyproject.toml", "LICENSE", "Makefile", "logstore/py.typed"}
    needed |= {"CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml"}
    for pattern in ("native/**/*.[ch]", "logstore/**/*.py", "logstore/**/*.pyi", "tests/**/*.py",
                    "logstore/**/*.html", "docs/*.md", "examples/**/*.py",
                    "spark_connector/**/*.py"):  # fmt: skip
        needed |= {str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)}
    assert needed - shipped == set()
    made = {name for name in shipped if name.endswith((".so", ".pyc", ".o"))}
    assert made == set()


@pytest.mark.slow  # downloads the build backend and the dependencies
def test_a_wheel_built_from_the_sdist_runs_in_an_empty_environment(
    sdist: Path, tmp_path: Path
) -> None:
    run(sys.executable, *("-m", "build", "--wheel", "--outdir", tmp_path, "."), cwd=unpack(sdist))
    (wheel,) = tmp_path.glob("logstore_engine-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "logstore/py.typed" in names
    assert "logstore/_native.pyi" in names
    assert "logstore/cli/ui.html" in names
    assert any(name.startswith("logstore/_native.") and name.endswith(".so") for name in names)
    top_levels = {name.split("/")[0].split("-")[0] for name in names}
    assert top_levels == {"logstore", "pyspark_logstore"}, "stray top level"
    for path in (ROOT / "spark_connector" / "pyspark_logstore").rglob("*.py"):
        assert str(path.relative_to(ROOT / "spark_connector")) in names

    empty = tmp_path / "empty"
    venv.create(empty, with_pip=True)
    python = empty / "bin" / "python"
    run(python, *("-m", "pip", "install", "--quiet", wheel), cwd=tmp_path)
    # Spark looks for packages by their names, without importing them.
    listing = "import pkgutil; print([m.name for m in pkgutil.iter_modules() if 'spark' in m.name])"
    assert run(python, "-c", listing, cwd=tmp_path).strip() == "['pyspark_logstore']"
    script = [str(empty / "bin" / "logstore"), "--version"]
    bare = subprocess.run(script, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (bare.returncode, bare.stderr) == (
        1,
        'the logstore command needs click: pip install "logstore-engine[cli]"\n',
    )
    run(python, *("-m", "pip", "install", "--quiet", f"{wheel}[cli]"), cwd=tmp_path)
    assert run(*script, cwd=tmp_path).startswith("logstore, version ")
    output = run(python, *("-c", QUICK_START, tmp_path / "orders-0"), cwd=tmp_path)
    assert output.strip().endswith("[(0, b'alice', b'12 EUR')] 1")


def unpack(sdist: Path) -> Path:
    with tarfile.open(sdist) as tar:
        tar.extractall(sdist.parent, filter="data")
    return sdist.parent / sdist.name.removesuffix(".tar.gz")


def test_a_checkout_without_the_extension_says_what_to_do(tmp_path: Path) -> None:
    package = tmp_path / "logstore"
    package.mkdir()
    source = Path(logstore.__file__).parent
    for name in ("__init__.py", "record.py", "errors.py"):
        shutil.copy(source / name, package / name)
    for line in ("from logstore import _native", "logstore.Record"):
        done = subprocess.run(
            [sys.executable, "-S", "-c", f"import logstore; {line}"],
            cwd=tmp_path, capture_output=True, text=True, check=False,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        )  # fmt: skip
        assert done.returncode == 1
        assert "pip install -e ." in done.stderr, (line, done.stderr)
