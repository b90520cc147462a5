"""What holds of every answer of `--gpu`, on random models, engines, cards and workloads."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest
from conftest import Outcome
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvctl.allocation import Serving
from kvctl.engines import engine
from kvctl.errors import KvctlError
from kvctl.hardware import read_gpus
from kvctl.model import build_spec
from kvctl.ranks import Hardware
from kvctl.reports import Fit, SizeResult
from kvctl.size import SizePlan, answer, prepare
from kvctl.solve import NoAnswer, solve
from kvctl.sources import catalogue
from kvctl.spec import ModelSpec

Run = Callable[..., Outcome]
PLAIN = Serving()

MODELS = ("Qwen3-8B", "Llama-3.1-70B", "gemma-3-27b-it", "gpt-oss-20b", "DeepSeek-V3", "Qwen3-Next-80B-A3B-Instruct",
          "Llama-4-Scout-17B-16E-Instruct", "whisper-large-v3")  # fmt: skip
ENGINES = ["ideal", "vllm", "vllm@0.11", "sglang", "tensorrt-llm", "transformers", "llama.cpp", "ollama"]

names = st.sampled_from(MODELS)
engines = st.sampled_from(ENGINES)
contexts = st.one_of(st.integers(1, 300_000), st.sampled_from([1, 16, 1024, 4096, 32_768, 131_072]))
requests = st.one_of(st.just(1), st.integers(1, 300))
gibs = st.integers(8, 300)
cards = st.sampled_from(["H100", "A100-80GB", "RTX 4090", "L4", "H200", "T4"])
counts = st.sampled_from([1, 1, 2, 4, 8])

often = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])


@cache
def spec_of(name: str) -> ModelSpec:
    return build_spec(catalogue.find(name))


def plan_of(
    name: str, context: int, sequences: int, gpu: str, serving: Serving = PLAIN, what: str | None = None
) -> SizePlan:
    return SizePlan(engine(name), (context,), sequences=sequences, serving=serving,
                    hardware=Hardware(read_gpus(gpu), gpu, solve=what))  # fmt: skip


def ask(model: str, plan: SizePlan, context: int) -> SizeResult:
    """The answer; engines that do not serve such a model or split are left out."""
    try:
        return answer(prepare(spec_of(model), plan), context)
    except KvctlError:
        assume(False)
        raise


def fit_of(model: str, plan: SizePlan, context: int) -> Fit:
    found = ask(model, plan, context).fit
    assert found is not None
    return found


def fits(model: str, plan: SizePlan, context: int) -> bool:
    """Whether the engine takes it, does not make it shorter, and it fits."""
    try:
        result = answer(prepare(spec_of(model), plan), context)
    except KvctlError:
        return False
    whole = result.allocation is None or result.allocation.longest_sequence >= context
    return result.fit is not None and result.fit.fits and whole


@st.composite
def servings(draw: st.DrawFn, name: str) -> Serving:
    """Options of the engine's own that fits turn on."""
    serving = Serving()
    if name == "transformers":
        serving = serving.replace(cache_implementation=draw(st.sampled_from([None, "static", "paged"])))
    return serving


@often
@given(names, engines, st.data(), cards, counts, contexts, requests)
def test_the_parts_sum_to_the_device(
    model: str, name: str, data: st.DataObject, card: str, count: int, context: int, sequences: int
) -> None:
    serving = data.draw(servings(name))
    result = ask(model, plan_of(name, context, sequences, f"{count}x{card}", serving), context)
    fit = result.fit
    assert fit is not None
    if result.allocation is not None:
        context = min(context, result.allocation.longest_sequence)  # Ollama lowers it to the model's own maximum
    assert fit.device_bytes == fit.weights_bytes + fit.kv_bytes + fit.overhead_bytes + fit.headroom_bytes
    assert fit.overhead_bytes == sum(part.bytes for part in fit.parts)
    assert fit.fits == (not fit.why)
    if fit.fits:
        assert fit.headroom_bytes >= 0
        assert fit.max_context is None or fit.max_context >= context
        assert fit.max_concurrency >= sequences
        assert all(rank.headroom_bytes >= 0 for rank in fit.ranks)
    else:
        assert fit.max_context is not None
        assert fit.max_context < context
        assert fit.max_concurrency < sequences


# What engines choose for cards of a size, and what makes more memory hold less: larger batches from 70 GiB on (vLLM),
# a larger reserve by steps (SGLang). Named, they are the same on every card.
STEADY = {
    "vllm": Serving(max_batched=4096, max_sequences=256),
    "vllm@0.11": Serving(max_batched=4096, max_sequences=256),
    "sglang": Serving(utilization=0.8),
}


