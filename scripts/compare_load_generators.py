"""How far load generators are off, and how much they can take in, each against the same server of known cadence.

    python scripts/compare_load_generators.py --vllm venv/bin/vllm --guidellm venv/bin/guidellm --aiperf venv/bin/aiperf \\
        --tokenizer folder --json result.json

kvctl and whichever of vLLM (`vllm bench serve`), guidellm and aiperf are named take turns: each number of requests at once, and then
a flood, in every round. The truth is what the server wrote down of the very requests that a client counts: when the kernel took each
in, and when each of its events was written. A client's error is how far its median is from the median of that, by the client's own
definition of it; figures are medians over rounds. The table is Markdown; JSON has every run. `--tokenizer`: a local folder, for
clients that make their prompts with one (none of them is to ask a network).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TTFT, ITL, TOKENS = 0.1, 0.02, 64
REQUESTS = {1: 12, 16: 96, 128: 512, 512: 1536}
"""Of each load, by how many are under way."""
FLOOD = 16, 192, 1000
"""Requests at once, of all, and tokens of each, as fast as they come."""
SECONDS = 300
CEILING = "the server's own ceiling"


class Load:
    """What a client is to do."""

    def __init__(self, url: str, at_once: int, requests: int, tokens: int, tokenizer: str, folder: Path) -> None:
        self.url, self.at_once, self.requests, self.tokens = url, at_once, requests, tokens
        self.tokenizer, self.folder = tokenizer, folder

    def read(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text(encoding="utf-8"))


class Said:
    """What a client reports: requests that succeeded, and medians in milliseconds."""

    def __init__(self, completed: int, ttft: float, itl: float) -> None:
        self.completed, self.ttft, self.itl = completed, ttft, itl


# -- the clients ----------------------------------------------------------------------------------------


class Client:
    """How one is asked, and what it answers."""

    def __init__(
        self, argv: Callable[[str, Load], Sequence[str]], said: Callable[[Load, str], Said], gaps: bool, package: str, env: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.argv, self.said = argv, said
        self.gaps = gaps
        """Whether its time between tokens is that of gaps; else each request has one, the mean of its gaps."""
        self.package, self.env = package, env


def _kvctl(program: str, load: Load) -> Sequence[str]:
    return [program, "-P", "-m", "kvctl", "serve-test", load.url, "-i", "32", "-o", str(load.tokens), "-c", str(load.at_once),
            "-n", str(load.requests), "--warmup", "0", "--json", "-q"]  # fmt: skip


def _said_by_kvctl(load: Load, printed: str) -> Said:
    found = json.loads(printed)["loads"][0]["all"]
    times = found["times"]
    return Said(found["requests"]["good"], times["ttft"]["p50"]["value"] * 1e3, times["itl"]["p50"]["value"] * 1e3)


def _vllm(program: str, load: Load) -> Sequence[str]:
    return [program, "bench", "serve", "--backend", "openai-chat", "--base-url", load.url, "--endpoint", "/v1/chat/completions", "--model", "fake",
            "--tokenizer", load.tokenizer, "--dataset-name", "random", "--random-input-len", "32", "--random-output-len", str(load.tokens),
            "--num-prompts", str(load.requests), "--max-concurrency", str(load.at_once), "--percentile-metrics", "ttft,itl", "--save-result",
            "--result-dir", str(load.folder), "--result-filename", "vllm.json", "--disable-tqdm"]  # fmt: skip


def _said_by_vllm(load: Load, printed: str) -> Said:
    found = load.read("vllm.json")
    return Said(found["completed"], found["median_ttft_ms"], found["median_itl_ms"])


def _guidellm(program: str, load: Load) -> Sequence[str]:
    return [program, "run", "--backend", f"kind=openai_http,target={load.url},model=fake", "--profile", f"kind=concurrent,streams={load.at_once}",
            "--constraint", f"kind=max_requests,count={load.requests}", "--tokenizer", f"kind=huggingface_auto,model={load.tokenizer}",
            "--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={load.tokens}",
            "--output", f"kind=json,path={load.folder / 'guidellm.json'}", "--disable-console"]  # fmt: skip


def _said_by_guidellm(load: Load, printed: str) -> Said:
    found = load.read("guidellm.json")["benchmarks"][0]["metrics"]
    ttft, itl = found["time_to_first_token_ms"], found["inter_token_latency_ms"]
    return Said(found["request_totals"]["successful"], ttft["successful"]["median"], itl["successful"]["median"])


def _aiperf(program: str, load: Load) -> Sequence[str]:
    return [program, "profile", "--model", "fake", "--url", load.url, "--endpoint-type", "chat", "--streaming", "--tokenizer", load.tokenizer,
            "--concurrency", str(load.at_once), "--request-count", str(load.requests), "--isl", "32", "--osl", str(load.tokens),
            "--artifact-dir", str(load.folder), "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics"]  # fmt: skip


def _said_by_aiperf(load: Load, printed: str) -> Said:
    found = load.read("profile_export_aiperf.json")
    return Said(
        int(found["request_count"]["avg"]), found["time_to_first_token"]["p50"], found["inter_token_latency"]["p50"]
    )


_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
CLIENTS = {
    "kvctl serve-test": Client(_kvctl, _said_by_kvctl, True, "kvctl", {"PYTHONPATH": str(ROOT)}),
    "vllm bench serve": Client(_vllm, _said_by_vllm, True, "vllm", _OFFLINE),
    "guidellm": Client(_guidellm, _said_by_guidellm, False, "guidellm", _OFFLINE),
    # aiperf takes a folder for a repository's name where it is told that it is offline.
    "aiperf": Client(_aiperf, _said_by_aiperf, False, "aiperf", {}),
}


def version(name: str, program: str) -> str:
    """Of the package, by the Python that lies beside the program."""
    package = CLIENTS[name].package
    if package == "kvctl":
        from kvctl import __version__

        return __version__
    asked = [str(Path(program).with_name("python")), "-c", f"import importlib.metadata as m; print(m.version({package!r}))"]  # fmt: skip
    return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=SECONDS).stdout.strip()


# -- the server, and what it knows ------------------------------------------------------------------------


@contextlib.contextmanager
def served(ttft: float, itl: float) -> Iterator[int]:
    """A server of this cadence; its port."""
    argv = [
        sys.executable,
        "-P",
        "-m",
        "kvctl.loadtest.fake",
        "--ttft",
        str(ttft),
        "--itl",
        str(itl),
        "--tokens",
        str(TOKENS),
    ]
    started = subprocess.Popen(argv, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        assert started.stdout is not None
        yield int(started.stdout.readline())
    finally:
        started.kill()
        started.wait()


class Truth:
    """Of the requests that a client counts: medians in milliseconds, and tokens a second from the first request to the last event."""

    def __init__(self, port: int, tokens: int, counted: int, *, gaps: bool) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/truth", timeout=60) as answer:
            told = [one for one in json.load(answer) if one[1] == tokens]
        # A client's trials and warm-up come before what it counts.
        kept = sorted(told)[-counted:]
        self.answers = len(told)
        self.ttft = statistics.median(written[0] - came for came, _, written in kept) / 1e6
        between = [[b - a for a, b in pairwise(written)] for _, _, written in kept]
        each = [gap for one in between for gap in one] if gaps else [statistics.fmean(one) for one in between]
        self.itl = statistics.median(each) / 1e6
        seconds = (max(written[-1] for _, _, written in kept) - kept[0][0]) / 1e9
        self.rate = len(kept) * tokens / seconds


def ceiling(at_once: int, count: int, tokens: int) -> float:
    """Tokens a second that the server gives to a client that throws away what it reads."""
    body = json.dumps({"stream": True, "max_tokens": tokens}).encode()
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: fake\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with served(0, 0) as port, selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for _ in range(at_once):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            selector.register(sock, selectors.EVENT_READ)
            sock.sendall(request)
        sent, done, buffer = at_once, 0, bytearray(1 << 20)
        while done < count:
            for key, _ in selector.select():
                sock = key.fileobj  # type: ignore[assignment]
                size = sock.recv_into(buffer)
                if buffer[:size].endswith(b"\r\n0\r\n\r\n"):
                    done += 1
                    if sent < count:
                        sent += 1
                        sock.sendall(request)
        return Truth(port, tokens, count, gaps=True).rate


# -- the comparison -----------------------------------------------------------------------------------------


def measure(
    name: str, program: str, at_once: int, requests: int, tokens: int, tokenizer: str, *, flood: bool
) -> dict[str, Any]:
    """One run of one client."""
    client = CLIENTS[name]
    cadence = (0.0, 0.0) if flood else (TTFT, ITL)
    with served(*cadence) as port, tempfile.TemporaryDirectory() as folder:
        load = Load(f"http://127.0.0.1:{port}", at_once, requests, tokens, tokenizer, Path(folder))
        out: dict[str, Any] = {
            "client": name,
            "at_once": at_once,
            "requests": requests,
            "flood": flood,
            "load_average": os.getloadavg()[0],
        }
        with tempfile.TemporaryFile("w+") as errors:
            began = time.monotonic()
            try:
                run = subprocess.run(client.argv(program, load), stdout=subprocess.PIPE, stderr=errors, text=True, timeout=SECONDS,
                                     env=os.environ | dict(client.env), cwd=folder)  # fmt: skip
                out["seconds"] = time.monotonic() - began
                said = client.said(load, run.stdout)
            except (subprocess.TimeoutExpired, OSError, ValueError, KeyError, TypeError) as error:
                errors.seek(0)
                return out | {"failed": f"{type(error).__name__}: {errors.read()[-500:]}"}
        truth = Truth(port, tokens, said.completed, gaps=client.gaps)
    return out | {
        "completed": said.completed, "served": truth.answers,
        "ttft_ms": said.ttft, "itl_ms": said.itl, "true_ttft_ms": truth.ttft, "true_itl_ms": truth.itl,
        "ttft_error_ms": abs(said.ttft - truth.ttft), "itl_error_ms": abs(said.itl - truth.itl), "tokens_per_second": truth.rate,
    }  # fmt: skip


def compare(
    programs: Mapping[str, str], at_once: Sequence[int], rounds: int, tokenizer: str, *, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Every client in turn, at every number of requests and in a flood, `rounds` times."""
    runs = []
    most, count, tokens = FLOOD
    for number in range(rounds):
        for load in (*at_once, None):
            for name, program in programs.items():
                many = (most, count, tokens) if load is None else (load, REQUESTS.get(load, 3 * load), TOKENS)
                one = measure(name, program, *many, tokenizer, flood=load is None) | {"round": number}
                runs.append(one)
                say(json.dumps(one))
            if load is None:
                runs.append({"client": CEILING, "flood": True, "round": number, "tokens_per_second": ceiling(*FLOOD)})
                say(json.dumps(runs[-1]))
    return runs


