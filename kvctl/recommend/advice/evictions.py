"""Advice on caches that let tokens go: which engines have them at all, and what they lost where they were measured.

Read for it: vLLM 0.32 (config/cache.py, v1/core: tokens leave a request's cache only behind windows that a model was trained
with); SGLang 0.5.23 (arg_groups/hisparse_hook.py: HiSparse moves pages of models with sparse attention to the host, and
lets none go); llama-server b11434 (--context-shift, --keep); TensorRT-LLM 1.2 (features/sparse-attention: RocketKV alone);
NVIDIA's kvpress 0.5 for transformers (presses/).
"""

from __future__ import annotations

from kvctl.recommend.advice.case import DEPENDS, NO, Advice, Case, judged, loss_words
from kvctl.recommend.quality import figures
from kvctl.record import Record


class Eviction(Record):
    """One technique."""

    title: str
    measured: str
    """Its name in kvctl profile --technique, with the budget that was measured; empty where there is none."""
    paper: str
    flags: dict[str, str]
    """How engines that have it, or what comes nearest, are told."""


TABLE = (
    Eviction("StreamingLLM", "streaming-llm:0.5", "arXiv 2309.17453",
             {"llama.cpp": "--context-shift --keep 4: half of what lies between is dropped at once when a slot is full",
              "transformers": "kvpress: StreamingLLMPress"}),
    Eviction("H2O", "h2o:0.5", "arXiv 2306.14048", {"transformers": "kvpress: ObservedAttentionPress, with eager attention"}),
    Eviction("ScissorHands", "scissorhands:384", "arXiv 2305.17118", {}),
    Eviction("SnapKV", "snapkv:0.25", "arXiv 2404.14469",
             {"transformers": "kvpress: SnapKVPress",
              "tensorrt-llm": "sparse_attention_config: algorithm: rocket (RocketKV drops of the prompt as SnapKV does)"}),
    Eviction("PyramidKV", "pyramidkv:0.25", "arXiv 2406.02069", {"transformers": "kvpress: PyramidKVPress"}),
    Eviction("TOVA", "tova:0.5", "arXiv 2401.06104", {"transformers": "kvpress: TOVAPress"}),
    Eviction("ExpectedAttention", "expected-attention:0.5", "arXiv 2510.00636", {"transformers": "kvpress: ExpectedAttentionPress"}),
)  # fmt: skip
_READ = {"vllm": "vLLM 0.32", "sglang": "SGLang 0.5.23", "llama.cpp": "llama-server b11434", "tensorrt-llm": "TensorRT-LLM 1.2",
         "transformers": "kvpress 0.5", "ollama": "Ollama"}  # fmt: skip


def evictions(case: Case) -> list[Advice]:
    """Each of them: no where the engine has nothing of the kind, or where the pool is not short; where it is, the verdict of
    the loss, if it was measured on this model, and else depends: small models' figures say little of large ones."""
    return [_one(case, row) for row in TABLE]


def _one(case: Case, row: Eviction) -> Advice:
    how = row.flags.get(case.engine)
    source = f"{row.paper}; docs/techniques.md"
    if how is None:
        return Advice(row.title, NO, f"{_READ.get(case.engine, case.engine)} has none of it{_seen(row)}", None, source)
    if not case.short:
        capacity = (
            "of a size that is not known" if case.numbers.capacity is None else f"{case.numbers.capacity:,} tokens"
        )
        because = f"the pool ({capacity}) {'is not known to be short of' if case.numbers.capacity is None else 'holds the'} {case.needed:,} tokens, and every token that goes is lost{_seen(row)}"
        return Advice(row.title, NO, because, None, source)
    loss = case.quality.technique(row.measured)
    words = f"the pool is {case.short:,} tokens short of {case.needed:,}"
    if not loss.measured:
        return Advice(
            row.title, DEPENDS, f"{words}, and what {case.spec.id} loses is not measured{_seen(row)}", how, source
        )
    return Advice(row.title, judged(loss, case.max_loss), f"{words}; {loss_words(loss)}", how, loss.source)


def _seen(row: Eviction) -> str:
    """What it lost where kvctl measured it."""
    found = next((one for one in figures("techniques") if row.measured in one.formats), None)
    if found is None:
        return ""
    return (
        f"; at {found.smaller:.3g} times smaller it cost {found.model} {found.percent:.2g}% of perplexity and "
        f"{10 - (found.keys or 0)} of 10 keys in a text"
    )
