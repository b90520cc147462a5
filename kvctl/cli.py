"""The `kvctl` command: the list of commands, and one mapping from what went wrong to an exit code."""

import contextlib
import os
import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from kvctl import __version__, signals
from kvctl.engines.flags import FLAGS, Flag, given
from kvctl.errors import ExitCode, KvctlError, hint_of
from kvctl.record import Record

# A line on the screen, not a page of somebody's input.
_LONGEST = 1000
_HELP_WIDTH = 78

app = typer.Typer(
    name="kvctl",
    help="Size and measure the KV cache of large language models.",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 done, 1 failed, 2 wrong usage, 3 the answer is no, 130 interrupted. See kvctl(1).",
)


def _version(value: bool) -> None:
    if value:
        print(f"kvctl {__version__}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Size and measure the KV cache of large language models."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


class Place(Record):
    """Where the engines' own flags stand in a command's options."""

    after: str
    """The option that they follow."""
    engines: tuple[str, ...] = ()
    """Whose; empty for all."""


COMMANDS: dict[str, Place | None] = {
    "size": Place("engine_args"),
    "profile": Place("quiet", ("llama.cpp", "vllm")),
    "quantize": None,
    "serve-test": None,
    "recommend": None,
}
"""Each is a module in kvctl.commands with a function of its name (_ for -); None: it has none of the engines' flags."""


def command(argv: Sequence[str] | None = None, *, whole: bool = True) -> Any:
    """The command tree; with `argv` only the command that it names, and unless `whole` only those of the engines' many
    flags that it has (for a fast start).

    Typer's own completion installers are left out: completions/ has better scripts.
    """
    app.registered_commands = []
    names = [name for name in COMMANDS if argv is not None and argv[:1] == [name]] or list(COMMANDS)
    for name in names:
        function = name.replace("-", "_")
        app.command(name)(getattr(import_module(f"kvctl.commands.{function}"), function))
    tree: Any = typer.main.get_command(app)
    tree.params = [param for param in tree.params if param.name not in ("install_completion", "show_completion")]
    said = {word.partition("=")[0] for word in argv or ()}
    rows = [flag for flag in FLAGS if flag.spellings and (whole or said & {*flag.spellings, *flag.off})]
    for name in names:
        place, options = COMMANDS[name], tree.commands[name].params
        if place is None:
            continue
        taken = {spelling for option in options for spelling in (*option.opts, *option.secondary_opts)}
        fitting = [flag for row in rows if (flag := row.narrowed(place.engines or row.engines, taken)).spellings]
        index = 1 + next(number for number, param in enumerate(options) if param.name == place.after)
        options[index:index] = [_engine_option(flag, said) for flag in fitting]
    return tree


class _EngineOption(typer.core.TyperOption):
    """An option with several engines' spellings, which may take more than a line of the help text."""

    def get_help_record(self, ctx: Any) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        if record is None or len(record[0]) <= _HELP_WIDTH:
            return record
        import textwrap

        indent = " " * 6
        names = textwrap.fill(record[0], _HELP_WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)  # fmt: skip
        return names, record[1]


def _engine_option(flag: Flag, words: Collection[str]) -> Any:
    """A row of the flags' table as an option; its value is gathered in the context."""
    used = [name for name in (*flag.spellings, *flag.off) if name in words]

    def keep(context: Any, param: Any, value: str | bool | None) -> None:
        if value is not None:
            spelling = used[0] if used else flag.spellings[0]
            context.obj = (*(context.obj or ()), given(flag, spelling, value))

    switch = flag.kind.read is None
    names = list(flag.spellings)
    if flag.off:
        names = [f"{on}/{off}" for on, off in zip(names, flag.off, strict=False)] + names[len(flag.off) :]
    option: Any = _EngineOption(
        param_decls=[*names, flag.key],
        callback=keep,
        expose_value=False,
        default=None,
        metavar=None if switch else flag.kind.metavar,
        is_flag=switch or None,
        type=None if switch else str,
        help=f"{flag.help} ({', '.join(flag.engines)})",
        autocompletion=(
            lambda _context, _args, incomplete: [c for c in flag.choices if c.startswith(incomplete.lower())]
        )
        if flag.choices
        else None,
    )
    return option


def main() -> NoReturn:
    """Run the command line; every way out passes here."""
    code = run()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _discard()  # it was said already; Python would end with a status of its own
    sys.exit(code)


def run() -> int:
    """The exit status of one run. Errors are one line and a hint on stderr."""
    debug = os.environ.get("KVCTL_DEBUG") == "1"
    # A closed stream is None here, and print() would then write to the other one.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    argv = sys.argv[1:]
    whole = "_KVCTL_COMPLETE" in os.environ or "--help" in argv or "-h" in argv
    try:
        code = _run(argv, whole=whole)
        sys.stdout.flush()
        if code == ExitCode.INTERRUPTED:  # Typer's word for Ctrl-C
            raise KeyboardInterrupt
        return code if isinstance(code, int) else ExitCode.OK
    except KvctlError as err:
        if debug:
            raise
        if signals.asked():
            return _interrupted()
        return _say(err.message, hint_of(err.hint, next(iter(argv), "")), err.exit_code)
    except SystemExit as leave:
        # Typer turns a broken pipe into this, with its own wrapper around the streams.
        return _reader_gone() if type(sys.stdout).__name__ == "PacifyFlushWrapper" else int(leave.code or 0)
    except BrokenPipeError:
        return _reader_gone()
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as err:  # the last net: a fault of kvctl's own still gets one line
        if debug:
            raise
        if signals.asked():
            return _interrupted()
        return _usage_or_fault(err)


def _run(argv: Sequence[str], *, whole: bool) -> Any:
    try:
        return command(argv, whole=whole)(standalone_mode=False)
    except Exception as error:
        # The full tree knows what a misspelt option may have been.
        if type(error).__name__ != "NoSuchOption" or whole:
            raise
        return command(argv)(standalone_mode=False)


def _interrupted() -> int:
    """As shells have it: 128 and the signal's number."""
    import signal

    number = signals.received()
    return _say(
        "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}", None, 128 + number
    )


def _reader_gone() -> int:
    """kvctl … | head: not an error."""
    _discard()
    return ExitCode.OK


def _discard() -> None:
    """Nothing more may be written to stdout, not even at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage_or_fault(err: Exception) -> int:
    """Typer's own errors (unknown option, missing value) by duck type: its Click is private."""
    show = getattr(err, "format_message", None)
    if show is not None:
        context = getattr(err, "ctx", None)
        path = getattr(context, "command_path", None) or "kvctl" + (" size" if "size" in sys.argv[1:2] else "")
        message = show()
        if message.startswith("No such command") and len(sys.argv) > 1:
            hint = "see kvctl --help" if "Did you mean" in message else f"kvctl size {sys.argv[1]}? See kvctl --help"
            return _say(message, hint, ExitCode.USAGE)
        return _say(message, f"see {path} --help", ExitCode.USAGE)
    if type(err).__name__ == "Abort":
        return _interrupted()
    if isinstance(err, OSError):
        return _say(f"{err.strerror or err}: {err.filename}" if err.filename else str(err), None, ExitCode.FAILED)
    return _say(
        f"internal error: {type(err).__name__}: {err}",
        "set KVCTL_DEBUG=1 for the traceback, and please report it",
        ExitCode.FAILED,
    )


def _say(message: str, hint: str | None, code: int) -> int:
    from kvctl.words import one_line

    with contextlib.suppress(OSError):
        print(f"kvctl: error: {one_line(message)[:_LONGEST]}", file=sys.stderr)
        if hint:
            print(f"hint: {one_line(hint)[:_LONGEST]}", file=sys.stderr)
    return code
