"""`--from-log` on the command line, with published start-up logs (tests/data/start_logs.txt)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from conftest import DATA, Outcome

Run = Callable[..., Outcome]


def published(words: str, folder: Path) -> str:
    """The log whose heading has these words, as a file."""
    entries = (DATA / "start_logs.txt").read_text("utf-8").split("\n== ")
    (entry,) = [entry for entry in entries[1:] if words in entry.partition("\n")[0]]
    path = folder / "server.log"
    path.write_text(entry.partition("\n---\n")[2], "utf-8")
    return str(path)


def test_a_log_says_all_that_is_needed(kvctl: Run, tmp_path: Path) -> None:
    path = published("TinyLlama on a GPU of 128 GiB", tmp_path)
    outcome = kvctl("size", "--from-log", path)
    assert outcome.code == 0, outcome.err
    assert "agrees: 3 numbers" in outcome.out
    assert "4,836,272" in outcome.out


def test_json_has_the_log_beside_the_answer(kvctl: Run, tmp_path: Path) -> None:
    import json

    path = published("TinyLlama on a GPU of 128 GiB", tmp_path)
    document = kvctl("size", "--from-log", path, "--json").json
    schema = Path(__file__).parent.parent / "kvctl/data/schemas/kvctl.size-1.json"
    jsonschema.validate(document, json.loads(schema.read_text("utf-8")))
    assert document["log"]["agrees"] is True
    assert document["log"]["version"] == "0.10.2"
    assert {row["name"] for row in document["log"]["rows"]} >= {"blocks", "capacity", "concurrency"}
    assert document["results"][0]["engine"] == {"name": "vllm", "version": "0.10.2"}
    # The log prints 302,267 blocks of 16 tokens for 101.47 GiB; what rounds to that holds a few less or more.
    assert abs(document["results"][0]["allocation"]["num_blocks"] - 302_267) < 30


def test_a_model_that_the_log_does_not_name_can_be_named(kvctl: Run, tmp_path: Path) -> None:
    path = published("a student's report on memory", tmp_path)
    unnamed = kvctl("size", "--from-log", path)
    assert unnamed.code == 1
    assert "it names no model" in unnamed.err
    assert "name it" in unnamed.err
    named = kvctl("size", "meta-llama/Llama-3.1-8B-Instruct", "--from-log", path)
    assert "agrees" in named.out


@pytest.mark.parametrize("text", ["", "nothing of an engine\n", "\x00\x01\x02"])
def test_what_is_no_log_is_one_line(kvctl: Run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "server.log"
    path.write_text(text)
    outcome = kvctl("size", "--from-log", str(path))
    assert outcome.code == 1
    assert outcome.err.startswith("kvctl: error: ")
    assert outcome.out == ""


def test_a_log_is_about_one_model(kvctl: Run) -> None:
    assert kvctl("size", "Qwen3-8B", "Qwen3-32B", "--from-log", "x.log").code == 2
