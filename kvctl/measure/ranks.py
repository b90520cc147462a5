"""A profile over several ranks: one process each, cut by transformers' tensor-parallel plan, measured in lockstep.

The ranks are plain children that get what torchrun would set (RANK, LOCAL_RANK, WORLD_SIZE, …) and one another's
address; they are never restarted, each in a session of its own, so that Ctrl-C reaches this process alone, which then
ends them. A rank ends by itself when this process is gone.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvctl import errors
from kvctl.engines import TRANSFORMERS
from kvctl.errors import KvctlError, UsageError
from kvctl.hardware.cpu import read_cpu
from kvctl.measure.rank_messages import FRAME, Doing, Done, Failed, Loaded, Measured, Told
from kvctl.measure.report import Point, ProfileReport
from kvctl.size import SizePlan, prepare
from kvctl.units import plural

if TYPE_CHECKING:
    from kvctl.measure.run import ProfilePlan, Progress

MEETING_S = 300.0
"""How long ranks wait for all to come."""
_GRACE_S = 3.0
"""For the other ranks to say how they fared, once one has failed."""
_TAIL = 4096
"""Bytes that are kept of what a rank says on stderr."""


def profile_ranks(
    plan: ProfilePlan, progress: Progress, *, nproc: int, nnodes: int = 1, node_rank: int = 0,
    rdzv_endpoint: str | None = None, meeting_s: float = MEETING_S,
) -> ProfileReport:  # fmt: skip
    """Measures every point on `nproc` ranks here, of `nproc × nnodes` in all; the first rank's times count.

    A rank that fails ends the others. What was measured until then is in the report, with the point at which it failed.

    Raises:
        UsageError: options that do not go together, or a split that transformers does not make.
        KvctlError: a rank failed before anything was measured; not all ranks came in time.

    """
    from kvctl.measure.points import check_lengths

    world = nproc * nnodes
    _check(plan, nproc, nnodes, node_rank, rdzv_endpoint)
    check_lengths(plan.spec, plan.asked)
    _check_predicted(plan, world)
    with tempfile.TemporaryDirectory(prefix="kvctl-ranks-", ignore_cleanup_errors=True) as folder:
        store = rdzv_endpoint or str(Path(folder) / "store")
        team = _Team(world)
        progress.now.stage(f"starting {plural(nproc, 'rank')}")
        try:
            for local in range(nproc):
                told = Told(plan, node_rank * nproc + local, local, nproc, nnodes, store, meeting_s)
                team.start(told)
            team.listen(progress)
        except KeyboardInterrupt:
            team.interrupted = True
        finally:
            team.end()
    return _report(plan, team, nnodes)


def _check(plan: ProfilePlan, nproc: int, nnodes: int, node_rank: int, endpoint: str | None) -> None:
    device = plan.wanted.device
    if nproc < 1 or nnodes < 1 or nproc * nnodes < 2:
        raise UsageError("--tp: two or more ranks", hint="without --tp the model runs on one device")
    if device not in ("cpu", "cuda", "cuda:0"):
        raise UsageError(f"--tp runs on cpu or cuda, not on {device[:40]}",
                         hint="--device cpu; ranks take the first GPUs, and CUDA_VISIBLE_DEVICES chooses others")  # fmt: skip
    if plan.wanted.device_map is not None:
        raise UsageError("--device-map puts whole layers on devices, and --tp cuts every layer", hint="one of them")
    if not 0 <= node_rank < nnodes:
        raise UsageError(f"--node-rank {node_rank} is out of range", hint=f"0 to {nnodes - 1} of --nnodes {nnodes}")
    if nnodes == 1:
        if endpoint is not None:
            raise UsageError("--rdzv-endpoint is for several nodes", hint="--nnodes N")
        return
    host, _, port = (endpoint or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError("--nnodes needs --rdzv-endpoint HOST:PORT, the same on every node",
                         hint="an address of the first node, and a free port of it")  # fmt: skip


def _check_predicted(plan: ProfilePlan, ranks: int) -> None:
    """Refuses here, by name, what would be refused in every rank."""
    from kvctl.measure.points import Predictor

    spec = plan.spec
    dtype = prepare(spec, SizePlan(TRANSFORMERS, dtype=plan.wanted.dtype)).dtype
    encoder = plan.asked.encoder_tokens if spec.cross_input else None
    Predictor(spec, dtype, encoder, ranks).bytes(max(plan.asked.contexts), 1)


# -- processes ----------------------------------------------------------------------------------------


class _Rank:
    """One child: its process, and what has come of its messages."""

    def __init__(self, told: Told) -> None:
        self.rank = told.rank
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvctl.measure.rank_worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment(told),
            start_new_session=True,
        )  # fmt: skip
        self.said = bytearray()
        self.complaints = b""
        self.failed: Failed | None = None
        self.done = False
        self.heard_out = False
        """Whether all that it said was read: a process that has ended may have said more than was read of it."""
        assert self.process.stdin is not None
        try:
            pickle.dump(told, self.process.stdin)
            self.process.stdin.flush()  # and left open: its end would be ours
        except BrokenPipeError:
            pass  # it ended at once; why, is seen when it is waited for

    def messages(self) -> list[Any]:
        """The messages that are complete."""
        found = []
        while len(self.said) >= FRAME.size:
            (length,) = FRAME.unpack_from(self.said)
            if len(self.said) < FRAME.size + length:
                break
            found.append(pickle.loads(bytes(self.said[FRAME.size : FRAME.size + length])))
            del self.said[: FRAME.size + length]
        return found

    def ended(self) -> str | None:
        """How it ended without a word; None while it runs or is heard, and for one that said why or was done."""
        status = self.process.poll()
        if status is None or not self.heard_out or self.failed is not None or self.done:
            return None
        if status == -signal.SIGKILL:
            return "was killed (SIGKILL: the kernel does that where memory runs out)"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        lines = [line.strip() for line in self.complaints.decode(errors="replace").splitlines() if line.strip()]
        return f"ended with status {status}" + (f": {lines[-1][:300]}" if lines else "")

    def end(self) -> None:
        """Kills it, with what it started, and waits for it."""
        if self.process.poll() is None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what was left to write has no reader
                    pipe.close()


def _environment(told: Told) -> dict[str, str]:
    """What torchrun would set, and what keeps ranks on one machine out of each other's way."""
    out = dict(os.environ)
    out |= {"RANK": str(told.rank), "LOCAL_RANK": str(told.local_rank), "WORLD_SIZE": str(told.world),
            "LOCAL_WORLD_SIZE": str(told.nproc)}  # fmt: skip
    out.setdefault("TOKENIZERS_PARALLELISM", "false")
    if told.plan.wanted.device == "cpu":
        # transformers puts ranks on GPUs wherever it sees any.
        out |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        out.setdefault("OMP_NUM_THREADS", str(max(1, (read_cpu().usable_cores or 1) // told.nproc)))
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if told.nnodes == 1 and loopback:
        out.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    return out


class _Team:
    """The ranks of this machine, and what they found."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.ranks: list[_Rank] = []
        self.loaded: Loaded | None = None
        self.measured: list[Measured] = []
        self.failure: KvctlError | None = None
        self.notes: tuple[str, ...] = ()
        self.interrupted = False

    def start(self, told: Told) -> None:
        """One more rank."""
        self.ranks.append(_Rank(told))

    def listen(self, progress: Progress) -> None:
        """Until all are done, or one has failed and the others had time to say why."""
        deadline = None
        with selectors.DefaultSelector() as selector:
            for rank in self.ranks:
                for pipe, is_stdout in ((rank.process.stdout, True), (rank.process.stderr, False)):
                    assert pipe is not None
                    selector.register(pipe, selectors.EVENT_READ, (rank, is_stdout))
            while not all(rank.done for rank in self.ranks):
                for key, _ in selector.select(0.1):
                    rank, is_stdout = key.data
                    data = os.read(key.fd, 2**16)
                    if not data:
                        selector.unregister(key.fileobj)
                        rank.heard_out |= is_stdout
                    elif not is_stdout:
                        rank.complaints = (rank.complaints + data)[-_TAIL:]
                    else:
                        rank.said += data
                        for message in rank.messages():
                            self._take(rank, message, progress)
                bad = [rank for rank in self.ranks if rank.failed is not None or rank.ended() is not None]
                if bad and deadline is None:
                    deadline = time.monotonic() + _GRACE_S
                if deadline is not None and (len(bad) == len(self.ranks) or time.monotonic() > deadline):
                    break
        if deadline is not None:
            self._fail()

    def _take(self, rank: _Rank, message: Any, progress: Progress) -> None:
        now = progress.now
        if isinstance(message, Doing):
            now.doing, now.step, now.steps = message.doing, message.step, message.steps
        elif isinstance(message, Loaded):
            self.loaded = message
            now.stage("every rank has loaded its part of the model")
        elif isinstance(message, Measured):
            self.measured.append(message)
            now.last = message.point
            progress.done(message.point)
        elif isinstance(message, Failed):
            rank.failed = message
        elif isinstance(message, Done):
            rank.done = True
            self.notes = tuple(dict.fromkeys((*self.notes, *message.notes)))

    def _fail(self) -> None:
        """The cause among all that the ranks said: a death, else an error of a rank's own, else a broken exchange."""
        deaths = [(rank.rank, how) for rank in self.ranks if (how := rank.ended()) is not None]
        said = [rank.failed for rank in self.ranks if rank.failed is not None]
        own = [each for each in said if not each.follows]
        if own:
            first = own[0]
            alike = len(own) == len(self.ranks) and len({each.message for each in own}) == 1
            text = first.message if alike else f"rank {first.rank} of {self.world}: {first.message}"
            self.failure = getattr(errors, first.kind, KvctlError)(text, hint=first.hint)
        elif deaths:
            rank, how = deaths[0]
            self.failure = KvctlError(f"rank {rank} of {self.world} {how}")
        else:
            self.failure = KvctlError(
                f"rank {said[0].rank} of {self.world} lost the connection to another one",
                hint="that one's node says why",
            )

    def end(self) -> None:
        """No rank is left after this."""
        for rank in self.ranks:
            rank.end()


# -- report -------------------------------------------------------------------------------------------


def _report(plan: ProfilePlan, team: _Team, nnodes: int) -> ProfileReport:
    from kvctl.measure.fits import lines_of
    from kvctl.measure.run import report_of

    points = [measured.point for measured in team.measured]
    warnings = []
    if team.failure is not None:
        if not points:
            raise team.failure
        warnings.append(team.failure.message)
        points += _not_measured(plan, points, team)
    report = report_of(plan)
    loaded = team.loaded
    settings = dict(loaded.settings if loaded is not None else report.settings)
    settings |= {"device": plan.wanted.device, "tensor_parallel": team.world, "nodes": nnodes,
                 "ranks": [dict(row) for row in loaded.rows] if loaded is not None else []}  # fmt: skip
    for row, peaks in zip(settings["ranks"], zip(*(each.peaks for each in team.measured), strict=True), strict=False):
        row["peak_bytes"] = max((peak for peak in peaks if peak is not None), default=None)
    return report.replace(
        settings=settings,
        points=tuple(points),
        lines=lines_of(points),
        ranks=team.world,
        notes=(*(loaded.notes if loaded is not None else ()), *team.notes,
               f"{plural(team.world, 'rank')}: times and memory are those of the first, the cache that of each"),
        warnings=(*report.warnings, *warnings),
        interrupted=team.interrupted,
    )  # fmt: skip


def _not_measured(plan: ProfilePlan, points: list[Point], team: _Team) -> list[Point]:
    """The point at which the ranks failed, and those after it."""
    assert team.failure is not None
    out: list[Point] = []
    for context, batch in plan.asked.pairs[len(points) :]:
        error = team.failure.message if not out else "not tried: the ranks had ended"
        out.append(Point(context, batch, plan.asked.decode, error=error))
    return out
