"""Advice on how steps are made: attention kernels, CUDA graphs, batches, chunks of prompts, and prefill on servers of its own."""

from __future__ import annotations

from kvctl.recommend.advice.case import DEPENDS, NO, YES, Advice, Case, seconds, size
from kvctl.recommend.takes import capability
from kvctl.units import format_rate

_CHUNKED = {"vllm": "--enable-chunked-prefill --max-num-batched-tokens N", "sglang": "--chunked-prefill-size N",
            "tensorrt-llm": "enable_chunked_prefill: true", "llama.cpp": "-b N -ub N", "transformers": "--cb-max-batch-tokens N"}  # fmt: skip
_USUAL_CHUNK = {
    "vllm": 8192,
    "sglang": 8192,
    "tensorrt-llm": 8192,
    "llama.cpp": 2048,
    "ollama": 512,
    "transformers": 8192,
}
"""Tokens of a step that the engines take of their own accord on a large GPU (kvctl.engines)."""
_DISAGGREGATED = {"vllm": "--kv-transfer-config (NixlConnector) on both, and a router", "sglang": "--disaggregation-mode prefill and decode",
                  "tensorrt-llm": "trtllm-serve disaggregated"}  # fmt: skip
FLASH = 8.0
"""Least compute capability of FlashAttention 2 and of vLLM's backend for it (v1/attention/backends/flash_attn.py)."""


def flash(case: Case) -> list[Advice]:
    """FlashAttention: yes from compute capability 8.0 on, and on other makers' GPUs and Macs (their kernels do the same);
    depends below and on hosts, where engines have other kernels (llama.cpp has it there too)."""
    technique, source = "FlashAttention", "arXiv 2205.14135"
    device, prompt = case.deployment.device, case.work.prompt
    heads = case.spec.attention_heads
    scores = (
        f": the scores of {prompt:,} tokens would take {size(2 * heads * prompt * prompt)} in each layer"
        if heads
        else ""
    )
    has = capability(device)
    how = "-fa on (a packed V cache needs it)" if case.engine == "llama.cpp" else None
    if device.kind != "gpu" and case.engine != "llama.cpp":
        return [Advice(technique, DEPENDS, f"{case.engine} has kernels of its own for a host{scores}", None, source)]
    if has is not None and has < FLASH:
        because = f"{device.name} has compute capability {has:g}, and {FLASH:g} is needed{scores}; engines take other kernels there"
        return [Advice(technique, DEPENDS, because, how, source)]
    return [Advice(technique, YES, f"no matrix of scores is kept{scores}", how, source)]


def graphs(case: Case) -> list[Advice]:
    """CUDA graphs: no on hosts, and where the pool is short and their memory would make it long enough; depends where what they
    take is not known; yes otherwise, and in llama.cpp, which captures them as it runs (GGML_CUDA_GRAPHS is on by default)."""
    technique, source = "CUDA graphs", "https://docs.vllm.ai (CUDA graphs)"
    if case.deployment.device.kind != "gpu":
        return [Advice(technique, NO, f"{case.deployment.device.name} has none", None, source)]
    if case.engine in ("llama.cpp", "ollama"):
        return [
            Advice(
                technique, YES, f"{case.engine} captures them as it runs, and reserves nothing for them", None, source
            )
        ]
    taken = case.numbers.graph_bytes
    if taken is None:
        return [Advice(technique, DEPENDS, "what they take is not known", None, source)]
    tokens = taken // max(1, case.numbers.token_bytes)
    saved = _saved(case)
    words = f"they take {size(taken)} {case.each}, {tokens:,} tokens of the cache{saved}"
    short = case.short
    if short and tokens >= short:
        off = {"vllm": "--enforce-eager, or fewer --cudagraph-capture-sizes", "sglang": "--disable-decode-cuda-graph, or a lower --cuda-graph-max-bs-decode"}  # fmt: skip
        return [Advice(technique, NO, f"{words}, and the pool is {short:,} tokens short", off.get(case.engine), source)]
    if case.deployment.serving.enforce_eager:
        return [Advice(technique, YES, f"they are off: {words}", "leave --enforce-eager out", source)]
    return [Advice(technique, YES, words, None, source)]


def _saved(case: Case) -> str:
    with_graphs, without = case.numbers.tpot, case.numbers.eager_tpot
    if with_graphs is None or without is None:
        return ""
    return f", and save {seconds(max(0.0, without.mid - with_graphs.mid))} of a step of {seconds(without.mid)}"