@often
@given(names, engines, st.data(), gibs, gibs, contexts, requests)
def test_more_memory_never_fits_less(
    model: str, name: str, data: st.DataObject, one: int, other: int, context: int, sequences: int
) -> None:
    serving = STEADY.get(name) or data.draw(servings(name))
    less, more = (
        fit_of(model, plan_of(name, context, sequences, f"H100:{size}GiB", serving), context)
        for size in sorted((one, other))
    )
    assert more.fits or not less.fits
    assert more.headroom_bytes >= less.headroom_bytes
    assert more.max_concurrency >= less.max_concurrency
    if more.max_context is not None:
        assert less.max_context is not None
        assert more.max_context >= less.max_context


@pytest.mark.parametrize(("name", "below"), [("vllm", 70), ("sglang", 60)])
def test_steps_in_an_engines_own_defaults_are_the_exception(name: str, below: int) -> None:
    # From 70 GiB on vLLM runs batches of 8,192 tokens and 1,024 requests, not 2,048 and 256; above 60 GiB SGLang
    # prefills 8,192 tokens at once, not 4,096, and keeps 10 GiB at least: a GiB more holds less, unless options say it.
    def longest(serving: Serving) -> list[int]:
        found = [fit_of("Qwen3-8B", plan_of(name, 4096, 1, f"H100:{size}GiB", serving), 4096).max_context
                 for size in (below, below + 1)]  # fmt: skip
        return [tokens or 0 for tokens in found]

    less, more = longest(Serving())
    assert more < less
    less, more = longest(STEADY[name])
    assert more > less


@often
@given(names, engines, st.data(), cards, counts, contexts, requests)
def test_the_context_that_is_solved_for_fits_and_one_token_more_does_not(
    model: str, name: str, data: st.DataObject, card: str, count: int, context: int, sequences: int
) -> None:
    plan = plan_of(name, context, sequences, f"{count}x{card}", data.draw(servings(name)), "ctx")
    found = ask(model, plan, context)
    assert found.fit is not None
    try:
        solved = solve(spec_of(model), plan, "ctx")
    except NoAnswer:
        assert not any(fits(model, plan, tokens) for tokens in (1, 16, 4096))
        return
    assert solved.contexts is not None
    (longest,) = solved.contexts
    assert fits(model, solved, longest)
    if found.fit.max_context is not None:
        block = found.allocation.block_size or 1 if found.allocation is not None else 1
        assert not fits(model, solved, longest + 1)
        assert not fits(model, solved, longest + block)


@often
@given(names, st.sampled_from([name for name in ENGINES if not engine(name).slots]), st.data(), cards, counts, contexts)
def test_the_concurrency_that_is_solved_for_fits_and_one_request_more_does_not(
    model: str, name: str, data: st.DataObject, card: str, count: int, context: int
) -> None:
    plan = plan_of(name, context, 1, f"{count}x{card}", data.draw(servings(name)), "concurrency")
    ask(model, plan, context)
    try:
        solved = solve(spec_of(model), plan, "concurrency")
    except NoAnswer:
        assert not fits(model, plan, context)
        return
    assert fits(model, solved, context)
    assert not fits(model, solved.replace(sequences=solved.sequences + 1), context)


@settings(parent=often, max_examples=25)
@given(names, engines, cards, contexts, st.integers(1, 40), st.sampled_from(["gpus", "tp"]))
def test_the_number_of_gpus_that_is_solved_for_fits_and_no_smaller_one_does(
    model: str, name: str, card: str, context: int, sequences: int, what: str
) -> None:
    assume(what == "gpus" or engine(name).splits)
    if name == "ollama":
        context = min(context, spec_of(model).max_context or context)  # it lowers others to that
    plan = plan_of(name, context, sequences, card, what=what)

    def on(count: int) -> SizePlan:
        split = Serving(tensor_parallel=count) if what == "tp" else Serving()
        return plan_of(name, context, sequences, f"{count}x{card}", split)

    try:
        solved = solve(spec_of(model), plan, what)
    except KvctlError:  # none fits, or the engine takes no number of them
        assert not any(fits(model, on(count), context) for count in (1, 8, 16))
        return
    assert solved.hardware is not None
    count = len(solved.hardware.devices)
    assert fits(model, solved, context)
    assert fits(model, on(count), context)
    assert not any(fits(model, on(fewer), context) for fewer in range(1, count))


