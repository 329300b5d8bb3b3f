"""The listener's codec against Kafka's own: its schemas, and its generated classes."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from logstore.kafka.protocol import schema
from tests.campaign import sized
from tests.kafka.test_codec import MESSAGES, a_body, encoded, versions_of

from .extract_schemas import extract
from .kafka import VERSION, jar_directory, require_kafka

pytestmark = pytest.mark.interop

SEED = 35
PROGRAM = Path(__file__).with_name("RoundTrip.java")


def clients_jar() -> Path:
    require_kafka()
    return jar_directory() / f"kafka-clients-{VERSION}.jar"


def test_the_table_is_the_one_of_the_jar() -> None:
    table = Path(schema.__file__).with_name("schemas.json").read_text("utf-8")
    assert extract(clients_jar()) == table


@pytest.mark.campaign
def test_kafka_decodes_and_encodes_every_message_to_the_same_bytes() -> None:
    jar = clients_jar()
    if shutil.which("javac") is None:
        pytest.skip("no javac: the Java program cannot be compiled")
    chance = random.Random(SEED)
    asked = [
        (message, version, encoded(message, version, a_body(message.fields, version, chance)))
        for message in MESSAGES
        for version in versions_of(message)
        for _ in range(sized(20, 50, 200))
    ]
    lines = "".join(
        f"{message.key} {version} {message.kind} {data.hex()}\n" for message, version, data in asked
    )
    # `java` compiles a program that is one source file by itself.
    done = subprocess.run(
        ["java", "-Xmx512m", "-XX:+UseSerialGC", "-cp", str(jar), str(PROGRAM)],
        input=lines,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) == len(asked)
    different = [
        f"{message.name} {message.kind} v{version}: sent {data.hex()}, got {answer}"
        for (message, version, data), answer in zip(asked, answers, strict=True)
        if answer != data.hex()
    ]
    assert not different, "\n".join(different[:20])
