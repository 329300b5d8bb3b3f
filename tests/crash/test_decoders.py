"""For any bytes on disk, a decoder returns or raises what it documents."""

from __future__ import annotations

import logging

import pytest

from tests.crash.decoder_fuzz import Target, fuzz, targets

RUNS = 3000
TARGETS = targets()


@pytest.mark.parametrize("name", TARGETS)
def test_no_changed_byte_surprises_a_decoder(name: str) -> None:
    logging.disable(logging.CRITICAL)
    try:
        runs, findings = fuzz(name, TARGETS[name], runs=RUNS)
    finally:
        logging.disable(logging.NOTSET)
    assert not findings, "\n".join(map(str, findings))
    assert runs == RUNS


def test_a_decoder_that_trusts_its_input_is_found() -> None:
    """The fuzzer itself: an unchecked index and an unchecked number."""
    for decode in (lambda data: data[30], lambda data: 1 / (len(data) % 7)):
        _, findings = fuzz("trusting", Target((b"x" * 40,), decode), runs=500)
        assert findings
