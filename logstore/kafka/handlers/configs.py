"""DescribeConfigs, AlterConfigs, IncrementalAlterConfigs: settings of topics and of the node."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from logstore.config import INT64_MAX, ConfigError, PartitionConfig, dotted
from logstore.errors import LogStoreError, UnknownTopicError
from logstore.kafka.calls import Call
from logstore.kafka.handlers.topic_settings import (
    FROM_TOPIC,
    LIST,
    LONG,
    described,
    is_ignored,
    text,
    type_of,
)
from logstore.kafka.protocol.errors import ErrorCode, KafkaError, error_code, error_message
from logstore.replication.machines.throttle import (
    ALL_NODES,
    LISTS,
    RATES,
    checked_rate,
    parse_replicas,
)
from logstore.store.topic import check_topic_name

__all__ = ["alter_configs", "describe_configs", "incremental_alter_configs"]

TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP = 2, 4, 8, 16, 32
SET, DELETE, APPEND, SUBTRACT = range(4)
FROM_BROKER, FROM_ALL_BROKERS, FROM_STATIC_BROKER, FROM_DEFAULT = 2, 3, 4, 5
Configs = list[dict[str, Any]]
Lists = Mapping[str, str] | None  # of replicas that are throttled, by name; None: they are ignored
EXPECTED = (KafkaError, LogStoreError, ConfigError, OSError)


def _topic_settings(call: Call, name: str) -> PartitionConfig:
    check_topic_name(name)
    settings = call.broker.topology.settings(name)
    if settings is None:
        raise UnknownTopicError(name)
    return settings


def describe_configs(call: Call) -> dict[str, Any]:
    """Answer with the settings of topics and nodes."""
    results = []
    for each in call.body["resources"]:
        row: dict[str, Any] = {
            "resource_type": each["resource_type"], "resource_name": each["resource_name"],
        }  # fmt: skip
        results.append(row)
        try:
            wanted = each["configuration_keys"]
            row["configs"] = [
                _shown(call, setting)
                for setting in _settings(call, each["resource_type"], each["resource_name"])
                if not wanted or setting["name"] in wanted
            ]
        except EXPECTED as error:
            row |= {"error_code": error_code(error), "error_message": error_message(error)}
            row["configs"] = []
    return {"results": results}


def _settings(call: Call, kind: int, name: str) -> Iterator[dict[str, Any]]:
    if kind == TOPIC:
        settings = _topic_settings(call, name)
        lists = call.broker.topology.throttle("topics", name) or {}
        return itertools.chain(
            described(settings, settings.changed()),
            (_dynamic(each, value, LIST, FROM_TOPIC) for each, value in lists.items()),
        )
    if kind == BROKER:
        if name not in ("", str(call.broker.topology.node_id)):
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"this node is not {name!r}")
        return itertools.chain(_of_node(call) if name else (), _rates(call, name))
    if kind in (BROKER_LOGGER, CLIENT_METRICS):
        return iter(())
    raise KafkaError(ErrorCode.INVALID_REQUEST, f"no settings of resource type {kind}")


def _rates(call: Call, name: str) -> Iterator[dict[str, Any]]:
    """Yield the rates that were set for a node, else those that were set for all."""
    topology = call.broker.topology
    found: dict[str, tuple[str, int]] = {}
    for owner, source in ((ALL_NODES, FROM_ALL_BROKERS), (name, FROM_BROKER)):
        rates = topology.throttle("brokers", owner) or {}
        found |= {each: (value, source) for each, value in rates.items()}
    return (_dynamic(each, value, LONG, source) for each, (value, source) in found.items())


def _dynamic(name: str, value: str, kind: int, source: int) -> dict[str, Any]:
    return {
        "name": name, "value": value, "read_only": False, "is_default": False,
        "config_source": source, "config_type": kind,
        "default": "" if kind == LIST else str(INT64_MAX), "is_sensitive": False,
        "documentation": "see the throttle in the documentation of logstore's replication",
    }  # fmt: skip


def _of_node(call: Call) -> Iterator[dict[str, Any]]:
    config = call.broker.config
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        changed = value != field.default
        yield {
            "name": dotted(field.name),
            "value": text(value),
            "read_only": True,
            "is_default": not changed,
            "config_source": FROM_STATIC_BROKER if changed else FROM_DEFAULT,
            "config_type": type_of(field),
            "default": text(field.default),
        }


def _shown(call: Call, setting: dict[str, Any]) -> dict[str, Any]:
    """Return a setting with what the request asked for."""
    shown = dict(setting)
    default = shown.pop("default")
    if not (call.version >= 3 and call.body["include_documentation"]):
        shown["documentation"] = None
    if call.body["include_synonyms"]:
        name, value, source = shown["name"], shown["value"], shown["config_source"]
        synonyms = [{"name": name, "value": value, "source": source}]
        if source != FROM_DEFAULT:
            synonyms.append({"name": name, "value": default, "source": FROM_DEFAULT})
        shown["synonyms"] = synonyms
    return shown


# ---- changing ----


def alter_configs(call: Call) -> dict[str, Any]:
    """Replace all settings of topics: a setting that is not named gets its default."""

    def changes(config: PartitionConfig, lists: Lists, configs: Configs) -> Mapping[str, Any]:
        named: dict[str, Any] = dict.fromkeys((*config.changed(), *(lists or ())))
        for each in configs:
            if each["value"] is None:
                raise KafkaError(ErrorCode.INVALID_REQUEST, f"{each['name']} has no value")
            is_kept = lists is not None and each["name"] in LISTS.values()
            if is_kept or not is_ignored(each["name"], each["value"]):
                named[each["name"]] = each["value"]
        return named

    return {"responses": _alter(call, changes)}


def incremental_alter_configs(call: Call) -> dict[str, Any]:
    """Change some settings of topics."""

    def changes(config: PartitionConfig, lists: Lists, configs: Configs) -> Mapping[str, Any]:
        named: dict[str, Any] = {}
        for each in configs:
            if lists is not None and each["name"] in LISTS.values():
                named |= _operation_on_list(each, lists.get(each["name"], ""))
            else:
                named |= _operation(config, each)
        return named

    return {"responses": _alter(call, changes)}


def _operation(config: PartitionConfig, asked: dict[str, Any]) -> dict[str, Any]:
    name, value, operation = asked["name"], asked["value"], asked["config_operation"]
    field = {dotted(f.name): f for f in dataclasses.fields(config)}.get(name)
    if operation == DELETE:
        return {} if field is None else {name: None}
    if value is None:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"{name} has no value")
    if is_ignored(name, value):
        return {}
    if operation == SET:
        return {name: value}
    if operation not in (APPEND, SUBTRACT):
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"no operation {operation}")
    if field is None or type_of(field) != LIST:
        raise ConfigError(f"{name} is not a list: nothing can be added to it or removed")
    return _operation_on_list(asked, getattr(config, field.name))


def _operation_on_list(asked: dict[str, Any], before: str) -> dict[str, Any]:
    name, value, operation = asked["name"], asked["value"], asked["config_operation"]
    if operation == DELETE:
        return {name: None}
    if value is None:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"{name} has no value")
    if operation == SET:
        return {name: value}
    if operation not in (APPEND, SUBTRACT):
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"no operation {operation}")
    words = [word for word in before.split(",") if word]
    given = [word.strip() for word in value.split(",")]
    if operation == APPEND:
        return {name: ",".join(dict.fromkeys([*words, *given]))}
    return {name: ",".join(word for word in words if word not in given)}


def _alter(call: Call, changes: Any) -> list[dict[str, Any]]:
    resources = call.body["resources"]
    times = Counter((each["resource_type"], each["resource_name"]) for each in resources)
    responses = []
    for each in resources:
        kind, name = each["resource_type"], each["resource_name"]
        row: dict[str, Any] = {
            "resource_type": kind, "resource_name": name, "error_message": None,
        }  # fmt: skip
        responses.append(row)
        try:
            if times[kind, name] > 1:
                raise KafkaError(ErrorCode.INVALID_REQUEST, "the resource is named twice")
            if max(Counter(c["name"] for c in each["configs"]).values(), default=0) > 1:
                raise KafkaError(ErrorCode.INVALID_REQUEST, "a setting is named twice")
            if kind not in (TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP):
                raise KafkaError(ErrorCode.INVALID_REQUEST, f"no resource type {kind}")
            if kind == BROKER:
                _alter_node(call, name, each["configs"])
                continue
            if kind != TOPIC:
                raise KafkaError(ErrorCode.INVALID_CONFIG, "settings of the node are fixed")
            # A broker checks the settings before it looks for the topic.
            config = call.broker.topology.settings(name) or PartitionConfig()
            wanted = changes(config, call.broker.topology.throttle("topics", name), each["configs"])
            config.with_settings({key: wanted[key] for key in wanted.keys() - set(LISTS.values())})
            for key in wanted.keys() & set(LISTS.values()):
                parse_replicas(key, wanted[key] or "")
            _topic_settings(call, name)
            if not call.body["validate_only"]:
                call.broker.topology.alter(name, wanted)
        except EXPECTED as error:
            row |= {"error_code": error_code(error), "error_message": error_message(error)}
    return responses


def _alter_node(call: Call, name: str, configs: Configs) -> None:
    """Change the rates of a node; the other settings are fixed, and may be deleted: none is set."""
    topology = call.broker.topology
    set_ones = [each for each in configs if each.get("config_operation") != DELETE]
    if topology.throttle("brokers", name) is None or (not name.isdecimal() and name):
        if set_ones:
            raise KafkaError(ErrorCode.INVALID_CONFIG, "settings of the node are fixed")
        return
    for each in set_ones:
        if each["name"] not in RATES.values() or each.get("config_operation", SET) != SET:
            names = " and ".join(RATES.values())
            text = f"{each['name']} of a node is fixed; {names} can be set and deleted"
            raise KafkaError(ErrorCode.INVALID_CONFIG, text)
        checked_rate(each["name"], each["value"])
    changes = {each["name"]: None if each not in set_ones else each["value"]
               for each in configs if each["name"] in RATES.values()}  # fmt: skip
    if changes and not call.body["validate_only"]:
        topology.alter_node(name or ALL_NODES, changes)
