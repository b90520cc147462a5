"""GGUF files on a Hub: what is read of them, how little, and what is answered where it cannot be."""

from __future__ import annotations

import json
import os
import struct
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome
from fake_hub import FakeHub, Request
from test_gguf import ARCHITECTURE, SMOLLM, header, text, write

Run = Callable[..., Outcome]
TOKEN = "hf_secret"
ROW = 23_040  # 30 layers · 2 · 3 heads · 64 · 2 B


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A Hub for a user of its own, and a client library that reads the environment anew."""
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING", "KVCTL_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in list(sys.modules):
        if name.partition(".")[0] == "huggingface_hub":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(tmp_path)
    with FakeHub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def model(tmp_path: Path, *, data: int = 5 * 2**20, words: int = 1000) -> bytes:
    """A file with its tensors' data: so many zeros."""
    path = write(tmp_path / "made.gguf", "llama", SMOLLM["metadata"], words=words)  # type: ignore[arg-type]
    return path.read_bytes() + bytes(data)


def kv_bytes(outcome: Outcome) -> int:
    assert outcome.code == 0, outcome.err
    found: int = outcome.json["results"][0]["kv_bytes"]
    return found


def test_a_file_is_named_in_every_way(kvctl: Run, hub: FakeHub, tmp_path: Path) -> None:
    hub.add(
        "org/m-GGUF", files={"m-Q4_K_M.gguf": model(tmp_path), "sub/m-Q8_0.gguf": model(tmp_path), "mmproj-F16.gguf": 9}
    )
    for name in (
        "org/m-GGUF:Q4_K_M", "org/m-GGUF:q8_0", "org/m-GGUF/m-Q4_K_M.gguf", "org/m-GGUF/sub/m-Q8_0.gguf",
        f"{hub.url}/org/m-GGUF/resolve/main/m-Q4_K_M.gguf?download=true", f"{hub.url}/org/m-GGUF/blob/main/sub/m-Q8_0.gguf",
    ):  # fmt: skip
        outcome = kvctl("size", name, "--ctx", "100", "--json")
        assert kv_bytes(outcome) == 100 * ROW, name
        result = outcome.json["results"][0]
        assert result["weights"]["bytes"] == 64 * 128 * 2 + 256 * 34
        assert result["model"]["source"] == "hub"
        assert result["model"]["location"].endswith(".gguf")
    # One request reads a header of some 20 kB.
    hub.requests.clear()
    hub.sent = 0
    assert kv_bytes(kvctl("size", "org/m-GGUF/m-Q4_K_M.gguf", "--ctx", "100", "--json")) == 100 * ROW
    assert len(hub.requests) == 1
    assert hub.requests[0].headers["range"] == "bytes=0-1048575"


