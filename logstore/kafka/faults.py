"""Faults: errors, delays and lost answers on demand, for tests of clients.

    server.faults.fail("Produce", error="NOT_LEADER_OR_FOLLOWER", times=3, topic="orders")

The rules are asked once for each request, before its handler.  Without rules a request costs one
comparison with None.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from logstore.config import ConfigError
from logstore.errors import RebalanceError
from logstore.kafka.apis import APIS
from logstore.kafka.protocol.errors import ErrorCode

if TYPE_CHECKING:
    from logstore.kafka.broker import Broker
    from logstore.kafka.calls import Call

__all__ = ["Fault", "Faults"]

WAIT_SECONDS = 10.0


class Fault(NamedTuple):
    """What happens to one request."""

    kind: Literal["fail", "delay", "drop"]
    code: ErrorCode = ErrorCode.NONE  # of `fail`
    text: str = "a fault that was asked for"  # of `fail`
    seconds: float = 0.0  # of `delay`
    after: bool = False  # of `drop`: whether the request is carried out


class _Rule:
    """A fault, and the requests that it is for."""

    def __init__(self, key: int, fault: Fault, times: int | None, topic: str | None) -> None:
        self.key = key
        self.fault = fault
        self.times = times  # requests left; None: all
        self.topic = topic


class Faults:
    """The faults of a server.  Any thread may change them; they apply to requests that follow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.rules: list[_Rule] | None = None  # None if there are none: asked for each request
        self.broker: Broker | None = None  # while the server runs

    def __repr__(self) -> str:
        return f"<Faults with {len(self.rules or ())} rules>"

    def fail(
        self,
        api: str,
        error: str | int = "UNKNOWN_SERVER_ERROR",
        *,
        times: int | None = 1,
        topic: str | None = None,
        text: str = "a fault that was asked for",
    ) -> None:
        """Answer requests of an API with an error, and do not carry them out.

        `api` and `error` are Kafka's names, such as ``Produce`` and ``NOT_LEADER_OR_FOLLOWER``; an
        error may be a number.  Every topic and partition of the request gets the error.  `times`:
        how many requests; None: until `clear`.  `topic`: only requests that name this topic.
        `text`: the message of the error, for APIs whose answers have one.
        """
        self._add(api, Fault("fail", code=_code(error), text=text), times, topic)

    def delay(
        self, api: str, seconds: float, *, times: int | None = None, topic: str | None = None
    ) -> None:
        """Carry requests of an API out `seconds` later.  Later requests of the connection wait."""
        if seconds < 0:
            raise ConfigError(f"a delay is 0 seconds or more, not {seconds}")
        self._add(api, Fault("delay", seconds=seconds), times, topic)

    def drop(
        self, api: str, *, after: bool = False, times: int | None = 1, topic: str | None = None
    ) -> None:
        """Close the connection without an answer.

        ``after=True``: the request is carried out first, so that the client does not know whether
        it was.
        """
        self._add(api, Fault("drop", after=after), times, topic)

    def disconnect(self, client_id: str | None = None) -> int:
        """Close the connections of a client id, or all; return how many."""

        def act(broker: Broker) -> int:
            found = [
                each for each in broker.connections if client_id in (None, each.client_id)
            ]  # fmt: skip
            for connection in found:
                connection.abort("fault")
            return len(found)

        return self._in_loop(act)

    def rebalance(self, group: str) -> None:
        """Have all members of a group join again.  Raises RebalanceError for an unknown group."""
        if self.broker is not None:
            groups = self.broker.groups()
            if not groups.knows(group):
                raise RebalanceError("it does not exist", group=group, code="GROUP_ID_NOT_FOUND")
            groups.rebalance(group, "a rebalance was asked for")

    def add(self, spec: str) -> None:
        """Add a rule that is written ``KIND:API[,NAME=VALUE]...``, as on a command line.

        KIND is ``fail``, ``delay`` or ``drop``, and the names are those of the method's arguments:
        ``fail:Produce,error=NOT_LEADER_OR_FOLLOWER,times=3``, ``delay:Fetch,seconds=0.5``,
        ``drop:EndTxn,after=true``.  ``times=all`` is until `clear`.
        """
        head, *options = [each.strip() for each in spec.split(",")]
        kind, _, api = head.partition(":")
        methods: dict[str, Callable[..., None]] = {
            "fail": self.fail, "delay": self.delay, "drop": self.drop,
        }  # fmt: skip
        if kind not in methods or not api:
            raise ConfigError(f"a fault is fail:API, delay:API or drop:API, not {spec!r}")
        try:
            arguments = dict(map(_option, options))
            if kind == "delay" and "seconds" not in arguments:
                raise ConfigError(f"{spec!r}: seconds is missing, such as {spec},seconds=0.5")
            methods[kind](api, **arguments)
        except TypeError:
            names = "times, topic and " + {"fail": "error", "delay": "seconds"}.get(kind, "after")
            raise ConfigError(f"{spec!r}: {kind} has {names}") from None

    def clear(self) -> None:
        """Remove all rules."""
        with self._lock:
            self.rules = None

    # ---- for the server ----

    def take(self, call: Call) -> Fault | None:
        """Return the fault of a request: that of the oldest rule for it.  Counts the rule down."""
        mine = [rule for rule in self.rules or () if rule.key == call.key]
        topics = _topics(call) if any(rule.topic is not None for rule in mine) else ()
        with self._lock:
            for rule in self.rules or ():
                if rule in mine and (rule.topic is None or rule.topic in topics):
                    if rule.times is not None:
                        rule.times -= 1
                        if rule.times == 0:
                            self._remove(rule)
                    return rule.fault
        return None

    def _add(self, api: str, fault: Fault, times: int | None, topic: str | None) -> None:
        if times is not None and times < 1:
            raise ConfigError(f"times is 1 or more, or None, not {times}")
        rule = _Rule(_key(api), fault, times, topic)
        with self._lock:
            self.rules = [*(self.rules or ()), rule]

    def _remove(self, rule: _Rule) -> None:
        self.rules = [each for each in self.rules or () if each is not rule] or None

    def _in_loop(self, act: Callable[[Broker], int]) -> int:
        """Call `act` in the thread of the loop; return its result.  0 if the server has ended."""
        broker = self.broker
        if broker is None:
            return 0
        done = threading.Event()
        results: list[int] = []

        def run() -> None:
            results.append(act(broker))
            done.set()

        broker.calls.put(run)
        done.wait(WAIT_SECONDS)
        return sum(results)


