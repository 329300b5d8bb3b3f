"""The root command: the table of verbs, and the exit code for each way that a run can end."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

import click

import logstore
from logstore.cli import exits
from logstore.cli.output import forget_stdout
from logstore.cli.session import Session, output_option, store_option

__all__ = ["root", "run"]


class Verbs(click.Group):
    """A group of commands.  Listing commands imports none; running one imports its module."""

    def __init__(self, *arguments: Any, verbs: Mapping[str, tuple[str, str]], **options: Any):
        super().__init__(*arguments, **options)
        self.verbs = verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = self.verbs.get(cmd_name)
        if found is None:
            return None
        module, _ = found
        command: click.Command = getattr(
            importlib.import_module(f"logstore.cli.verbs.{module}"),
            f"{cmd_name.replace('-', '_')}_verb",
        )
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.verbs and not name.startswith("-"):
            near = [KNOWN_ELSEWHERE[name]] if name in KNOWN_ELSEWHERE else []
            if not near or near[0].split()[0] not in self.verbs:
                import difflib

                near = difflib.get_close_matches(name, self.verbs, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(self.verbs)}"
            raise click.UsageError(f"no command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in self.verbs.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _ClosedPipe from error  # click would exit with its own code
        except KeyboardInterrupt as error:
            raise _Interrupted(error) from error


# Names that other tools use for these verbs.
KNOWN_ELSEWHERE = {
    "ls": "topic ls", "list": "topic ls", "topics": "topic ls", "tail": "read --follow",
    "cat": "read", "consume": "read", "produce": "write", "append": "write", "check": "verify",
    "groups": "group ls", "delete": "rm", "remove": "rm", "describe": "show",
}  # fmt: skip


class _ClosedPipe(Exception):
    """The reader of our output closed the pipe."""


class _Interrupted(Exception):
    """Ctrl-C, as an exception that click does not handle itself."""

    def __init__(self, error: KeyboardInterrupt) -> None:
        self.error = error


VERBS = {
    "topic": ("topic", "List, show, create, alter, delete and copy topics."),
    "write": ("write", "Append records from lines or JSON lines."),
    "read": ("read", "Print records: a range, the last ones, or new ones as they arrive."),
    "offsets": ("offsets", "Show start, end, durable and stable offsets; find offsets by time."),
    "group": ("group", "Consumer groups: lag, members, reset, delete, copy."),
    "work": ("work", "Run a command for each record, many at once, as a member of a group."),
    "txn": ("txn", "Transactions: list, show, abort."),
    "du": ("du", "Show disk usage, and how much of it can be deleted."),
    "dump": ("dump", "Print the contents of files in a log directory, ours or a broker's."),
    "verify": ("checks", "Check every file for damage."),
    "repair": ("checks", "Repair a damaged store."),
    "retain": ("upkeep", "Delete segments by retention, and show the reason for each."),
    "compact": ("upkeep", "Keep the newest record of every key."),
    "purge": ("upkeep", "Delete records before an offset or a time, or those of one key."),
    "export": ("transfer", "Write records to a file: JSON lines, CSV, Parquet, Arrow."),
    "import": ("transfer", "Append records from such a file."),
    "follow": ("follow", "Copy a store or a Kafka into a directory, and keep the copy level."),
    "ui": ("ui", "Show topics, segments and messages in a browser.  Read-only."),
    "serve": ("serve", "Serve the store to Kafka's clients."),
    "cluster": ("cluster", "Nodes, replicas and leaders of a cluster: show, create, elect, move."),
    "bench": ("bench", "Measure how fast a log is on this machine."),
    "doctor": ("doctor", "Check whether this machine and directory are suitable for a log."),
}


@click.group(
    cls=Verbs,
    verbs=VERBS,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    params=[store_option(), output_option()],
    epilog="Times: now, -15m, 2026-01-31T12:00:00Z, or milliseconds since 1970.  "
    "Exit codes: 0 done, 1 usage, 2 not found, 3 busy, 4 corrupt, 5 timeout, 6 failed.",
)
@click.version_option(logstore.__version__, prog_name="logstore")
def root() -> None:
    """Read, write and maintain Kafka's log in a directory, without a broker.

    A store is a directory of topics, ours or a Kafka broker's.  Verbs that only read work while
    another process writes to the store.
    """


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(exits.TERMINATED)  # SystemExit unwinds the `with` blocks, so stores are closed


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.  SIGTERM closes the store and exits."""
    try:
        before = signal.signal(signal.SIGTERM, _terminate)
    except ValueError:
        before = None  # signal handlers can be set in the main thread only
    try:
        return _run(arguments)
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _run(arguments: Sequence[str] | None) -> int:
    session = Session()
    try:
        code = root.main(
            None if arguments is None else list(arguments),
            prog_name="logstore",
            standalone_mode=False,
            obj=session,
        )
        session.finish()
    except (_ClosedPipe, BrokenPipeError):
        forget_stdout()
        return exits.OK
    except _Interrupted as interrupted:
        if isinstance(interrupted.error, logstore.LogStoreError):
            return _failed(interrupted.error, session)
        with contextlib.suppress(BrokenPipeError):
            session.finish()
        forget_stdout()
        return exits.INTERRUPTED
    except (KeyboardInterrupt, click.Abort):
        return exits.INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help())
        return exits.USAGE
    except (click.ClickException, exits.CommandError) as error:
        return _failed(error, session)
    except (logstore.LogStoreError, OSError, IndexError, ValueError, ImportError) as error:
        return _failed(error, session)
    except BaseExceptionGroup as error:
        return _failed(error, session)
    return code if isinstance(code, int) else exits.OK


def _failed(error: BaseException, session: Session) -> int:
    try:
        session.finish()
    except OSError:  # the pipe is closed, or stdout is a file on a full disk
        forget_stdout()
    exits.tell(error)
    return exits.exit_code(error)
