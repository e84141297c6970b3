"""What the commands share: consoles, progress, JSON, and errors without a traceback.

Results go to standard output and nothing else does, so that `hpc bench --json - | jq` works; progress and
messages go to standard error. Exit codes: 0 all right, 1 something was checked and is wrong, 2 the request
itself is wrong.
"""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

_PATH_ERRORS = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)


class Group(TyperGroup):
    """Command group that turns the library's own errors and unusable paths into one line and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            messages().print("stopped", highlight=False)
            raise typer.Exit(INTERRUPTED) from None
        except _PATH_ERRORS as error:
            usage_error(f"{error.strerror}: {error.filename}" if error.filename else str(error))
        except Exception as error:
            if not _is_user_error(error):
                raise
            usage_error(str(error))


class DefaultGroup(TyperGroup):
    """Group whose first command runs where no command is named: `hpc bench OP` is `hpc bench run OP`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        completing = ctx.resilient_parsing and not args  # a shell wants the commands' names
        if not completing and (not args or args[0] not in self.commands):
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Commands, and what the default command takes in their place."""
        default = next(iter(self.commands.values()))
        argument = next((param for param in default.params if param.param_type_name == "argument"), None)
        more = argument.shell_complete(ctx, incomplete) if argument is not None else []
        return [*super().shell_complete(ctx, incomplete), *more]


def _is_user_error(error: Exception) -> bool:
    from hpc.common.errors import InvalidArgument, InvalidDtype, UnsupportedDevice

    return isinstance(error, (InvalidArgument, InvalidDtype, UnsupportedDevice))


def usage_error(text: str) -> NoReturn:
    """Print one error line to standard error and leave with code 2."""
    messages().print(f"[bold red]error:[/] {escape(text)}", highlight=False, soft_wrap=True)
    raise typer.Exit(USAGE)


def escape(text: object) -> str:
    """Text with rich's markup characters made harmless (shapes such as [64, 8] look like markup)."""
    from rich.markup import escape as rich_escape

    return rich_escape(str(text))


def results() -> Console:
    """Console on standard output, for results only."""
    from rich.console import Console

    return Console()


def messages() -> Console:
    """Console on standard error, for progress and remarks."""
    from rich.console import Console

    return Console(stderr=True)


def progress_bar() -> Progress:
    """Live progress on standard error: what runs now, how many are done, elapsed and estimated time left."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=messages(),
        transient=True,
    )


def write_json(value: object) -> None:
    """One JSON document on standard output. NaN and infinity become null: strict parsers refuse them."""
    sys.stdout.write(json.dumps(finite(value), indent=2, sort_keys=False, default=str) + "\n")


def finite(value: Any) -> Any:
    """`value` with every NaN and infinity replaced by None, inside dicts and lists too."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def complete_operator(incomplete: str) -> list[str]:
    """Operators that begin with what was typed, for the shell."""
    from hpc.common import registry

    return [name for name in registry.names() if name.startswith(incomplete)]


OperatorName = Annotated[
    str | None,
    typer.Argument(
        metavar="OP", help="Operator, such as attention.decode.", autocompletion=complete_operator
    ),
]


def operator_names(wanted: str | None) -> list[str]:
    """Registered operators, or the one that was asked for by its full name or its last part."""
    from hpc.common import registry

    known = sorted(registry.names())
    if wanted is None:
        return known
    found = [name for name in known if wanted in (name, name.rsplit(".", 1)[-1])]
    if not found:
        usage_error(f"unknown operator '{wanted}'; known: {', '.join(known)}")
    return found
