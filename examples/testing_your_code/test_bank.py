"""How to test code of your own that keeps its state in a log: run pytest in this directory.

First a plain test with a crash in it.  Then a machine that Hypothesis drives: it transfers, asks
again, crashes and reopens in any order, and compares the bank with a dictionary.  Last, what the
clients of the bank were told, judged by the history checker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from bank import OPENING, Bank
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from logstore.testing import Recorder, StoreUnderTest, assert_clean, check_invariants

ACCOUNTS = ["ann", "bob", "eve"]


def open_bank(under_test: StoreUnderTest) -> Bank:
    return Bank(under_test.store.create_topic("bank", exist_ok=True)[0])


def test_a_transfer_survives_a_crash_and_is_not_made_twice(logstore_store: StoreUnderTest) -> None:
    assert open_bank(logstore_store).transfer(1, "ann", "bob", 30)
    logstore_store.crash()
    bank = open_bank(logstore_store)
    assert (bank.balance("ann"), bank.balance("bob")) == (70, 130)
    assert bank.transfer(1, "ann", "bob", 30)
    assert bank.balance("ann") == 70


class BankMachine(RuleBasedStateMachine):
    """The bank beside a dictionary, in any order of transfers, repetitions, crashes, reopenings."""

    def __init__(self) -> None:
        super().__init__()
        self.under_test = StoreUnderTest(durability="os")  # in memory, removed by close
        self.bank = open_bank(self.under_test)
        self.balances = dict.fromkeys(ACCOUNTS, OPENING)
        self.answers: list[tuple[tuple[int, str, str, int], bool]] = []

    @rule(
        payer=st.sampled_from(ACCOUNTS),
        payee=st.sampled_from(ACCOUNTS),
        amount=st.integers(-5, 150),
    )
    def transfer(self, payer: str, payee: str, amount: int) -> None:
        request = (len(self.answers), payer, payee, amount)
        allowed = payer != payee and 0 < amount <= self.balances[payer]
        assert self.bank.transfer(*request) == allowed
        self.answers.append((request, allowed))
        if allowed:
            self.balances[payer] -= amount
            self.balances[payee] += amount

    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        if self.answers:
            request, answer = data.draw(st.sampled_from(self.answers))
            assert self.bank.transfer(*request) == answer

    @rule()
    def crash(self) -> None:
        self.under_test.crash()
        self.bank = open_bank(self.under_test)

    @rule()
    def reopen(self) -> None:
        self.under_test.reopen()
        self.bank = open_bank(self.under_test)

    @invariant()
    def every_account_is_right(self) -> None:
        assert {name: self.bank.balance(name) for name in ACCOUNTS} == self.balances

    def teardown(self) -> None:
        check_invariants(self.under_test.store["bank"][0])
        self.under_test.close()


TestBank = BankMachine.TestCase
# The same examples every time: a test suite must not fail by luck.
TestBank.settings = settings(
    max_examples=10, stateful_step_count=15, deadline=None, derandomize=True, database=None
)


def test_what_tellers_were_told_fits_together(
    logstore_store: StoreUnderTest, logstore_history: Recorder
) -> None:
    log = logstore_store.store.create_topic("bank")[0]

    def tell(name: str) -> None:
        for number in range(40):
            value = f"{name} {number}".encode()
            with logstore_history.send(name, "bank", value) as pending:
                pending.acknowledged(log.append(value))

    together(*(lambda name=name: tell(name) for name in ACCOUNTS))
    after = logstore_store.crash()["bank"][0]
    logstore_history.polled("auditor", after, partition="bank")
    logstore_history.snapshot("bank", after)
    assert_clean(logstore_history.history(), caught_up=True)


def test_a_record_that_goes_missing_is_noticed(
    logstore_store: StoreUnderTest, logstore_history: Recorder
) -> None:
    log = logstore_store.store.create_topic("bank")[0]
    for number in range(3):
        with logstore_history.send("ann", "bank", b"%d" % number) as pending:
            pending.acknowledged(log.append(b"%d" % number))
    log.truncate(2)  # as a bug, or a disk that lies, would
    logstore_history.snapshot("bank", log)
    with pytest.raises(AssertionError, match="lost-write: b'2' was acknowledged at offset 2"):
        assert_clean(logstore_history.history())


def together(*acts: Callable[[], None]) -> None:
    threads = [threading.Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
