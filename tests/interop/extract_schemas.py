"""Write `schemas.json` of logstore.kafka.protocol: Kafka's schemas, as far as the codec needs them.

    python tests/interop/extract_schemas.py JAR > logstore/kafka/protocol/schemas.json

The jar of Kafka's clients holds one JSON file for each message (Apache License 2.0).  Comments,
descriptions, map keys and entity types are left out.  Names become snake_case.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

# The APIs that the listener serves, or that a client of it sends.
KEYS = frozenset(
    {*range(4), *range(8, 38), *range(42, 52), 57, 60, 61, 65, 66, 68, 69, 74, 75}
    | {*range(76, 80), 90, 91, 92}
)
COMMENT = re.compile(r"^\s*//.*$", re.MULTILINE)
WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def snake(name: str) -> str:
    return WORD.sub("_", name).lower()


def field(raw: dict[str, Any], structs: dict[str, Any]) -> dict[str, Any]:
    """One field: name, type, versions, and what is not the usual case."""
    kept: dict[str, Any] = {
        "name": snake(raw["name"]),
        "type": raw["type"],
        "versions": raw["versions"],
    }
    for theirs, ours in (("nullableVersions", "nullable"), ("taggedVersions", "tagged")):
        if theirs in raw:
            kept[ours] = raw[theirs]
    if "tag" in raw:
        kept["tag"] = raw["tag"]
    if "default" in raw:
        kept["default"] = str(raw["default"]).strip().lower() if raw["default"] != "" else ""
    inner = raw.get("fields") or structs.get(raw["type"].removeprefix("[]"))
    if inner:
        kept["fields"] = [field(each, structs) for each in inner]
    return kept


def message(text: str) -> dict[str, Any]:
    raw = json.loads(COMMENT.sub("", text))
    structs = {each["name"]: each["fields"] for each in raw.get("commonStructs", ())}
    return {
        "key": raw.get("apiKey"),
        "kind": raw["type"],
        "name": raw["name"].removesuffix("Request").removesuffix("Response"),
        "versions": raw["validVersions"],
        "flexible": raw.get("flexibleVersions", "none"),
        "fields": [field(each, structs) for each in raw.get("fields", ())],
    }


def extract(jar: Path) -> str:
    """The table as text: one message a line, by key, requests first."""
    with zipfile.ZipFile(jar) as archive:
        found = [
            message(archive.read(name).decode())
            for name in archive.namelist()
            if re.fullmatch(r"common/message/\w+(Request|Response)\.json", name)
        ]
    chosen = sorted(
        (each for each in found if each["key"] in KEYS), key=lambda m: (m["key"], m["kind"])
    )
    version = re.search(r"kafka-clients-([\d.]+)\.jar", jar.name)
    lines = ",\n".join(json.dumps(each, separators=(",", ":")) for each in chosen)
    head = json.dumps(version.group(1) if version else "unknown")
    return f'{{"kafka":{head},"messages":[\n{lines}\n]}}\n'


if __name__ == "__main__":
    sys.stdout.write(extract(Path(sys.argv[1])))