def batching(case: Case) -> list[Advice]:
    """Continuous batching: yes from two requests at once on, no with one, which has nothing to be batched with."""
    technique, source, count = "continuous batching", "Orca, OSDI 2022", case.work.concurrency
    if count < 2:
        return [Advice(technique, NO, "one request at a time has nothing to be batched with", None, source)]
    tpot = case.numbers.tpot
    rate = f": {format_rate(count / tpot.mid)} tokens a second where one request alone has at most {format_rate(1 / tpot.low)}" if tpot and tpot.low > 0 else ""  # fmt: skip
    how = f"--cont-batching -np {count}" if case.engine == "llama.cpp" else None
    return [Advice(technique, YES, f"{count:,} requests share each step's reading of the weights{rate}", how, source)]


def chunk(case: Case) -> int:
    """Tokens of a step at most."""
    return case.deployment.serving.max_batched or _USUAL_CHUNK.get(case.engine, 8192)


def chunked(case: Case) -> list[Advice]:
    """Chunked prefill: a prompt in one piece makes running requests wait for prompt / prefill_rate.

    no: one request at a time; yes: with a TPOT objective, where the wait is longer than it, and without one, where a prompt is
    longer than a step's tokens; depends: the wait is not known or within the objective, and then it changes little.
    """
    technique, source = "chunked prefill", "arXiv 2308.16369 (Sarathi)"
    work, rate, most = case.work, case.numbers.prefill_rate, chunk(case)
    how = _CHUNKED.get(case.engine)
    if work.concurrency < 2:
        return [Advice(technique, NO, "with one request at a time nobody waits behind a prompt", None, source)]
    if rate is None or rate.mid <= 0:
        return [
            Advice(technique, DEPENDS, f"how long a prompt of {work.prompt:,} tokens takes is not known", how, source)
        ]
    wait, part = work.prompt / rate.mid, min(work.prompt, most) / rate.mid
    words = f"a prompt of {work.prompt:,} tokens in one piece makes others wait {seconds(wait)}, in steps of {most:,} {seconds(part)}"
    if work.tpot is not None:
        words += f"; {seconds(work.tpot)} are allowed"
        if wait <= work.tpot:
            return [Advice(technique, DEPENDS, words, None, source)]
        fitting = max(1, int(work.tpot * rate.mid))
        return [
            Advice(technique, YES, words, f"{how} with N near {fitting:,}" if how and part > work.tpot else how, source)
        ]
    verdict = YES if work.prompt > most else DEPENDS
    return [Advice(technique, verdict, words, how if verdict == YES else None, source)]


def disaggregated(case: Case) -> list[Advice]:
    """Prefill on servers of its own: prompts take the share rate × prompt / prefill_rate of a replica's time, and tokens wait
    meanwhile: TPOT / (1 - share).

    no: no TPOT objective, or it holds so, or it is missed even without prompts; yes: it is broken by prompts alone, and there
    are two replicas or more to divide; depends: with one replica, or where a number is not known.
    """
    technique, source = "disaggregated prefill", "arXiv 2401.09670 (DistServe)"
    work, rate, tpot, limit = case.work, case.numbers.prefill_rate, case.numbers.tpot, case.work.tpot
    if limit is None:
        return [Advice(technique, NO, "no objective for TPOT that prompts could break", None, source)]
    if work.rate is None or rate is None or rate.mid <= 0 or tpot is None:
        return [Advice(technique, DEPENDS, "how much of the time prompts take is not known", None, source)]
    share = work.rate * work.prompt * (1 - (work.found or 0.0)) / rate.mid
    mixed = tpot.mid / (1 - share) if share < 1 else float("inf")
    became = seconds(mixed) if share < 1 else "without bound"
    words = f"prompts take {share:.0%} of a replica's time: TPOT goes from {seconds(tpot.mid)} to {became}, {seconds(limit)} are allowed"
    if mixed <= limit:
        return [Advice(technique, NO, words, None, source)]
    if tpot.mid > limit:
        return [Advice(technique, NO, f"{words}: it is missed without any prompts too", None, source)]
    how, servers = _DISAGGREGATED.get(case.engine), case.deployment.replicas
    if how is None:
        return [Advice(technique, NO, f"{words}, and {case.engine} has no such mode", None, source)]
    moved = size(work.prompt * case.numbers.token_bytes)
    if servers < 2:
        because = f"{words}; it takes a second server, and {moved} {case.each} moved for every prompt"
        return [Advice(technique, DEPENDS, because, f"first a smaller chunk than {chunk(case):,}; then {how}", source)]
    return [Advice(technique, YES, f"{words}; {moved} {case.each} move for every prompt", how, source)]
