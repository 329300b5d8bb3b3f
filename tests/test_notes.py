"""Notes: values by kind and name that a log holds, alone and in transactions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from logstore import Compactor, InvalidNameError, Producer, ReadOnlyError, Store
from logstore.coordinators.internal_topics import NOTES
from logstore.notes import Notes


def test_a_note_is_read_back_and_survives_a_reopen(make_store: Callable[..., Store]) -> None:
    store = make_store(durability="fsync")
    notes = Notes.of(store)
    assert notes is Notes.of(store)
    assert notes.get("tag", "a") is None and notes.items("tag") == {}
    notes.put("tag", "a", b"1")
    notes.put("tag", "a/b", b"2")
    notes.put("tag", "b", b"")
    notes.put("tags", "c", b"another kind")
    notes.remove("tag", "b")
    notes.remove("tag", "never noted")
    for _ in range(2):
        assert notes.get("tag", "a") == b"1" and notes.get("tag", "b") is None
        assert notes.items("tag") == {"a": b"1", "a/b": b"2"}
        assert notes.items("tag", "a/") == {"a/b": b"2"}
        store.close()
        store = make_store(durability="fsync")
        notes = Notes.of(store)


def test_all_notes_are_found_in_all_partitions(make_store: Callable[..., Store]) -> None:
    store = make_store()
    noted = {f"name {number:03}": b"%d" % number for number in range(100)}
    for name, value in noted.items():
        Notes.of(store).put("k", name, value)
    assert len(store[NOTES]) == 8
    store.close()
    assert Notes.of(make_store(readonly=True)).items("k") == noted


def test_a_note_of_a_transaction_waits_for_its_marker(make_store: Callable[..., Store]) -> None:
    store = make_store()
    notes = Notes.of(store)
    notes.put("k", "old", b"0")
    with Producer(store, "id") as producer:
        with producer.transaction() as tx:
            notes.put("k", "new", b"1", transaction=tx)
            notes.remove("k", "old", transaction=tx)
            producer.flush()  # the records are in the log, and do not count
            assert notes.items("k") == {"old": b"0"}
        assert notes.items("k") == {"new": b"1"}
        with pytest.raises(RuntimeError, match="changed my mind"), producer.transaction() as tx:
            notes.put("k", "new", b"2", transaction=tx)
            producer.flush()
            raise RuntimeError("changed my mind")
    assert notes.items("k") == {"new": b"1"}
    store.close()
    assert Notes.of(make_store()).items("k") == {"new": b"1"}


@pytest.mark.parametrize("value", [b"plain", None])
def test_the_later_record_counts_although_the_marker_is_later_still(
    make_store: Callable[..., Store], value: bytes | None
) -> None:
    """Also for a removal: the value of the open transaction is older than the tombstone."""
    store = make_store()
    notes = Notes.of(store)
    with Producer(store, "id") as producer, producer.transaction() as tx:
        notes.put("k", "n", b"in a transaction", transaction=tx)
        producer.flush()
        if value is None:
            notes.remove("k", "n")
        else:
            notes.put("k", "n", value)
        assert notes.get("k", "n") == value
    assert notes.get("k", "n") == value
    store.close()
    assert Notes.of(make_store()).get("k", "n") == value


def test_a_transaction_that_a_crash_leaves_open_changes_no_note(
    make_store: Callable[..., Store],
) -> None:
    store = make_store()
    notes = Notes.of(store)
    notes.put("k", "n", b"1")
    producer = Producer(store, "id")
    tx = producer.transaction()
    notes.put("k", "n", b"2", transaction=tx)
    producer.flush()
    store.close()  # aborts the transaction, as the open after a crash does
    store = make_store()
    assert Notes.of(store).get("k", "n") == b"1"


def test_notes_survive_compaction(make_store: Callable[..., Store]) -> None:
    store = make_store()
    notes = Notes.of(store)
    for number in range(50):
        notes.put("k", "n", b"%d" % number)
    notes.put("k", "gone", b"x")
    notes.remove("k", "gone")
    for log in store[NOTES]:
        log.roll()
        Compactor(log, delete_retention_ms=0).run()
    assert notes.items("k") == {"n": b"49"}
    store.close()
    assert Notes.of(make_store()).items("k") == {"n": b"49"}


def test_what_is_no_note_is_refused(make_store: Callable[..., Store]) -> None:
    store = make_store()
    notes = Notes.of(store)
    for kind in ("", "a/b"):
        with pytest.raises(InvalidNameError):
            notes.put(kind, "n", b"")
    with pytest.raises(TypeError, match="bytes, not str"):
        notes.put("k", "n", "text")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="str, not"):
        notes.get("k", 5)  # type: ignore[arg-type]
    assert NOTES not in store  # nothing was declared for these
    store.close()
    with pytest.raises(ReadOnlyError):
        Notes.of(make_store(readonly=True)).put("k", "n", b"")
