"""The client itself, against a server of known cadence: how far its times are off, and how much it can take."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvctl.errors import KvctlError
from kvctl.files import cache_folder, write_whole
from kvctl.loadtest.connection import Address
from kvctl.loadtest.exchange import Exchange
from kvctl.loadtest.load import Ask, Closed, Length
from kvctl.loadtest.loop import Loop
from kvctl.measure.child import child
from kvctl.measure.statistics import quantile
from kvctl.record import Record

SCHEMA = "kvctl.calibration/1"
TTFT, ITL, TOKENS = 0.1, 0.02, 64
"""The cadence: as peers' clients were measured by others, so that figures can be compared."""
AT_ONCE = (1, 16, 128, 512)
_FLOOD = (16, 2000)
"""Requests at once, and tokens of each, as fast as they come."""
_MODULE = "kvctl.loadtest.fake"


class Errors(Record):
    """How far the client's times are from the server's own, in seconds; the median, and what 99 of 100 do not exceed."""

    at_once: int
    requests: int
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    """Of gaps between events, whichever way."""
    itl_p99: float
    tokens_per_second: float
    """That came."""
    nominal: float
    """That the cadence gives."""
    cpu: float
    """Of a core."""
    bundled: float
    """Share of events that came in one read with others before them."""

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields}


class Calibration(Record):
    """What a client can tell on one machine."""

    errors: tuple[Errors, ...]
    ceiling: float
    """Output tokens a second that it took in where the server wrote as fast as it could."""
    kernel: bool
    """Whether stamps are the kernel's."""
    machine: str
    at: str
    """When, in UTC."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA, "errors": [one.to_dict() for one in self.errors], "ceiling_tokens_per_second": self.ceiling,
            "kernel_stamps": self.kernel, "machine": self.machine, "at": self.at,
        }  # fmt: skip

    def nearest(self, at_once: int) -> Errors:
        """Errors at the smallest number of requests that is no less, or else at the largest."""
        return next((one for one in self.errors if one.at_once >= at_once), self.errors[-1])


def calibrate(say: Callable[[str], None], at_once: Sequence[int] = AT_ONCE, rounds: int = 3) -> Calibration:
    """Measure the client; takes some seconds for each number of requests.

    Raises:
        KvctlError: the server cannot be started, or does not answer as it should.

    """
    errors, kernel = [], True
    for count in at_once:
        say(f"calibrating: {count:,} at once")
        done, seconds, cpu = _run(
            ("--ttft", str(TTFT), "--itl", str(ITL), "--tokens", str(TOKENS)), count, count * rounds, keep=True
        )
        kernel = kernel and all(one.kernel for one in done)
        errors.append(_errors(count, done, seconds, cpu))
    say("calibrating: as fast as it goes")
    at, tokens = _FLOOD
    done, seconds, _ = _run(("--ttft", "0", "--itl", "0", "--tokens", str(tokens)), at, at * 4, keep=False)
    ceiling = sum(len(one.stamps) for one in done) / seconds
    return Calibration(tuple(errors), ceiling, kernel, machine(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))


def _run(argv: Sequence[str], at_once: int, count: int, *, keep: bool) -> tuple[list[Exchange], float, float]:
    """So many requests to a fake server: exchanges, seconds, and the share of a core that the loop took."""
    with child(("-P", "-m", _MODULE, *argv)) as server:
        assert server.stdout is not None
        said = server.stdout.readline()
        if not said.strip().isdigit():
            raise KvctlError("the server to calibrate against did not start", hint="KVCTL_DEBUG=1 shows more")
        body = b'{"stream":true}'
        data = b"POST /v1/chat/completions HTTP/1.1\r\nHost: fake\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        done: list[Exchange] = []
        source = _Kept(at_once, lambda number: Ask(data), Length(requests=count), done.append)
        source.keep = keep
        loop = Loop(Address(socket.AF_INET, "127.0.0.1", int(said), "127.0.0.1"))
        try:
            loop.open(at_once)
            time.sleep(0.05)  # the kernel begins to stamp a moment after it is asked
            from kvctl.loadtest.drive import undisturbed

            with undisturbed():
                began, cpu = time.monotonic(), time.thread_time()
                loop.run(source)
                seconds, cpu = time.monotonic() - began, time.thread_time() - cpu
        except OSError as error:
            raise KvctlError(f"{at_once:,} connections cannot be opened: {str(error).lower()}",
                             hint="ulimit -n says how many files are allowed") from None  # fmt: skip
        finally:
            loop.close()
    bad = next((one.fault for one in done if one.fault is not None), None)
    if bad is not None:
        raise KvctlError(f"calibrating: {bad.kind}: {bad.message}")
    return done, seconds, cpu / seconds


class _Kept(Closed):
    """Whose exchanges keep their events: they say when the server wrote them."""

    keep = False

    def take(self) -> Exchange:
        exchange = super().take()
        exchange.events = [] if self.keep else None
        return exchange


def _errors(at_once: int, done: Sequence[Exchange], seconds: float, cpu: float) -> Errors:
    ttft, itl = array("d"), array("d")
    for one in done:
        written, truth = _truth(one)
        ttft.append(abs((one.first_token - one.sent) - (truth["first"] - truth["came"])) / 1e9)
        for number in range(1, len(written)):
            own = one.stamps[number] - one.stamps[number - 1]
            itl.append(abs(own - (written[number] - written[number - 1])) / 1e9)
    events = sum(len(one.stamps) for one in done)
    return Errors(
        at_once, len(done), quantile(ttft, 0.5), quantile(ttft, 0.99), quantile(itl, 0.5), quantile(itl, 0.99), events / seconds,
        at_once * TOKENS / (TTFT + (TOKENS - 1) * ITL), cpu, sum(one.bundled for one in done) / max(events, 1),
    )  # fmt: skip


def _truth(one: Exchange) -> tuple[list[int], Mapping[str, int]]:
    """When the server wrote each event with output, and what else it knows, by what it said in them."""
    said = [json.loads(event) for event in one.events or () if event.startswith(b"{")]
    written = [int(event["id"]) for event in said if "id" in event]
    truth = said[-1].get("kvctl") if said else None
    if len(written) != len(one.stamps) or not isinstance(truth, dict):
        raise KvctlError("calibrating: events are missing")
    return written, truth


# -- kept from one run to the next ------------------------------------------------------------------------


def machine() -> str:
    """What a calibration is of: the machine's name, its processors and the versions that matter."""
    return f"{platform.node()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, {platform.system()} {platform.release()}"