def median(runs: Sequence[Mapping[str, Any]], client: str, at_once: int | None, name: str) -> float | None:
    """Over rounds; of the flood where `at_once` is None."""
    found = [one[name] for one in runs if one["client"] == client and name in one and one["flood"] == (at_once is None)
             and (at_once is None or one["at_once"] == at_once)]  # fmt: skip
    return statistics.median(found) if found else None


def table(runs: Sequence[Mapping[str, Any]], at_once: Sequence[int]) -> str:
    """In Markdown."""

    def cell(client: str, count: int | None, name: str, form: str) -> str:
        value = median(runs, client, count, name)
        return "–" if value is None else format(value, form)

    clients = list(dict.fromkeys(one["client"] for one in runs if one["client"] != CEILING))
    head = [
        "client",
        *(f"TTFT error, {count} at once" for count in at_once),
        *(f"ITL error, {count}" for count in at_once),
        "completed",
        "tokens/s in a flood",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" + "---:|" * (len(head) - 1)]
    for client in clients:
        own = [one for one in runs if one["client"] == client]
        done = f"{sum(one.get('completed', 0) for one in own):,} of {sum(one['requests'] for one in own):,}"
        cells = [client, *(cell(client, count, "ttft_error_ms", ".3f") for count in at_once),
                 *(cell(client, count, "itl_error_ms", ".4f") for count in at_once), done, cell(client, None, "tokens_per_second", ",.0f")]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(
        [
            *lines,
            "",
            f"Errors of medians in milliseconds. The server alone gives {cell(CEILING, None, 'tokens_per_second', ',.0f')} tokens a second in a flood.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("vllm", "guidellm", "aiperf"):
        parser.add_argument(f"--{name}", metavar="PATH", help="its executable")
    parser.add_argument("--tokenizer", metavar="FOLDER", default="", help="a tokenizer's files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", default=",".join(map(str, REQUESTS)))
    parser.add_argument("--json", metavar="FILE", help="every run")
    given = parser.parse_args(argv)
    programs = {"kvctl serve-test": sys.executable}
    programs |= {
        name: path
        for name, path in (("vllm bench serve", given.vllm), ("guidellm", given.guidellm), ("aiperf", given.aiperf))
        if path
    }
    if len(programs) > 1 and not given.tokenizer:
        parser.error("--tokenizer: a folder is needed")
    at_once = [int(count) for count in given.at_once.split(",")]
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    programs = {name: os.path.abspath(path) for name, path in programs.items()}
    versions = {name: version(name, program) for name, program in programs.items()}
    tokenizer = os.path.abspath(given.tokenizer)
    runs = compare(
        programs, at_once, given.rounds, tokenizer, say=lambda text: print(text, file=sys.stderr, flush=True)
    )
    loads = [one["load_average"] for one in runs if "load_average" in one]
    about = {
        "began": began, "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "rounds": given.rounds,
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}, {platform.system()} {platform.release()}",
        "versions": versions, "load_average": {"min": min(loads), "median": statistics.median(loads), "max": max(loads)},
        "cadence": {"ttft_s": TTFT, "itl_s": ITL, "tokens": TOKENS}, "flood": dict(zip(("at_once", "requests", "tokens"), FLOOD, strict=True)),
    }  # fmt: skip
    if given.json:
        Path(given.json).write_text(json.dumps(about | {"runs": runs}, indent=1) + "\n", encoding="utf-8")
    print(table(runs, at_once))
    shares = about["load_average"]
    print(f"\n{given.rounds} rounds, medians; {about['machine']}; " + ", ".join(f"{name} {of}" for name, of in versions.items())
          + f"; load average {shares['min']:.1f} to {shares['max']:.1f}; {began}")  # fmt: skip


if __name__ == "__main__":
    main()
