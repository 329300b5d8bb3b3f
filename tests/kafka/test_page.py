"""docs/kafka-server.md lists the APIs and the settings of the listener."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from logstore.config import dotted
from logstore.kafka.apis import APIS
from logstore.kafka.config import KafkaConfig
from logstore.kafka.handlers.topic_settings import text
from logstore.kafka.metrics import MEANINGS

PAGE = (Path(__file__).parent.parent.parent / "docs" / "kafka-server.md").read_text("utf-8")
SETTINGS = PAGE.split("## Settings")[1].split("\n## ")[0]

NOT_LISTED = {  # settings without a choice for now, or of features that are not there yet
    "security.protocol",
    "socket.listen.backlog.size",
    "transaction.partition.verification.enable",
}


def test_the_page_lists_every_api_and_its_versions() -> None:
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (\d+)(?: to (\d+))? \|$", PAGE, re.MULTILINE)
    listed = {int(key): (name, int(first), int(last or first)) for key, name, first, last in rows}
    assert listed == {key: (api.name, api.first, api.last) for key, api in APIS.items()}


def test_the_page_lists_every_setting_with_its_default() -> None:
    for field in dataclasses.fields(KafkaConfig):
        name = dotted(field.name)
        if name in NOT_LISTED:
            continue
        row = next((row for row in SETTINGS.splitlines() if f"`{name}`" in row), None)
        assert row is not None, f"{name} is not on the page"
        default = text(field.default)
        assert default in row.split("|")[2], f"{name}: the default is {default}"


def test_the_page_lists_every_metric_with_its_meaning() -> None:
    table = PAGE.split("## Monitoring")[1].split("\n### ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", table, re.MULTILINE))
    assert rows == MEANINGS
