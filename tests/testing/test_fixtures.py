"""The pytest fixtures of the test kit, and the example that shows how to use them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from logstore.testing.fixtures import (  # noqa: F401
    StoreUnderTest,
    logstore_clock,
    logstore_options,
    logstore_store,
)

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "testing_your_code"


def test_a_crash_keeps_what_was_appended_and_loses_what_was_buffered(
    logstore_store: StoreUnderTest,  # noqa: F811
) -> None:
    log = logstore_store.store.create_topic("orders")[0]
    log.append(b"a")
    out = log.writer(linger=None)
    out.append(b"buffered")
    log = logstore_store.crash()["orders"][0]
    assert [record.value for record in log] == [b"a"]
    assert not log.recovery.clean
    assert logstore_store.path.name == "life-1"
    log = logstore_store.reopen()["orders"][0]
    assert log.recovery.clean


def test_the_clock_of_the_store_is_the_fixture(
    logstore_store: StoreUnderTest,  # noqa: F811
    logstore_clock: object,  # noqa: F811
) -> None:
    assert logstore_store.clock is logstore_clock
    log = logstore_store.store.create_topic("orders")[0]
    log.append(b"a")
    assert log[0].timestamp == logstore_store.clock.time_ms()


def test_the_example_of_testing_your_own_code_passes(tmp_path: Path) -> None:
    """As a user runs it: from its own directory, with pytest's own settings."""
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null",
         "--rootdir", str(EXAMPLE), "--basetemp", str(tmp_path / "pytest"), str(EXAMPLE)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 passed" in ended.stdout


def test_nobody_who_does_not_ask_for_the_fixtures_needs_pytest() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "import sys, logstore.testing; print('pytest' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.strip() == "False"
