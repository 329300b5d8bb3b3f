"""Session: the store and the output of one run of the command.

Every verb takes ``-s`` and ``-o``, and so does the root command.  Their values are kept here,
at any position on the command line; the last one counts.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from logstore.cli.output import FORMATS, Output
from logstore.errors import LockedError

if TYPE_CHECKING:
    from logstore import Partition, Store, Topic

__all__ = [
    "InputFile",
    "Integer",
    "Session",
    "Verb",
    "verb_of_cluster",
    "durability_option",
    "partition_option",
    "partitions_of",
    "pass_session",
    "verb",
    "zookeeper_option",
]


class Session:
    """The options that every verb takes: the store's directory and the output format."""

    def __init__(self) -> None:
        self.store: str | None = None
        self.format: str | None = None
        self.zookeeper: str | None = None
        self._output: Output | None = None  # made at first use: ``-o`` may follow the verb

    @property
    def path(self) -> str:
        """Return the store's directory.  Raises UsageError if none was given."""
        path = self.store or os.environ.get("LOGSTORE")
        if not path:
            raise click.UsageError("which store? Name its directory with -s, or in $LOGSTORE")
        if path.startswith("kafka://"):
            raise click.UsageError(f"{path}: only directories so far, no brokers")
        return path

    def reading(self) -> Store:
        """Open the store readonly.  Another process may write to it at the same time."""
        import logstore

        return self._opened(lambda path: logstore.open(path, readonly=True))

    def writing(
        self,
        *,
        create: bool = False,
        durability: str = "fsync",
        config: Mapping[str, str] | None = None,
        alone: bool = True,
    ) -> Store:
        """Open the store for writing.  LockedError names the process that holds its lock.

        ``alone=False``: as a node of a cluster, whose coordinators end open transactions.
        """
        from logstore.cli.progress import Progress
        from logstore.opening import open, open_member

        with Progress("checking", unit="bytes") as progress:
            return self._opened(
                lambda path: (open if alone else open_member)(
                    path,
                    create=create,
                    durability=durability,
                    config=config,
                    progress=progress.reached,
                )
            )

    def _opened(self, how: Any) -> Store:
        path = self.path
        try:
            store: Store = how(path)
        except LockedError as error:
            from logstore.cli.served import find_listener

            found = find_listener(Path(path)) or {}
            for address in found.get("listeners", {}).values():
                error.add_note(f"it is served: Kafka's tools and clients change its topics, groups "
                               f"and records at {address}")  # fmt: skip
            raise
        except FileNotFoundError as error:
            # The directory is there, so that a file inside of it is missing.
            if os.path.lexists(path):
                raise
            raise FileNotFoundError(
                errno.ENOENT, "no store here: `logstore topic create` makes one", path
            ) from error
        return store

    @property
    def servers(self) -> str:
        """Return the ZooKeeper of a cluster.  Raises UsageError if none was given."""
        servers = self.zookeeper or os.environ.get("LOGSTORE_ZOOKEEPER")
        if not servers:
            raise click.UsageError("which cluster? Name its ZooKeeper with --zookeeper "
                                   "HOST:PORT[/CHROOT], or in $LOGSTORE_ZOOKEEPER")  # fmt: skip
        return servers

    @property
    def output(self) -> Output:
        """Return the output, in the format of ``-o``."""
        if self._output is None:
            self._output = Output(self.format)
        return self._output

    def finish(self) -> None:
        """Write buffered output to stdout."""
        if self._output is not None:
            self._output.flush()


pass_session = click.make_pass_decorator(Session)


def _keep(name: str) -> Any:
    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value is not None:
            session = context.find_object(Session)
            assert session is not None
            setattr(session, name, value)

    return callback


def store_option() -> click.Option:
    """Return the option ``-s``, which the root and every verb have."""
    return click.Option(
        ["-s", "--store"],
        metavar="DIR",
        help="The store's directory.  Default: $LOGSTORE.",
        expose_value=False,
        callback=_keep("store"),
        type=click.Path(),
    )


def output_option() -> click.Option:
    """Return the option ``-o``, which the root and every verb have."""
    return click.Option(
        ["-o", "--output"],
        type=click.Choice(FORMATS),
        help="Output format.  Default: a table on a terminal, else JSON lines.",
        expose_value=False,
        callback=_keep("format"),
    )


def zookeeper_option() -> click.Option:
    """Return the option ``--zookeeper``, which every verb of `cluster` has."""
    return click.Option(
        ["--zookeeper"],
        metavar="HOST:PORT[,...][/CHROOT]",
        help="The ZooKeeper of the cluster.  Default: $LOGSTORE_ZOOKEEPER.",
        expose_value=False,
        callback=_keep("zookeeper"),
    )


class Verb(click.Command):
    """A command that also takes ``-s`` and ``-o``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.params += [store_option(), output_option()]


class ClusterVerb(Verb):
    """A verb that also takes ``--zookeeper``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.params.append(zookeeper_option())


class InputFile(click.Path):
    """An existing file, or ``-``.  A missing file ends the command with exit code 2."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, allow_dash=True)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value != "-" and not os.path.lexists(value):
            raise FileNotFoundError(errno.ENOENT, "no such file", str(value))
        return super().convert(value, param, ctx)


class Integer(click.IntRange):
    """A whole number within a range, with plain error messages."""

    name = "integer"

    def __init__(self, least: int, most: int | None = None) -> None:
        super().__init__(least, most)
        self.least, self.most = least, most

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value!r} is no whole number", param, ctx)
        if number < self.least:
            self.fail(f"at least {self.least}, not {number}", param, ctx)
        if self.most is not None and number > self.most:
            self.fail(f"at most {self.most}, not {number}", param, ctx)
        return number


partition_option = click.option(
    "-p", "--partition", type=Integer(0), multiple=True, help="Only this partition; repeatable."
)


def durability_option(help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option --durability, with the default of `logstore.open`."""
    levels = click.Choice(["fsync", "os"])
    return click.option("--durability", type=levels, default="fsync", show_default=True, help=help)


def verb(name: str) -> Callable[[Callable[..., Any]], Verb]:
    """Make a function a verb.  Its docstring is the help text."""
    return click.command(name, cls=Verb)


def verb_of_cluster(name: str) -> Callable[[Callable[..., Any]], Verb]:
    """Make a function a verb of `cluster`."""
    return click.command(name, cls=ClusterVerb)


def partitions_of(topic: Topic, numbers: Iterable[int] = ()) -> list[Partition]:
    """Return the partitions with these numbers; all partitions if none are given."""
    wanted = sorted(set(numbers))
    return [topic[number] for number in wanted] if wanted else list(topic)
