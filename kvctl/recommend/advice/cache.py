"""Advice on the cache: blocks, prefixes that are found again, and smaller formats."""

from __future__ import annotations

from kvctl.recommend.advice.case import (
    DEPENDS,
    GAIN,
    NO,
    YES,
    Advice,
    Case,
    KvChoice,
    judged,
    loss_words,
    seconds,
    size,
)
from kvctl.spec import ConvState, RecurrentState

WASTE = 0.04
"""Share of a sequence that half a block may be: less than 4% is what PagedAttention's paper calls near-optimal."""
FOUND = 0.01
"""Share of prompt tokens found again from which a prefix cache is worth its states."""
_BLOCK = {"vllm": 16, "sglang": 1, "tensorrt-llm": 32, "transformers": 256}
"""Tokens of a block where none is set: engine rules of each (kvctl.engines)."""
_BLOCK_FLAG = {"vllm": "--block-size", "sglang": "--page-size", "tensorrt-llm": "tokens_per_block", "transformers": "--cb-block-size"}  # fmt: skip
_PREFIX = {
    "vllm": "--enable-prefix-caching", "sglang": "leave --disable-radix-cache out", "llama.cpp": "--cache-prompt and --cache-ram",
    "ollama": None, "tensorrt-llm": "enable_block_reuse: true", "transformers": None,
}  # fmt: skip
_PREFIX_OFF = {"vllm": "--no-enable-prefix-caching", "sglang": "--disable-radix-cache", "llama.cpp": "--cache-ram 0",
               "tensorrt-llm": "enable_block_reuse: false"}  # fmt: skip
FAMILIES = (
    ("INT8 KV cache", ("int8_per_token_head", "int8", "q8_0")),
    ("FP8 KV cache", ("fp8", "fp8_e4m3", "fp8_per_token_head", "fp8_ds_mla", "mxfp8", "fp8_e5m2")),
    ("INT4 KV cache", ("int4_per_token_head", "turboquant_4bit_nc", "int4", "q4_0")),
    ("NVFP4 KV cache", ("nvfp4", "nvfp4_ds_mla", "fp4_e2m1")),
)
"""Techniques, and the words of engines for them, the one that is tried first before others."""


def paging(case: Case) -> list[Advice]:
    """Paged attention and its block: half a block of the last one stays empty in each sequence.

    yes: the engine has blocks, and half of one is at most `WASTE` of a request; depends: it is more, and a smaller block would
    help; no: the engine reserves cells for slots (llama.cpp, Ollama), and a whole length is taken for each.
    """
    technique, source = "paged attention and block size", "arXiv 2309.06180"
    work, context = case.work, case.deployment.context
    if case.engine not in _BLOCK:
        share = min(work.length, context) / context
        because = (
            f"{case.engine} has no blocks: slots of {context:,} tokens are reserved whole, of which a request of "
            f"{work.length:,} uses {share:.0%}"
        )
        how = "-kvu shares the cells of all slots" if case.engine == "llama.cpp" else None
        return [Advice(technique, NO, because, how, source)]
    block = case.deployment.serving.block_size or _BLOCK[case.engine]
    waste = (block - 1) / 2
    share = waste / work.length
    lost = round(waste * case.numbers.token_bytes * work.concurrency)
    words = (
        f"blocks of {block:,} leave {waste:g} tokens empty in a request of {work.length:,} on average ({share:.2%}), "
        f"{size(lost)} {case.each} for {work.concurrency:,} of them"
    )
    if share <= WASTE:
        return [Advice(technique, YES, words, None, source)]
    return [Advice(technique, DEPENDS, words, f"a smaller block: {_BLOCK_FLAG[case.engine]}", source)]


