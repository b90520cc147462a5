"""`kvctl recommend` as people run it: forms, files, status, and what is refused."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome
from jsonschema import Draft202012Validator

Run = Callable[..., Outcome]
BASE = ("recommend", "Qwen/Qwen3-8B", "--gpu", "L40S", "--ctx", "8k", "--concurrency", "4")


def valid(document: dict[str, Any]) -> None:
    name = document["schema"].replace("/", "-") + ".json"
    schema = json.loads((resources.files("kvctl.data") / "schemas" / name).read_text())
    Draft202012Validator(schema).validate(document)


def test_a_plan_fits_its_schema_and_names_every_flag(kvctl: Run) -> None:
    outcome = kvctl(*BASE, "--json")
    assert outcome.code == 0
    document = json.loads(outcome.out)
    valid(document)
    best = document["answers"][0]
    assert best["kind"] == "best"
    command = best["side"]["command"]
    assert command[:2] == ["vllm", "serve"] or command[0] in ("trtllm-serve", "llama-server", "python")
    # What lies on the GPU adds up to what it has: 44.4 GiB of an L40S, of 48 GB.
    assert 44 < sum(best["side"]["memory"].values()) / 2**30 < 45


def test_a_plan_of_what_cannot_be_has_status_three_and_what_would(kvctl: Run) -> None:
    outcome = kvctl(
        "recommend", "Qwen2.5-72B-Instruct", "--gpu", "RTX4090", "--concurrency", "4", "--ctx", "8k", "--json"
    )
    assert outcome.code == 3
    document = json.loads(outcome.out)
    valid(document)
    assert not document["answers"]
    assert {near["direction"] for near in document["nearest"]} >= {"gpus", "gpu", "model"}


def test_weights_in_host_memory_stand_beside_the_gpus_sum(kvctl: Run) -> None:
    asked = ("recommend", "gpt-oss-120b", "--gpu", "RTX4090", "--host-memory", "128GiB", "--ctx", "16k", "--concurrency", "2",
             "--engine", "llama.cpp")  # fmt: skip
    document = json.loads(kvctl(*asked, "--json").out)
    valid(document)
    side = document["answers"][0]["side"]
    # Applications have 23.5 GiB of its 24. openai/gpt-oss-120b's files have 65.25 × 10^9 B, 60.8 GiB.
    assert 23 < sum(side["memory"].values()) / 2**30 < 24
    assert 60 < (side["memory"]["weights"] + side["host_weights"]) / 2**30 < 62
    text = kvctl(*asked, "-e").out
    assert "beside it in the host's memory, not in this sum" in text
    assert "the weights fit" not in text
    assert "--n-cpu-moe" in text


def test_several_make_a_matrix_in_every_form(kvctl: Run) -> None:
    many = ("recommend", "Qwen/Qwen3-8B", "openai/gpt-oss-20b", "--gpu", "L4,L40S", "--ctx", "8k", "--concurrency", "4")
    document = json.loads(kvctl(*many, "--json").out)
    valid(document)
    assert [(row["model"], row["gpu"]) for row in document["rows"]] == [
        ("Qwen/Qwen3-8B", "1x NVIDIA L4"), ("Qwen/Qwen3-8B", "1x NVIDIA L40S"),
        ("openai/gpt-oss-20b", "1x NVIDIA L4"), ("openai/gpt-oss-20b", "1x NVIDIA L40S"),
    ]  # fmt: skip
    table = kvctl(*many, "--format", "md").out
    assert table.count("\n| ") + table.startswith("| ") == 5
    assert len(kvctl(*many, "--format", "csv").out.splitlines()) == 5
    assert "gpt-oss-20b" in kvctl(*many).out
    # Words to the left, numbers to the right.
    assert table.splitlines()[1] == "|---|---|---|" + "---:|" * 8
    # What the rate lies between, and how sure it is, stands beside it.
    for row in document["rows"]:
        assert (
            row["output_tokens_per_second_low"]
            <= row["output_tokens_per_second"]
            <= row["output_tokens_per_second_high"]
        )
        assert row["validated"]


def test_a_matrix_in_which_nothing_meets_the_request_is_a_no(kvctl: Run) -> None:
    # 72 milliards of weights in four bits are 36 GB, and these cards have 24 and 16.
    none = kvctl("recommend", "Qwen2.5-72B-Instruct", "--gpu", "L4,T4", "--ctx", "4k")
    assert none.code == 3
    assert kvctl("recommend", "Qwen2.5-72B-Instruct", "Qwen3-8B", "--gpu", "L4", "--ctx", "4k").code == 0


def test_notes_of_a_matrix_are_said_once(kvctl: Run) -> None:
    many = ("recommend", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "--gpu", "H100,L40S", "--ctx", "8k", "--concurrency", "4")
    notes = kvctl(*many).err.splitlines()
    assert len(notes) == len(set(notes))
    # Every request has this one, and one kind of hardware that.
    assert "note: formats that lose more than 1% are left out; --max-quality-loss sets another bound" in notes
    (card,) = [note for note in notes if "took H100 SXM" in note]
    assert card.startswith("note: NVIDIA H100 80GB HBM3: ")


def test_explain_has_each_answer_of_a_matrix_in_full(kvctl: Run) -> None:
    many = ("recommend", "Qwen/Qwen3-8B", "--gpu", "L4,L40S", "--ctx", "8k", "--concurrency", "4", "--explain")
    text, table = kvctl(*many).out, kvctl(*many, "--format", "md").out
    for name in ("NVIDIA L4", "NVIDIA L40S"):
        assert f"Qwen/Qwen3-8B on 1 × {name}; 4 requests at once" in text
        assert f"\n## Qwen/Qwen3-8B on 1 × {name}\n" in table
    assert text.count("1. best: ") == 2
    assert text.count("StreamingLLM") == 2


def test_prices_are_told_and_sorted_by(kvctl: Run, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text("L40S = 0.9\n")
    document = json.loads(kvctl(*BASE, "--price", str(prices), "--goal", "cost", "--json").out)
    cost = document["answers"][0]["side"]["cost"]
    assert cost["per_hour"] == 0.9
    # 0.9 for 3,600 s of as many tokens as the likeliest rate gives: the middle of the range.
    rate = document["answers"][0]["side"]["speed"]["output_rate"]["mid"]
    assert cost["per_million_output_tokens"]["mid"] == pytest.approx(0.9 / 3600 / rate * 1e6)


def test_a_card_of_two_gpus_is_paid_for_once_and_idle_prices_are_named(kvctl: Run) -> None:
    outcome = kvctl(
        "recommend", "Qwen/Qwen3-8B", "--gpu", "MI250", "--ctx", "8k", "--price", "MI250=4,H200=2", "--json"
    )
    costs = {one["side"]["cost"]["gpus"]: one["side"]["cost"]["per_hour"] for one in json.loads(outcome.out)["answers"]}
    assert costs == {1: 4.0, 2: 4.0}
    assert "--price H200: no such GPU is asked about" in outcome.err


def test_what_is_emitted_goes_to_stdout_or_a_folder(kvctl: Run, tmp_path: Path) -> None:
    text = kvctl(*BASE, "--engine", "vllm", "--emit", "command").out
    assert "vllm serve" in text
    assert "--kv-cache-memory-bytes" in text
    folder = tmp_path / "serve"
    outcome = kvctl(*BASE, "--engine", "vllm", "--emit", "all", "-o", str(folder))
    assert outcome.code == 0
    names = {path.name for path in folder.iterdir()}
    assert {
        "start.sh",
        "compose.yaml",
        "kubernetes.yaml",
        "qwen3-8b.service",
        "alerts.yaml",
        "RUNBOOK.md",
        "plan.json",
    } <= names
    valid(json.loads((folder / "plan.json").read_text()))
    book = (folder / "RUNBOOK.md").read_text()
    assert "--emit" not in book
    assert all(f"`{name}`" in book or f" {name}`" in book for name in names - {"RUNBOOK.md"})
    # Qwen3-8B has 8,190,735,360 parameters of 2 bytes, however they are converted: 15.26 GiB.
    assert "15.26 GiB of weights" in (folder / "kubernetes.yaml").read_text()
    assert "--config engine.yaml\n" in (folder / "engine.yaml").read_text()
    assert not [path for path in folder.iterdir() if stat.S_IMODE(path.stat().st_mode) & 0o002]


def test_a_folder_gets_all_files_or_none(kvctl: Run, tmp_path: Path) -> None:
    asked = (*BASE, "--engine", "vllm", "--emit", "all", "-o", str(tmp_path))
    (tmp_path / "compose.yaml").mkdir()
    refused = kvctl(*asked)
    assert refused.code == 1
    assert "no plain file" in refused.err
    assert "hint: " in refused.err
    assert [path.name for path in tmp_path.iterdir()] == ["compose.yaml"]
    (tmp_path / "compose.yaml").rmdir()
    (tmp_path / "compose.yaml").write_text("services: {mine: {image: nginx}}\n")
    refused = kvctl(*asked)
    assert refused.code == 2
    assert "compose.yaml is there already" in refused.err
    assert "--force replaces it" in refused.err
    assert [path.name for path in tmp_path.iterdir()] == ["compose.yaml"]
    assert "nginx" in (tmp_path / "compose.yaml").read_text()
    assert kvctl(*asked, "--force").code == 0
    assert "vllm" in (tmp_path / "compose.yaml").read_text()
    # The same once more replaces nothing.
    assert kvctl(*asked).code == 0


def test_two_plans_are_compared(kvctl: Run, tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text(kvctl(*BASE, "--json").out)
    other.write_text(kvctl(*BASE[:-1], "8", "--json").out)
    outcome = kvctl("recommend", "--what-if", str(one), "--what-if", str(other))
    assert outcome.code == 0
    assert "ranges overlap" in outcome.out or "told apart" in outcome.out
    document = json.loads(kvctl("recommend", "--what-if", str(one), "--what-if", str(other), "--json").out)
    valid(document)
    assert "nothing differs" in kvctl("recommend", "--what-if", str(one), "--what-if", str(one)).out
    assert kvctl(*BASE, "--what-if", str(one)).out.count("nothing differs") == 1


@pytest.mark.parametrize("form", ["table", "md"])
def test_explain_names_every_technique_with_a_verdict(kvctl: Run, form: str) -> None:
    text = kvctl(*BASE, "--explain", "--format", form).out
    for technique in ("paged attention", "FP8 KV cache", "StreamingLLM", "H2O", "ScissorHands", "LMCache", "disaggregated prefill",
                      "FlashAttention", "CUDA graphs", "continuous batching", "chunked prefill", "speculative decoding", "sibling"):  # fmt: skip
        assert technique in text


@pytest.mark.parametrize(
    ("argv", "says", "hint"),
    [
        (("recommend",), "no model is named", "kvctl recommend MODEL"),
        (("recommend", "Qwen/Qwen3-8B", "--gpu", "0xH100"), "", ""),
        (("recommend", "Qwen/Qwen3-8B", "--gpu", "H999"), "H999", ""),
        (("recommend", "Qwen/Qwen3-8B", "--gpu", "L4", "--ctx", "1m"), "more than the 40,960", "--ctx 40960"),
        (("recommend", "Qwen/Qwen3-8B", "--gpu", "L4", "--concurrency", "0"), "--concurrency 0", "from 1"),
        (("recommend", "Qwen/Qwen3-8B", "--gpu", "L4", "--concurrency", "2", "--rate", "1"), "--concurrency and --rate", "one of them"),
        (("recommend", "Qwen/Qwen3-8B", "--gpu", "L4", "--goal", "joy"), "unknown goal", "throughput"),
        (("recommend", "Qwen/Qwen3-8B", "--gpu", "L4", "--slo", "soon"), "--slo", "ttft=500ms"),
        (("recommend", "Qwen/Qwen3-8B", "--gpu", "L4", "--max-quality-loss", "much"), "no percentage", "--max-quality-loss 1"),
        (("recommend", "Qwen/Qwen3-8B", "--gpu", "L4", "--emit", "poem"), "unknown kind", "compose"),
        (("recommend", "Qwen/Qwen3-8B", "--gpu", "L4", "--emit", ""), "names no kind", "compose"),
        (("recommend", "Qwen/Qwen3-8B", "--gpu", "L4", "--emit", "command", "--force"), "--force replaces", "-o DIR"),
        (("recommend", "Qwen/Qwen3-8B", "--gpu", "L4", "--output-tokens", "0"), "--output-tokens: 0 tokens", "at least 1"),
        (("recommend", "Qwen/Qwen3-8B", "--gpu", "L4", "--emit", "all"), "do not fit on stdout", "-o DIR"),
        (("recommend", "Qwen/Qwen3-8B", "--gpu", "L4", "-o", "x"), "-o is where", "--emit"),
        (("recommend", "Qwen/Qwen3-8B", "--gpu", "L4", "--engine", "ideal"), "no server", "vllm"),
        (("recommend", "Qwen/Qwen3-8B", "--gpu", "L4", "--price", "free"), "", ""),
        (("recommend", "--what-if", "one.json"), "compares two plans", "--what-if"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(kvctl: Run, argv: tuple[str, ...], says: str, hint: str) -> None:
    outcome = kvctl(*argv)
    assert outcome.code == 2, outcome.err
    lines = outcome.err.strip().splitlines()
    assert len(lines) <= 3
    assert says in outcome.err
    assert hint in outcome.err
    assert "Traceback" not in outcome.err
    assert not outcome.out


def test_a_damaged_plan_is_refused(kvctl: Run, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    for text in ("", "{", "[]", '{"schema": "kvctl.size/1"}', '{"schema": "kvctl.recommend/1", "answers": [{}]}'):
        bad.write_text(text)
        outcome = kvctl("recommend", "--what-if", str(bad), "--what-if", str(bad))
        assert outcome.code in (1, 2)
        assert "Traceback" not in outcome.err
        assert "internal" not in outcome.err


def test_a_plan_that_is_not_there(kvctl: Run, tmp_path: Path) -> None:
    """No model is meant: the hint is how a plan is saved."""
    gone = str(tmp_path / "d1.json")
    for argv in (
        ("recommend", "--what-if", gone, "--what-if", gone),
        ("serve-test", "http://127.0.0.1:9", "--plan", f"{gone}#2"),
    ):
        outcome = kvctl(*argv)
        assert outcome.code == 1
        assert f"a plan is looked for, and there is no file {gone}\n" in outcome.err
        assert "--json > plan.json" in outcome.err
        assert "org/name" not in outcome.err


def test_a_plan_of_a_request_that_nothing_met(kvctl: Run, tmp_path: Path) -> None:
    """DeepSeek-V3's 700 GB are not in 24 GB."""
    plan = tmp_path / "none.json"
    plan.write_text(kvctl("recommend", "deepseek-ai/DeepSeek-V3", "--gpu", "L4", "--json").out)
    for argv in (
        ("recommend", "--what-if", str(plan), "--what-if", str(plan)),
        ("serve-test", "http://127.0.0.1:9", "--plan", str(plan)),
    ):
        outcome = kvctl(*argv)
        assert outcome.code == 1
        assert "nothing met that request" in outcome.err