def _option(text: str) -> tuple[str, object]:
    """Return an argument of a rule's method, from ``name=value``."""
    name, _, value = text.partition("=")
    try:
        if name == "times":
            return name, None if value == "all" else int(value)
        if name == "seconds":
            return name, float(value)
        if name == "after":
            return name, {"true": True, "false": False}[value]
    except (ValueError, KeyError):
        raise ConfigError(f"a fault cannot have {text!r}") from None
    return name, int(value) if value.lstrip("-").isdigit() else value


def _key(api: str) -> int:
    for row in APIS.values():
        if row.name == api:
            return row.key
    raise ConfigError(f"no API {api!r}: the APIs are {', '.join(r.name for r in APIS.values())}")


def _code(error: str | int) -> ErrorCode:
    try:
        code = ErrorCode[error] if isinstance(error, str) else ErrorCode(error)
    except (KeyError, ValueError):
        raise ConfigError(f"no error {error!r} among those that the listener answers") from None
    if code is ErrorCode.NONE:
        raise ConfigError("NONE is not an error")
    return code


def _topics(call: Call) -> set[str]:
    """Return the names of the topics in a request."""
    names: set[str] = set()
    _find_topics(call.broker, call.body, names)
    return names


def _find_topics(broker: Broker, value: object, names: set[str]) -> None:
    if isinstance(value, list):
        for each in value:
            _find_topics(broker, each, names)
        return
    if not isinstance(value, dict):
        return
    for name, inner in value.items():
        if name in ("name", "topic", "topic_name", "resource_name") and isinstance(inner, str):
            names.add(inner)
        elif name == "topic_names":
            names.update(inner or ())
        elif name == "topic_id" and any(inner):
            _add_by_id(broker, inner, names)
        else:
            _find_topics(broker, inner, names)


def _add_by_id(broker: Broker, topic_id: Any, names: set[str]) -> None:
    topic = broker.topic_by_id(topic_id)
    if topic is not None:
        names.add(topic.name)
