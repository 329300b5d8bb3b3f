"""More partitions than descriptors: the error names the limit, and no record is lost silently."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import logstore

PROGRAM = """
import errno, json, resource, sys
import logstore

path = sys.argv[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
notes, refused, sent = [], 0, []

def note(error):
    errors = error.exceptions if isinstance(error, BaseExceptionGroup) else [error]
    for each in errors:
        assert isinstance(each, OSError) and each.errno == errno.EMFILE, repr(each)
        notes.extend(getattr(each, "__notes__", ["no note"]))

with logstore.open(path) as store:
    for i in range(100):
        store.create_topic(f"t{i}")
    producer = logstore.Producer(store)
    for i in range(100):
        try:
            sent.append(producer.send(f"t{i}", b"v"))
        except OSError as error:
            refused += 1
            note(error)
    try:
        producer.flush()
    except (OSError, BaseExceptionGroup) as error:
        note(error)
    failed = sum(each.exception(60) is not None for each in sent)
    producer.close()
print(json.dumps({"notes": sorted(set(notes)), "lost": refused + failed}))
"""


def test_the_error_for_too_few_descriptors_names_the_limit_and_each_record_is_answered(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["lost"] > 0
    [note] = found["notes"]
    assert "limit of open files is 64" in note and "ulimit -n" in note
    with logstore.open(tmp_path, readonly=True) as store:
        written = sum(len(list(log)) for name in store for log in store[name])
    assert written == 100 - found["lost"]