@pytest.mark.parametrize(
    "argv",
    [
        ("openai/gpt-oss-120b", "--gpu", "MI300X", "--ctx", "32k", "--concurrency", "64"),
        ("deepseek-ai/DeepSeek-R1", "--gpu", "8xH100", "--nodes", "2", "--ctx", "32k", "--concurrency", "64"),
        ("meta-llama/Llama-3.1-405B-Instruct", "--gpu", "4xH100", "--nodes", "3", "--ctx", "8k", "--concurrency", "4"),
        ("Qwen/Qwen3-8B", "--gpu", "H100", "--ctx", "8k", "--engine", "ollama"),
        ("Qwen/Qwen3-8B", "--gpu", "M3 Max", "--ctx", "8k"),
        ("Qwen/Qwen3-8B", "--gpu", "RX 7900 XTX", "--ctx", "8k"),
        ("Qwen/Qwen3-8B", "--gpu", "cpu:64GiB", "--ctx", "8k"),
    ],
)  # fmt: skip
def test_every_kind_of_hardware_and_engine_is_answered(kvctl: Run, argv: tuple[str, ...]) -> None:
    outcome = kvctl("recommend", *argv, "--json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    valid(document)
    assert document["answers"]
    assert all(answer["side"]["memory"].get("weights", 0) > 0 for answer in document["answers"])
    assert kvctl("recommend", *argv, "--explain").code == 0


@pytest.mark.parametrize(
    "given",
    [
        ("--served-name", "x\nExecStartPre=/bin/touch x"),
        ("--served-name", ""),
        ("--served-name", "-rf"),
        ("--served-name", "${HEAD_ADDRESS}"),
        ("--served-name", "$(LWS_LEADER_ADDRESS)"),
        ("--name", ""),
        ("--image", 'foo:bar"; evil'),
        ("--host", "a b;id"),
        ("--host", ""),
        ("--port", "0"),
    ],
)
def test_what_could_not_stand_in_a_file_is_refused(kvctl: Run, given: tuple[str, str]) -> None:
    outcome = kvctl(*BASE, "--engine", "vllm", f"{given[0]}={given[1]}", "--emit", "systemd")
    assert outcome.code == 2
    assert "hint:" in outcome.err
    assert not outcome.out


def test_addresses_stand_in_brackets_where_a_port_follows(kvctl: Run) -> None:
    def text(host: str, kind: str) -> str:
        return kvctl(*BASE, "--engine", "vllm", "--host", host, "--emit", kind).out

    assert "'[::1]:8000:8000'" in text("::1", "compose")
    assert "[::1]:8000" in text("::", "alerts")
    # One that listens everywhere is asked at the machine's own address.
    assert "http://127.0.0.1:8000" in text("0.0.0.0", "runbook")


def test_an_empty_model_is_no_model(kvctl: Run) -> None:
    outcome = kvctl("recommend", "", "--gpu", "H100")
    assert outcome.code == 2
    assert "neither a file here nor a name on the Hub" in outcome.err


def test_an_8_bit_cache_without_scales_is_said(kvctl: Run) -> None:
    text = kvctl(
        "recommend",
        "Llama-3.3-70B-Instruct",
        "--gpu",
        "2xH100",
        "--ctx",
        "16k",
        "--concurrency",
        "16",
        "--engine",
        "vllm",
    ).out
    assert "no scales for an fp8 cache" in text


# -- what is not known is no "no" -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("Kimi-K2-Thinking", "how its weights are stored is not in the source"),
        ("Kimi-K3", "compressed-tensors mxfp4-pack-quantized of 4 bits"),
        ("Mistral-Large-Instruct-2411", "intermediate_size is not in the source"),
        ("GLM-4.7-FP8", "the configuration is not the model's whole file"),  # and llama.cpp reads no FP8
        ("RWKV/rwkv-5-world-3b", "the parameters of rwkv5 are not known"),
    ],
)
def test_a_model_that_cannot_be_judged_is_an_error_that_says_what_is_missing(kvctl: Run, model: str, why: str) -> None:
    for gpu in ("8xH100", "MI300X"):  # TensorRT-LLM runs on the first alone, which says nothing of the model
        outcome = kvctl("recommend", model, "--gpu", gpu, "--ctx", "512", "--quiet")
        assert outcome.code == 1
        assert outcome.out == ""
        error, hint = outcome.err.splitlines()
        assert error.startswith("kvctl: error: ")
        assert why in error
        assert "config.json" in hint


