"""What holds of every answer of `--gpu`, on random models, engines, cards and workloads."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from conftest import Outcome
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvctl.allocation import Serving
from kvctl.engines import engine
from kvctl.errors import KvctlError
from kvctl.fit import Hardware
from kvctl.hardware import read_gpus
from kvctl.model import build_spec
from kvctl.reports import Fit, SizeResult
from kvctl.size import SizePlan, answer, prepare
from kvctl.solve import NoAnswer, solve
from kvctl.sources import catalogue
from kvctl.spec import ModelSpec

Run = Callable[..., Outcome]

MODELS = ("Qwen3-8B", "Llama-3.1-70B", "gemma-3-27b-it", "gpt-oss-20b", "DeepSeek-V3", "Qwen3-Next-80B-A3B-Instruct",
          "Llama-4-Scout-17B-16E-Instruct", "whisper-large-v3")  # fmt: skip
ENGINES = ["ideal", "vllm", "vllm@0.11", "sglang", "tensorrt-llm", "transformers"]
try:
    import kvctl.engines.llama_cpp.memory
except ModuleNotFoundError:
    pass
else:
    ENGINES += ["llama.cpp", "ollama"]

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
    name: str, context: int, sequences: int, gpu: str, serving: Serving = Serving(), what: str | None = None
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
    """Whether the engine takes it and it fits."""
    try:
        found = answer(prepare(spec_of(model), plan), context).fit
    except KvctlError:
        return False
    return found is not None and found.fits


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
    fit = fit_of(model, plan_of(name, context, sequences, f"{count}x{card}", serving), context)
    assert fit.device_bytes == fit.weights_bytes + fit.kv_bytes + fit.overhead_bytes + fit.headroom_bytes
    assert fit.overhead_bytes == sum(part.bytes for part in fit.parts)
    assert fit.fits == (not fit.why)
    if fit.fits:
        assert fit.headroom_bytes >= 0
        assert fit.max_context is None or fit.max_context >= context
        assert fit.max_concurrency >= sequences
        assert all(rank.headroom_bytes >= 0 for rank in fit.ranks)
    else:
        assert fit.max_context is not None and fit.max_context < context
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


@settings(parent=often, max_examples=60)
@given(names, engines, cards, contexts, st.integers(1, 40), st.sampled_from(["gpus", "tp"]))
def test_the_number_of_gpus_that_is_solved_for_fits_and_no_smaller_one_does(
    model: str, name: str, card: str, context: int, sequences: int, what: str
) -> None:
    assume(what == "gpus" or engine(name).splits)
    plan = plan_of(name, context, sequences, card, what=what)

    def on(count: int) -> SizePlan:
        split = Serving(tensor_parallel=count) if what == "tp" else Serving()
        return plan_of(name, context, sequences, f"{count}x{card}", split)

    try:
        solved = solve(spec_of(model), plan, what)
    except NoAnswer:
        assert not any(fits(model, on(count), context) for count in (1, 8, 16))
        return
    assert solved.hardware is not None
    count = len(solved.hardware.devices)
    assert fits(model, solved, context)
    assert fits(model, on(count), context)
    assert not any(fits(model, on(fewer), context) for fewer in range(1, count))