def test_one_model_needs_no_name_and_several_are_listed(kvctl: Run, hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/one", files={"one.gguf": model(tmp_path), "README.md": b"read", "mmproj-one.gguf": 9})
    assert kv_bytes(kvctl("size", "org/one", "--ctx", "100", "--json")) == 100 * ROW
    hub.add("org/many", files={"m-UD-IQ2_M.gguf": 5, "m.Q4_K_M.gguf": 5, "a/x.gguf": 5, "b/x.gguf": 5})
    outcome = kvctl("size", "org/many")
    assert outcome.code == 1
    assert "org/many has 4 GGUF models" in outcome.err
    for name in ("org/many:UD-IQ2_M", "org/many:Q4_K_M", "org/many/a/x.gguf", "org/many/b/x.gguf"):
        assert name in outcome.err
    outcome = kvctl("size", "org/many:Q3_K_S")
    assert "no GGUF file of Q3_K_S" in outcome.err
    assert "org/many:Q4_K_M" in outcome.err
    outcome = kvctl("size", "org/many/c/x.gguf")
    assert "org/many has no file c/x.gguf" in outcome.err
    hub.add("org/none", config={"model_type": "llama"})
    assert "org/none has no GGUF files" in kvctl("size", "org/none:Q4_0").err


def test_a_config_beside_the_files_answers_without_them(kvctl: Run, hub: FakeHub, tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 1}
    hub.add("org/both", config=config, files={"m-Q4_0.gguf": model(tmp_path)})
    assert kv_bytes(kvctl("size", "org/both", "--ctx", "100", "--json")) == 100 * 2 * 128 * 2
    assert kv_bytes(kvctl("size", "org/both:Q4_0", "--ctx", "100", "--json")) == 100 * ROW


def test_split_files_are_one_model(kvctl: Run, hub: FakeHub, tmp_path: Path) -> None:
    other = write(tmp_path / "other.gguf", "llama", {}).read_bytes() + bytes(2**20)
    names = ["Q4_0/m-Q4_0-00001-of-00002.gguf", "Q4_0/m-Q4_0-00002-of-00002.gguf"]
    hub.add("org/split", files=dict(zip(names, (model(tmp_path), other), strict=True)))
    for name in ("org/split", "org/split:Q4_0", *(f"org/split/{part}" for part in names)):
        outcome = kvctl("size", name, "--ctx", "100", "--json")
        assert kv_bytes(outcome) == 100 * ROW
        assert outcome.json["results"][0]["weights"]["bytes"] == 2 * (64 * 128 * 2 + 256 * 34)


def test_long_vocabularies_come_in_ranges_that_double(kvctl: Run, hub: FakeHub, tmp_path: Path) -> None:
    whole = model(tmp_path, words=150_000, data=2**24)  # 150,000 words of some 20 bytes, and their scores
    hub.add("org/long", files={"m.gguf": whole})
    assert kv_bytes(kvctl("size", "org/long/m.gguf", "--ctx", "100", "--json")) == 100 * ROW
    spans = [request.headers["range"] for request in hub.requests]
    assert spans == ["bytes=0-1048575", "bytes=1048576-2097151", "bytes=2097152-4194303"]


def test_memory_is_bounded(kvctl: Run, hub: FakeHub) -> None:
    # A text of 1 GiB stands before what matters.
    start = header(3) + ARCHITECTURE + text("a") + struct.pack("<IQ", 8, 2**30)
    hub.add("org/long", files={"m.gguf": start + bytes(2**20), "zeros.gguf": 2**34})
    hub.hook = lambda request: (206, {"Content-Range": f"bytes 0-1048575/{2**34}"}, start + bytes(2**20 - len(start)))
    tracemalloc.start()
    outcome = kvctl("size", "org/long/m.gguf")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert outcome.code == 1
    assert "text of 1,073,741,824 bytes, more than can be in it" in outcome.err
    assert peak < 40 * 2**20
    hub.hook = None
    assert "is not a GGUF file" in kvctl("size", "org/long/zeros.gguf").err


def test_files_on_another_host_are_read_without_the_token(
    kvctl: Run, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.tokens.add(TOKEN)
    with FakeHub() as storage:
        hub.storage = storage
        data = {"m.gguf": model(tmp_path, words=150_000)}
        commit = hub.add("org/m", files=data, private=True).commit
        storage.add("org/m", files=data, commit=commit)
        outcome = kvctl("size", "org/m/m.gguf", "--ctx", "100", "--json")
        assert kv_bytes(outcome) == 100 * ROW
        assert {request.token for request in hub.requests} == {TOKEN}
        assert {request.token for request in storage.requests} == {None}
        assert storage.requests[0].headers["range"] == "bytes=0-1048575"
        assert "signed-secret" not in outcome.out + outcome.err


def test_gated_and_private_repositories(kvctl: Run, hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/gated", files={"m.gguf": model(tmp_path)}, gated=True)
    hub.add("org/private", files={"m.gguf": model(tmp_path)}, private=True)
    assert "org/gated is gated" in kvctl("size", "org/gated/m.gguf").err
    assert "not found on the Hub, or private" in kvctl("size", "org/private/m.gguf").err
    assert kvctl("size", "org/private:Q4_0").code == 1
    assert "no revision v9" in kvctl("size", "org/gated/m.gguf", "--revision", "v9").err


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((206, {}, b"GGUF"), "another part of the file"),
        ((206, {"Content-Range": "bytes 5-8/100"}, b"GGUF"), "another part of the file"),
        ((206, {"Content-Range": "bytes 0-9/100"}, b"GGUF"), "another part of the file"),
        ((206, {"Content-Range": "bytes 0-3/4"}, b"GGUF"), "too short for a GGUF header"),
        ((206, {"Content-Range": "bytes 0-3/100"}, b"GGUF"), "another part of the file"),
        ((206, {"Content-Range": f"bytes 0-3/{'9' * 5000}"}, b"GGUF"), "another part of the file"),
        ((200, {}, b"GGUF" * 100), "does not answer parts of files"),
        ((416, {}, b""), "is empty"),
        ((500, {}, b""), "answers 500"),
        ((429, {"Retry-After": "7"}, b""), "too many requests"),
    ],
)
def test_odd_answers_end_in_one_line(
    kvctl: Run, hub: FakeHub, answer: tuple[int, dict[str, str], bytes], words: str
) -> None:
    hub.hook = lambda request: answer
    outcome = kvctl("size", "org/m/m.gguf")
    assert outcome.code == 1
    assert words in outcome.err
    assert len(outcome.err.splitlines()) <= 2
    assert len(hub.requests) < 5


def test_a_header_comes_in_no_crumbs(kvctl: Run, hub: FakeHub) -> None:
    """A server that answers a byte at a time would keep a reader busy for months."""

    def crumb(request: Request) -> tuple[int, dict[str, str], bytes]:
        start = int(request.headers["range"].removeprefix("bytes=").partition("-")[0])
        return 206, {"Content-Range": f"bytes {start}-{start}/1000000000"}, b"GGUF\3"[start : start + 1] or b"\0"

    hub.hook = crumb
    outcome = kvctl("size", "org/m/m.gguf")
    assert outcome.code == 1
    assert "another part of the file" in outcome.err
    assert len(hub.requests) == 1


def test_servers_without_ranges_are_not_read_whole(kvctl: Run, hub: FakeHub) -> None:
    hub.ranges = False
    hub.add("org/m", files={"m.gguf": 2**30})
    outcome = kvctl("size", "org/m/m.gguf")
    assert "hf download org/m m.gguf" in outcome.err
    assert hub.sent < 2**26


def test_slow_servers_are_given_up(kvctl: Run, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVCTL_HUB_TIMEOUT", "0.3")
    hub.add("org/m", files={"m.gguf": model(tmp_path, data=0)})
    hub.drip = 0.05
    start = time.monotonic()
    outcome = kvctl("size", "org/m/m.gguf")
    assert time.monotonic() - start < 5
    assert "did not answer within 0.3 s" in outcome.err


@pytest.mark.parametrize("length", [0, 3, 20, 30, 100, 5000])
def test_cut_files_end_in_one_line(kvctl: Run, hub: FakeHub, tmp_path: Path, length: int) -> None:
    hub.add("org/m", files={"m.gguf": model(tmp_path)[:length]})
    outcome = kvctl("size", "org/m/m.gguf")
    assert outcome.code == 1
    assert len(outcome.err.splitlines()) <= 2
    assert outcome.err.startswith("kvctl: error: org/m/m.gguf")


def test_offline_and_other_sources(kvctl: Run, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--source catalogue has no GGUF files" in kvctl("size", "org/m:Q4_0", "--source", "catalogue").err
    assert "no such GGUF file in the Hub cache" in kvctl("size", "org/m:Q4_0", "--source", "cache").err
    assert "is an address" in kvctl("size", "https://example.org/a/b/resolve/main/x.gguf").err
    assert not hub.requests
    files: dict[str, Any] = {"m.gguf": b"GGUF" + json.dumps({}).encode()}
    hub.add("org/m", files=files)
    assert "too short" in kvctl("size", "org/m").err


def test_files_in_the_hub_cache_are_read_there(kvctl: Run, hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "hf" / "hub" / "models--org--m-GGUF"
    snapshot = folder / "snapshots" / ("0" * 40)
    (snapshot / "sub").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    (snapshot / "m-Q4_K_M.gguf").write_bytes(model(tmp_path))
    (snapshot / "sub" / "m-Q8_0.gguf").write_bytes(model(tmp_path))
    for name in ("org/m-GGUF:Q4_K_M", "org/m-GGUF/sub/m-Q8_0.gguf", "org/m-GGUF:q8_0"):
        outcome = kvctl("size", name, "--ctx", "100", "--json")
        assert kv_bytes(outcome) == 100 * ROW
        assert outcome.json["results"][0]["model"]["source"] == "cache"
        assert kv_bytes(kvctl("size", name, "--ctx", "100", "--json", "--source", "cache", "--revision", "0" * 40))
    assert not hub.requests
    assert kvctl("size", "org/m-GGUF:Q5_0").code == 1
    assert kvctl("size", "org/m-GGUF:Q4_K_M", "--revision", "../../..").code == 1
    assert hub.requests