@pytest.mark.parametrize(
    ("fact", "why"),
    [
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"quantization_config": 7}, "quantization_config is not an object"),
        ({"tie_word_embeddings": "maybe"}, "tie_word_embeddings is 'maybe'"),
    ],
)
def test_a_configuration_that_says_nonsense_is_an_error(
    kvctl: Run, tmp_path: Path, fact: dict[str, Any], why: str
) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
              "vocab_size": 128256, "intermediate_size": 14336, "torch_dtype": "bfloat16", "tie_word_embeddings": False}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | fact))
    outcome = kvctl("recommend", str(path), "--gpu", "H100", "--ctx", "2k", "--quiet")
    assert outcome.code == 1
    assert why in outcome.err


def test_a_matrix_says_what_is_not_known_and_goes_on(kvctl: Run) -> None:
    outcome = kvctl("recommend", "Kimi-K3", "Qwen3-8B", "--gpu", "H100", "--ctx", "512", "--quiet", "--format", "md")
    assert outcome.code == 0
    assert "not known: quantization_config: compressed-tensors mxfp4-pack-quantized" in outcome.out
    assert "nothing meets it" not in outcome.out


def test_what_does_not_fit_is_still_no_and_what_is_not_known_is_said_first(kvctl: Run) -> None:
    # 162 GB of weights on 80: vLLM knows that; how SGLang and TensorRT-LLM store such windows nobody here does.
    outcome = kvctl(
        "recommend", "DeepSeek-V4-Flash", "--gpu", "H100", "--ctx", "8k", "--engine", "vllm,sglang", "--explain"
    )
    assert outcome.code == 3
    lines = [line.strip() for line in outcome.out.splitlines()]
    first = lines.index("nothing here meets the request") + 1
    assert lines[first].startswith(("not known: ", "vllm"))
    known = [line.startswith("not known: ") for line in lines if line.startswith(("not known: ", "vllm, ", "sglang, "))]
    half = known[: len(known) // 2]
    assert half == sorted(half, reverse=True)
    asked = kvctl(
        "recommend", "Qwen3-8B", "--gpu", "H100", "--engine", "llama.cpp", "--weights-dtype", "nvfp4", "--ctx", "8k"
    )
    assert asked.code == 3  # a format that is not to be had is a no


@pytest.mark.parametrize(
    "argv",
    [
        (*BASE, "--explain"),
        ("recommend", "Qwen2.5-72B-Instruct", "--gpu", "RTX4090", "--concurrency", "4", "--ctx", "8k"),
        ("recommend", "SmolLM2-135M-Instruct", "--gpu", "cpu:8GiB", "--ctx", "2k", "--concurrency", "4"),
        ("recommend", "SmolLM2-135M-Instruct", "Qwen2.5-72B-Instruct", "--gpu", "RTX4090,cpu:8GiB,8xH100", "--ctx", "2k"),
        ("recommend", "--what-if", "one.json", "--what-if", "other.json"),
    ],
)  # fmt: skip
def test_no_line_is_wider_than_a_terminal(
    kvctl: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, argv: tuple[str, ...]
) -> None:
    from rich.cells import cell_len

    from kvctl.screen_lines import Screen

    monkeypatch.chdir(tmp_path)
    for name, gpu in (("one", "A100"), ("other", "2xL40S")):
        (tmp_path / f"{name}.json").write_text(
            kvctl("recommend", "Qwen3-32B", "--gpu", gpu, "--ctx", "8k", "--json").out
        )

    def terminal(self: Screen, start: Any = Screen.__init__) -> None:
        start(self)
        self.terminal = True

    monkeypatch.setattr(Screen, "__init__", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    lines = kvctl(*argv).out.splitlines()
    assert len(lines) > 5
    # What is typed stays whole; its options have a line each.
    assert not [
        line for line in lines if cell_len(line) > 80 and not line.endswith("\\") and not line.startswith("   #")
    ]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "a line is"),
        ("rubbish\n", "a line is"),
        ('{"timestamp": 0, "input_length": -1, "output_length": 2, "hash_ids": []}\n', "a line is"),
        ('{"messages": [{"role": "user", "content": "hi"}]}\n', "--tokenizer FILE"),
        ('{"timestamp": 5, "input_length": 9, "output_length": 2, "hash_ids": [1]}\n'
         '{"timestamp": 1, "input_length": 9, "output_length": 2, "hash_ids": [1]}\n', "sort the trace"),
    ],
)  # fmt: skip
def test_a_trace_that_cannot_be_read_says_what_one_is(kvctl: Run, tmp_path: Path, text: str, hint: str) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    outcome = kvctl(*BASE[:-2], "--trace", str(tmp_path / "trace.jsonl"))
    assert outcome.code == 1
    assert f"hint: {hint}" in outcome.err


@pytest.mark.parametrize("what", ["empty", "folder", "list"])
def test_what_is_no_plan_has_a_hint_about_plans(kvctl: Run, tmp_path: Path, what: str) -> None:
    place = tmp_path / what
    place.mkdir() if what == "folder" else place.write_text("[]" if what == "list" else "")
    outcome = kvctl(*BASE, "--what-if", str(place))
    assert outcome.code == 1
    assert "hint: kvctl recommend MODEL … --json > plan.json saves one" in outcome.err


@pytest.mark.parametrize(
    "given", ["hidden_size=-1", "num_hidden_layers=-3", "vocab_size=-2", "vocab_size=x", "num_attention_heads=0"]
)
def test_a_configuration_that_cannot_be_says_where_to_correct_it(kvctl: Run, given: str) -> None:
    outcome = kvctl(*BASE, "--set", given)
    assert outcome.code == 1
    assert given.partition("=")[0] in outcome.err
    assert "hint: --set gave that value" in outcome.err