def prefix(case: Case) -> list[Advice]:
    """Prefix caching: yes from `FOUND` of the prompt tokens on, no below it, depends where nothing says how much is found.

    A replayed trace says it best, a stated shared beginning second.
    """
    technique = "prefix or radix caching"
    source = "arXiv 2312.07104 (RadixAttention), docs/techniques.md (50% found: TTFT × 0.52)"
    found, work = case.work.found, case.work
    how, off = _PREFIX.get(case.engine), _PREFIX_OFF.get(case.engine)
    states = " and recurrent layers keep states beside it" if case.spec.keeps(RecurrentState, ConvState) else ""
    if found is None:
        because = f"how much of {work.prompt:,} prompt tokens comes again is not known{states}"
        return [Advice(technique, DEPENDS, because, "--trace FILE or --shared-prefix N tells", source)]
    where = "the trace finds" if work.hit_rate is not None else "requests share"
    saved = round(found * work.prompt)
    words = f"{where} {found:.1%} of the prompt tokens, {saved:,} of {work.prompt:,}"
    if found < FOUND:
        return [Advice(technique, NO, f"{words}: nothing to gain{states}", off if states else None, source)]
    rate = case.numbers.prefill_rate
    if rate is not None and rate.mid > 0:
        words += f", and TTFT is {seconds(saved / rate.mid)} shorter"
    return [Advice(technique, YES, words + (f";{states}" if states else ""), how, source)]


def formats(case: Case) -> list[Advice]:
    """INT8, FP8, INT4 and NVFP4 of keys and values.

    no: the engine has no such format on this GPU, or a better one of as many bits (`kv_choices` lacks it); or it would not save `GAIN` of
    the bytes; or neither the pool is short nor does the cache bind a step; or the likeliest
    loss is over the limit. depends: the loss is not known, or may be over the limit. yes: all else, and what is in use.
    """
    out = []
    source = "kvctl/data/quality.json"
    choices = {choice.name: choice for choice in case.numbers.kv_choices}
    binds = _binds(case)
    for technique, names in FAMILIES:
        in_use = case.deployment.kv_dtype.lower()
        choice = next((choices[name] for name in names if name in choices), None)
        if in_use in names:
            loss = case.quality.cache(in_use)
            out.append(Advice(technique, YES, f"{in_use} is in use: {loss_words(loss)}", None, loss.source))
        elif choice is None:
            gpu = case.deployment.device.name
            out.append(
                Advice(
                    technique,
                    NO,
                    f"{case.engine} on {gpu} has none of {', '.join(names)}, or a better format of as many bits",
                    None,
                    source,
                )
            )
        elif (gain := _times(case, choice)) is not None and gain < 1 / (1 - GAIN):
            little = (
                f"{choice.name} would hold {gain:.3g} times as many tokens as {in_use}, which is not worth a change"
            )
            out.append(Advice(technique, NO, little, None, source))
        elif binds is None:
            capacity = case.numbers.capacity
            holds = f"the cache holds {capacity:,} tokens, {case.needed:,} are needed" if capacity is not None else f"{case.needed:,} tokens are needed"  # fmt: skip
            what = case.numbers.decode_bound or "nothing known"
            out.append(
                Advice(technique, NO, f"the cache does not bind: {holds}, and a step is bound by {what}", None, source)
            )
        else:
            loss = case.quality.cache(choice.name)
            words = f"{binds}; {choice.name} holds {_gain(case, choice)}, and {loss_words(loss)}"
            if case.max_loss is not None:
                words += f"; {case.max_loss:g}% are allowed"
            out.append(Advice(technique, judged(loss, case.max_loss), words, choice.how, loss.source))
    return out


def _binds(case: Case) -> str | None:
    """Why a smaller cache would help; None where it would not."""
    if case.short:
        return f"the pool holds {case.numbers.capacity:,} of {case.needed:,} tokens"
    return "reading the cache binds a step" if case.numbers.decode_bound == "cache" else None


def _times(case: Case, choice: KvChoice) -> float | None:
    """Tokens that the cache would hold, in times of those that it holds; None where that is not known."""
    if choice.capacity is not None and case.numbers.capacity:
        return choice.capacity / case.numbers.capacity
    return None if choice.token_bytes is None else case.numbers.token_bytes / choice.token_bytes


def _gain(case: Case, choice: KvChoice) -> str:
    times = _times(case, choice)
    if times is None:
        return "more"
    return (
        f"{times:.3g} times as many tokens"
        if choice.capacity is None
        else f"{choice.capacity:,} tokens ({times:.3g} times)"
    )
