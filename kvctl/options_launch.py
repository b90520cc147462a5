"""Which server `kvctl serve-test` tests, and what is known of how that was started: --launch, --server-log, --size-model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvctl import options
from kvctl.errors import KvctlError, UsageError
from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.loadtest.capacity import Sizing
    from kvctl.loadtest.launch import Launch
    from kvctl.options import Asked
    from kvctl.startlog import StartLog

_HINT = "kvctl serve-test http://127.0.0.1:8000; or --launch llama.cpp --model X.gguf"


class Aim(Record):
    """What is tested."""

    url: str
    model: str | None
    """As requests call it."""
    launch: Launch | None
    notes: tuple[str, ...] = ()


def read_aim(
    url: str | None, launch: str | None, model: str | None, *, server_log: str | None, start_timeout: str | None, dry_run: bool
) -> Aim:  # fmt: skip
    """The server that is named, started, or found where engines listen by default.

    Raises:
        UsageError: none of them, or two.
        KvctlError: an engine that is not installed.

    """
    if url is not None:
        if launch is not None:
            raise UsageError("a URL is of a server that runs, and --launch starts one", hint="one of them")
        if start_timeout is not None:
            raise UsageError("--start-timeout is about --launch")
        return Aim(url, model, None)
    if launch is not None:
        return _started(launch, model, server_log, start_timeout)
    if dry_run:
        raise UsageError("no server is named, and --dry-run asks nobody", hint=_HINT)
    return _nearby(model, server_log, start_timeout)


def _started(text: str, model: str | None, server_log: str | None, start_timeout: str | None) -> Aim:
    from kvctl.loadtest import launch

    if text.lower() in launch.ENGINES:
        if model is None:
            raise UsageError(f"--launch {text} needs a model", hint=f"--launch {text} --model FILE or FOLDER")
        return _aim(launch.of_engine(text.lower(), model), None, server_log, start_timeout)
    if not text.strip() or (" " not in text.strip() and "/" not in text):
        raise UsageError(f"--launch: {text[:40]!r} is no engine that kvctl starts", hint="one of " + ", ".join(launch.ENGINES)
                         + '; or a command line: --launch "vllm serve MODEL"')  # fmt: skip
    return _aim(launch.of_command(text), model, server_log, start_timeout)


def _aim(found: Launch, model: str | None, server_log: str | None, start_timeout: str | None, *notes: str) -> Aim:
    from kvctl.loadtest.launch import HOST
    from kvctl.options_serve import seconds

    if server_log is not None:
        from kvctl.files import check_writable

        check_writable(server_log)
    limit = found.limit_s if start_timeout is None else seconds(start_timeout, "--start-timeout")
    return Aim(
        f"http://{HOST}", model or found.model, found.replace(log=server_log, limit_s=limit), (*notes, *found.notes)
    )


def _nearby(model: str | None, server_log: str | None, start_timeout: str | None) -> Aim:
    """A server that answers, and serves the model that is named; else one that is started for it."""
    from kvctl.loadtest import launch, nearby

    found = nearby.find()
    fitting = [one for one in found if model is None or not one.models or model in one.models]
    if len(fitting) > 1:
        raise UsageError("no server is named, and several answer on this machine",
                         hint=f"name one: {', '.join(one.place.root for one in fitting)}")  # fmt: skip
    if fitting:
        if start_timeout is not None:
            raise UsageError(f"--start-timeout is about --launch, and {fitting[0].place.root} answers already")
        return Aim(
            fitting[0].place.root, model, None, (f"no server is named: {fitting[0].place.root} answers, and is tested",)
        )
    answering = "".join(f"; {one.place.root} serves others" for one in found)
    if model is not None and os.path.exists(os.path.expanduser(model)):
        one = launch.for_model(model)
        if one is None:
            raise UsageError(
                f"{model[:200]} is no model that kvctl can start an engine for",
                hint="a .gguf file, or a folder with config.json",
            )
        return _aim(one, None, server_log, start_timeout, f"no server is named{answering}: {one.engine} is started")
    places = ", ".join(str(port) for port, _ in nearby.PLACES)
    what = "no server is named" if model is None else f"no server is named, and {model[:80]} is no file or folder"
    raise UsageError(f"{what}; none answers on this machine at ports {places}{answering}", hint=_HINT)


# -- what kvctl size is to predict for ------------------------------------------------------------------------


def read_sizing(
    launch: Launch | None, server_log: str | None, size_model: str | None, planned: str | None = None
) -> Sizing:
    """The model and the settings, as far as they are known before the server is asked; `planned`: the command of a plan that it is to
    be started by.

    Raises:
        KvctlError: a log that cannot be read, or a model that was named and is not known.

    """
    from kvctl.loadtest.capacity import Sizing
    from kvctl.loadtest.launch import told

    if launch is not None:
        try:
            with told("--launch"):
                return _sizing(_asked(launch.shown, None, size_model), "settings of --launch")
        except KvctlError as error:
            if size_model is not None:
                raise
            return Sizing(why=f"what kvctl size predicts is not available: {error.message}")
    if server_log is not None:
        log = _read(server_log)
        asked = _asked(log.engine_args, log.rules, size_model or _model_of(log))
        if not asked.models:
            return Sizing(
                log=log,
                why=f"what kvctl size predicts is not available: {log.path} names no known model; --size-model MODEL does",
            )
        return _sizing(asked, "settings as its log says", log)
    if planned is not None:
        try:
            with told("--plan"):
                return _sizing(_asked(planned, None, size_model), "settings of the plan")
        except KvctlError as error:
            return Sizing(why=f"what kvctl size predicts is not available: {error.message}")
    if size_model is not None:
        return Sizing(_asked(None, None, size_model).specs((None, None, None), None)[0])
    return Sizing()


def _asked(command: str | None, engine: str | None, model: str | None) -> Asked:
    return options.read_asked(
        engine=engine, engine_args=command, models=None if model is None else [model], revision=None, ctx=None, dtype="auto",
        kv_dtypes=("auto", "auto", "auto"), overrides=[], flags=(),
    )  # fmt: skip


def _sizing(asked: Asked, settings: str, log: StartLog | None = None) -> Sizing:
    from kvctl.loadtest.capacity import Sizing
    from kvctl.size import SizePlan

    spec = asked.specs((None, None, None), None)[0]
    plan = asked.plans(SizePlan(contexts=asked.contexts, dtype=asked.dtype, notes=asked.notes)).each[0]
    return Sizing(spec, plan, log, settings)


def _read(path: str) -> StartLog:
    from kvctl.startlog import read_log

    if path == "-":
        raise UsageError("--server-log reads a file", hint="--server-log server.log")
    try:
        return read_log(path)
    except KvctlError as error:
        raise type(error)(
            error.message,
            hint=(error.hint or "").replace("--from-log", "--server-log")
            or "llama-server writes of its cache with -lv 4",
        ) from None


def _model_of(log: StartLog) -> str | None:
    try:
        return options.model_of_log(log, None)
    except KvctlError:
        return None
