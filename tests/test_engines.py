"""`--engine all`: engines side by side."""

from __future__ import annotations

from collections.abc import Callable

from conftest import Outcome

Run = Callable[..., Outcome]


def test_engines_side_by_side(kvctl: Run) -> None:
    outcome = kvctl("size", "gemma-3-27b-it", "--ctx", "128k", "--engine", "all", "--json")
    found = {result["engine"]["name"]: result for result in outcome.json["results"]}
    assert set(found) == {"ideal", "transformers", "vllm", "sglang", "llama.cpp", "tensorrt-llm", "ollama"}
    row = 2 * 16 * 128 * 2  # K and V · 16 heads · 128 · 2 B
    assert found["ideal"]["kv_bytes"] == row * (10 * 131_072 + 52 * 1024)
    assert found["transformers"]["kv_bytes"] == row * (10 * 131_072 + 52 * 1023)
    # 8,192 + 6 · 1,089 blocks of 10 · 16 tokens; 10 full layers, and 52 of 4 · 1,024 + 512 cells
    assert found["vllm"]["allocation"]["reserved_bytes"] == 14_726 * 10 * 16 * row
    # every layer in full, and one page for padded tokens
    assert found["sglang"]["allocation"]["reserved_bytes"] == 62 * 131_073 * row
    assert found["llama.cpp"]["allocation"]["reserved_bytes"] == row * (10 * 131_072 + 52 * 4608)
    table = kvctl("size", "gemma-3-27b-it", "--ctx", "128k", "--engine", "all").out
    assert "19,301,662,720" in table
    assert "llama.cpp: windows hold 4 × 1,024 + 512 tokens" in table


def test_options_go_to_the_engines_that_have_them(kvctl: Run) -> None:
    outcome = kvctl("size", "Qwen3-32B", "--ctx", "32k", "--engine", "all", "-tp", "4", "-np", "2", "--json")
    found = {
        result["engine"]["name"]: result["allocation"] for result in outcome.json["results"] if "allocation" in result
    }
    assert found["vllm"]["tensor_parallel_size"] == 4
    assert "2/2 seqs" in found["llama.cpp"]["log"][0]


def test_engines_without_an_answer_say_why(kvctl: Run) -> None:
    outcome = kvctl("size", "whisper-large-v3", "--ctx", "448", "--engine", "all", "--json")
    refused = ["sglang", "llama.cpp", "tensorrt-llm", "ollama"]
    assert [line.partition(":")[0] for line in outcome.json["refused"]] == refused
    assert "no answer from: sglang" in outcome.err
    assert {result["engine"]["name"] for result in outcome.json["results"]} == {"ideal", "transformers", "vllm"}
    assert ", transformers 5.24 |" in kvctl("size", "Qwen3-32B", "--ctx", "4k", "--engine", "all", "-f", "md").out


def test_no_answer_at_all_is_an_error(kvctl: Run) -> None:
    outcome = kvctl("size", "Qwen3-32B", "--ctx", "4k", "--engine", "all", "--kv-dtype", "q9_9")
    assert outcome.code == 2
    assert "no engine answers" in outcome.err
    assert kvctl("size", "Qwen3-32B", "--engine", "all", "--explain").code == 2


def test_what_is_wrong_for_every_engine_is_said_once(kvctl: Run) -> None:
    outcome = kvctl("size", "Qwen3-32B", "--engine", "all", "--ctx", "1x")
    assert outcome.code == 2
    assert outcome.err.count("is not a number of tokens") == 1


def test_a_column_for_every_fact_of_any_engine(kvctl: Run) -> None:
    lines = kvctl("size", "Qwen3-8B", "--ctx", "4k", "--engine", "all", "-f", "csv").out.splitlines()
    head = lines[0].split(",")
    assert "reserved_bytes" in head
    assert len(lines) == 1 + 7
    rows = {line.split(",")[1]: dict(zip(head, line.split(","), strict=False)) for line in lines[1:]}
    assert rows["ideal"]["reserved_bytes"] == ""
    # 36 layers · 8 heads · 256 · 2 B · 4,096 tokens
    assert rows["vllm"]["reserved_bytes"] == str(36 * 4096 * 4096)
