"""Kafka's command-line tools, run one after the other in one JVM."""

from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path

import pytest

from logstore.kafka.server import KafkaServer

from .kafka import KafkaUnavailableError, client_jar_directory

JAVA = Path(__file__).with_name("java")
TIMEOUT = 120

JVM = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
       "-Dorg.slf4j.simpleLogger.defaultLogLevel=off")  # fmt: skip

PACKAGE = "org.apache.kafka.tools."
TOPICS = PACKAGE + "TopicCommand"
CONFIGS = "kafka.admin.ConfigCommand"
GROUPS = PACKAGE + "consumer.group.ConsumerGroupCommand"
CONSOLE_CONSUMER = PACKAGE + "consumer.ConsoleConsumer"
TRANSACTIONS = PACKAGE + "TransactionsCommand"
CLUSTER = PACKAGE + "ClusterTool"


class Tools:
    """A JVM that runs one tool after the other."""

    def __init__(self, class_path: str) -> None:
        self.process = subprocess.Popen(
            ["java", *JVM, "-cp", class_path, "Tools"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def run(self, server: KafkaServer | str, main: str, *arguments: str, stdin: str = "") -> str:
        """Run a tool and return its output; fail if its exit status is not 0."""
        status, output = self.ask(server, main, *arguments, stdin=stdin)
        assert status == 0, output
        return output

    def ask(
        self, server: KafkaServer | str, main: str, *arguments: str, stdin: str = ""
    ) -> tuple[int, str]:
        """Run a tool; return its exit status and its output."""
        address = server if isinstance(server, str) else server.bootstrap_servers
        servers = ["--bootstrap-server", address]
        if main == CLUSTER:  # its subcommand has the option
            words = [stdin, main, *arguments, *servers]
        else:
            words = [stdin, main, *servers, *arguments]
        line = " ".join("=" + base64.b64encode(word.encode()).decode() for word in words)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"{main} ended the JVM"
        status, _, output = answer.strip().partition(" ")
        return int(status), base64.b64decode(output).decode()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


# ---- Java sources ----


def jars(version: str) -> Path:
    """Return the jars of a version; skip where they or the compiler cannot be had."""
    if shutil.which("javac") is None:
        pytest.skip("javac is not installed")
    try:
        return client_jar_directory(version)
    except KafkaUnavailableError as error:
        pytest.skip(f"no Apache Kafka {version}: {error}")


def compiled(source: str, version: str, target: Path) -> str:
    """Compile a source file; return the class path."""
    path = f"{jars(version)}/*"
    subprocess.run(
        ["javac", "-nowarn", "-J-XX:TieredStopAtLevel=1", "-cp", path, "-d", target, JAVA / source],
        check=True,
        timeout=TIMEOUT,
    )
    return f"{target}:{path}"