UNITS = {"B": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def about(words: str) -> tuple[float, float]:
    """The least and the most bytes that a rounded "13.45 GiB" stands for; its minus may be typographic."""
    number, unit = words.replace("−", "-").split()
    digits = number.replace(",", "")
    half = 0.51 * 10.0 ** -len(digits.partition(".")[2]) * UNITS[unit]
    return float(digits) * UNITS[unit] - half, float(digits) * UNITS[unit] + half


def same(words: str, bytes_: int) -> bool:
    low, high = about(words)
    return low <= bytes_ <= high


SIZE = r"(−?-?[\d,.]+ (?:bytes|[KMGT]iB|B))"


@pytest.mark.parametrize("options", [
    ("Qwen3-8B", "--gpu", "H100", "--engine", "vllm", "--ctx", "32k", "-n", "4"),
    ("Qwen3-8B", "--gpu", "H100", "--ctx", "32k"),
    ("Llama-3.1-70B", "--gpu", "4xH100", "--engine", "vllm", "--ctx", "128k"),
    ("Llama-3.1-70B", "--gpu", "2xL4", "--engine", "vllm", "--ctx", "4k"),
    ("gemma-3-27b-it", "--gpu", "A100:80GiB", "--engine", "sglang", "--ctx", "8k"),
    ("Qwen3-Next-80B-A3B-Instruct", "--gpu", "4xH100", "--engine", "tensorrt-llm", "--ctx", "4k"),
    ("DeepSeek-V3", "--gpu", "8xH100", "--engine", "vllm", "--ctx", "32k"),
    ("gpt-oss-20b", "--gpu", "RTX 4090", "--engine", "transformers", "--ctx", "16k", "-n", "3"),
    ("gpt-oss-20b", "--gpu", "H100", "--engine", "vllm", "--ctx", "128k", "--kv-budget", "1GiB"),
], ids=" ".join)  # fmt: skip
def test_the_table_says_what_the_json_says(
    kvctl: Run, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    table = kvctl("size", *options).out
    fit = kvctl("size", *options, "--json").json["results"][0]["fit"]
    assert ("\nfits" in table) == fit["fits"]
    assert ("\ndoes not fit" in table) == (not fit["fits"])
    if not fit["fits"]:
        assert fit["why"] in table
    rows = {"weights": fit["weights_bytes"], "KV cache": fit["kv_bytes"]}
    left = fit["headroom_bytes"]
    rows["headroom" if left >= 0 else "missing"] = abs(left)
    rows |= {part["name"]: part["bytes"] for part in fit["parts"]}
    listed = dict(re.findall(rf"^\S (\S.*?) +{SIZE} +<?[\d.,]+%", table, re.MULTILINE))
    assert listed.keys() == rows.keys()
    for name, bytes_ in rows.items():
        assert same(listed[name], bytes_), (name, listed[name], bytes_)
    device = re.search(rf": {SIZE} for applications", table)
    assert device
    assert same(device[1], fit["device_bytes"])
    longest = re.search(r"^longest context +([\d,]+|none|any)", table, re.MULTILINE)
    said = {None: "any", 0: "none"}.get(fit["max_context"], f"{fit['max_context'] or 0:,}")
    assert longest
    assert longest[1] == said
    requests_ = re.search(r"^requests at once +([\d,]+) of", table, re.MULTILINE)
    assert requests_
    assert requests_[1] == f"{fit['max_concurrency']:,}"
    for words in fit["advice"]:
        assert words in table


def test_recurrent_states_beside_the_pool_come_off_its_memory() -> None:
    # TensorRT-LLM allocates states for a whole batch before it measures, and gives the pool 0.9 of what is then left:
    # 36 layers · (2,048 channels · 3 + 8 heads · 128 · 128) · 2 B for each of 2,048 sequences on one of 4 ranks.
    fit = fit_of("Qwen3-Next-80B-A3B-Instruct",
                 plan_of("tensorrt-llm", 4096, 1, "4xH100"), 4096)  # fmt: skip
    parts = {part.name: part.bytes for part in fit.parts}
    assert parts["recurrent states"] == 2_048 * 36 * (2_048 * 3 + 8 * 128 * 128) * 2
    left = fit.device_bytes - fit.weights_bytes - sum(parts.values()) + parts["left free"]
    assert fit.kv_budget_bytes == int(left * 0.9)
    # 12 layers · 1 head · 2 · 256 · 2 B for each token of the request, which are all that the pool holds of it
    assert fit.kv_bytes == 12 * 512 * 2 * 4096
    # On two they alone are more than the weights leave.
    assert not fit_of("Qwen3-Next-80B-A3B-Instruct", plan_of("tensorrt-llm", 1, 1, "2xH100"), 1).fits