def place() -> Path:
    """Where the newest lies."""
    return cache_folder() / "serve-test-calibration.json"


def save(found: Calibration) -> None:
    """Keep it for later runs.

    Raises:
        KvctlError: it cannot be written.

    """
    try:
        place().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KvctlError(
            f"cannot make {place().parent}: {(error.strerror or '').lower()}", hint="KVCTL_CACHE names another folder"
        ) from None
    write_whole(str(place()), (json.dumps(found.to_dict(), indent=2) + "\n").encode())


def load() -> Calibration | None:
    """The newest of this machine; None where there is none, or none that can be read."""
    try:
        out = of_dict(json.loads(place().read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None
    return out if out.machine == machine() else None


def of_dict(found: Any) -> Calibration:
    """What `to_dict` wrote.

    Raises:
        ValueError: it is something else.

    """
    try:
        errors = tuple(
            Errors(int(one["at_once"]), int(one["requests"]), *(float(one[name]) for name in Errors._fields[2:]))
            for one in found["errors"]
        )
        ceiling = float(found["ceiling_tokens_per_second"])
        out = Calibration(errors, ceiling, bool(found["kernel_stamps"]), str(found["machine"]), str(found["at"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"no calibration: {error}") from None
    if not errors:
        raise ValueError("no calibration: it has no errors")
    return out
