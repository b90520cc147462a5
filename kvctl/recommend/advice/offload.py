"""Advice on memory beside the GPU: the cache in the host's memory or on disk, LMCache, and weights in the host's memory."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from kvctl.errors import KvctlError
from kvctl.formats import BF16, plain
from kvctl.recommend.advice.cache import FOUND
from kvctl.recommend.advice.case import DEPENDS, NO, YES, Advice, Case, seconds, size
from kvctl.spec import Formats
from kvctl.speed.work import work_of
from kvctl.units import GIB

if TYPE_CHECKING:
    from kvctl.spec import ModelSpec

_LANE = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""10^9 bytes a second of one PCIe lane, by generation (PCI-SIG, after encoding)."""
USABLE = 0.8
"""Of that: about 50 of 63 GB/s to an H100 (vLLM blog, inside the offloading connector)."""
_GENERATION = {"7": 3, "8": 4, "9": 5, "10": 5, "11": 5, "12": 5}
"""PCIe of server cards by the first number of their compute capability (NVIDIA's data sheets)."""
_PCIE = re.compile(r"gen\s*(\d)\s*x(\d+)")
_SOURCE = "https://vllm.ai/blog (2025-12, inside the offloading connector); arXiv 2510.09665 (LMCache)"
_FLAGS = {
    "vllm": "--kv-offloading-size GIB", "sglang": "--enable-hierarchical-cache --hicache-size GB",
    "tensorrt-llm": "host_cache_size in kv_cache_config", "llama.cpp": "--cache-ram MIB", "transformers": None,
}  # fmt: skip
_LMCACHE = {"vllm": "--kv-offloading-backend lmcache --kv-offloading-size GIB", "sglang": "--enable-lmcache"}


def link_gbs(case: Case) -> tuple[float, bool] | None:
    """10^9 bytes a second between one GPU and its host, and whether that is assumed; None where there is no such link."""
    device = case.deployment.device
    if case.numbers.pcie_gbs is not None:
        return case.numbers.pcie_gbs, False
    if device.unified or device.kind != "gpu":
        return None
    told = _PCIE.search(device.pcie or "")
    if told:
        return _LANE.get(int(told[1]), _LANE[3]) * int(told[2]) * USABLE, True
    capability = device.compute_capability or (device.facts.compute_capability if device.facts is not None else None)
    generation = _GENERATION.get((capability or "").partition(".")[0])
    return None if generation is None else (_LANE[generation] * 16 * USABLE, True)


def offload(case: Case) -> list[Advice]:
    """The cache in the host's memory, on disk, and through LMCache.

    Fetching a token takes token_bytes / link, every rank its part at the same time; computing it takes 1 / prefill_rate. no:
    fetching is not faster; or too little comes again (`FOUND`); or a prefix is asked for again while it is still on the
    GPU, whose pool turns over in capacity / (new tokens a second); or not before the host's memory has turned over too. yes: it
    comes again between the two. depends: one of these numbers is not known.

    LMCache: no where a single server's own offload does (or its engine has none); else as the host's memory.
    """
    own = _kv(case)
    return [own, _disk(case, own), _lmcache(case, own)]


def _kv(case: Case) -> Advice:
    technique, how = "CPU offload of the cache", _FLAGS.get(case.engine)
    link, rate = link_gbs(case), case.numbers.prefill_rate
    if not case.deployment.gpus:
        return Advice(technique, NO, "the cache is in the host's memory already", None, _SOURCE)
    if link is None:
        gpu = case.deployment.device.name
        return Advice(
            technique, NO, f"no link between {gpu} and other memory is known that would be worth it", None, _SOURCE
        )
    if rate is None or rate.mid <= 0:
        fetch = case.numbers.token_bytes / (link[0] * 1e9)
        return Advice(technique, DEPENDS, f"fetching a token takes {seconds(fetch)}; how long computing it takes is not known", how, _SOURCE)  # fmt: skip
    words, faster = _against(case, link[0], rate.mid, "assumed " if link[1] else "")
    if faster <= 1:
        return Advice(technique, NO, words, None, _SOURCE)
    found = case.work.comes_again
    if found is not None and found < FOUND:
        return Advice(technique, NO, f"{words}, but only {found:.1%} of the prompts comes again", None, _SOURCE)
    keeps, host = _keeps(case), _host_keeps(case)
    again = case.work.reuse_seconds
    if again is None or keeps is None or found is None:
        when = "" if keeps is None else f"; it pays where prefixes come again after more than {seconds(keeps)}"
        return Advice(technique, DEPENDS, f"{words}; when prefixes come again is not known{when}", how, _SOURCE)
    if again <= keeps:
        because = (
            f"{words}, but prefixes come again after {seconds(again)}, and the GPU keeps them for {seconds(keeps)}"
        )
        return Advice(technique, NO, because, None, _SOURCE)
    if host is not None and again > host:
        because = (
            f"{words}, but prefixes come again after {seconds(again)}, and the host keeps them for {seconds(host)}"
        )
        return Advice(technique, NO, because, None, _SOURCE)
    because = f"{words}; prefixes come again after {seconds(again)}, and the GPU keeps them for {seconds(keeps)}"
    return Advice(technique, YES, because, how, _SOURCE)


def _against(case: Case, gbs: float, rate: float, how: str) -> tuple[str, float]:
    """Fetching a prompt against computing it, in words, and how many times faster it is."""
    prompt = case.work.prompt
    fetch, compute = prompt * case.numbers.token_bytes / (gbs * 1e9), prompt / rate
    faster = compute / fetch
    words = (
        f"fetching a prompt of {prompt:,} tokens takes {seconds(fetch)} ({how}{gbs:.3g} GB/s), computing it {seconds(compute)}"
        f" ({faster:.3g} times as long)"
    )
    return words, faster


def _flow(case: Case) -> float | None:
    """New tokens a second that the pool of one replica takes in."""
    work = case.work
    if work.rate is None:
        return None
    return work.rate * (work.prompt * (1 - (work.found or 0.0)) + work.answer)


def _keeps(case: Case) -> float | None:
    """Seconds until the pool has turned over."""
    flow, capacity = _flow(case), case.numbers.capacity
    return capacity / flow if flow and capacity is not None else None


def _host_keeps(case: Case) -> float | None:
    flow, host = _flow(case), case.numbers.host_bytes
    if not flow or host is None:
        return None
    ranks = max(1, case.deployment.gpus * case.deployment.nodes)
    return host / (case.numbers.token_bytes * ranks) / flow


def _disk(case: Case, own: Advice) -> Advice:
    """From disk: no where it is not faster than computing; depends where its rate is not known; else where the host's memory
    turns over too soon."""
    technique, gbs, rate = "disk offload of the cache", case.numbers.disk_gbs, case.numbers.prefill_rate
    if gbs is None or rate is None or rate.mid <= 0:
        per = 0.0 if rate is None else case.numbers.token_bytes * rate.mid / 1e9
        need = (
            f": it would have to give {'each GPU' if case.deployment.gpus else 'the host'} more than {per:.3g} GB/s"
            if per
            else ""
        )
        return Advice(technique, DEPENDS, f"how fast the disk or the computing is, is not known{need}", None, _SOURCE)
    words, faster = _against(case, gbs, rate.mid, "")
    host, again = _host_keeps(case), case.work.reuse_seconds
    if faster <= 1:
        return Advice(technique, NO, words, None, _SOURCE)
    if own.verdict == YES or (again is not None and host is not None and again <= host):
        return Advice(
            technique, NO, f"{words}, but the host's memory keeps what comes again, and is faster", None, _SOURCE
        )
    if again is None or host is None:
        return Advice(technique, DEPENDS, f"{words}; whether the host's memory keeps what comes again is not known", None, _SOURCE)  # fmt: skip
    return Advice(technique, YES, f"{words}; the host keeps a prefix for {seconds(host)}, and it comes again after {seconds(again)}",
                  _LMCACHE.get(case.engine), _SOURCE)  # fmt: skip


def _lmcache(case: Case, own: Advice) -> Advice:
    technique, how, servers = "LMCache", _LMCACHE.get(case.engine), case.deployment.replicas
    if how is None:
        return Advice(technique, NO, f"{case.engine} has no connector for it", None, "https://docs.lmcache.ai")
    if servers == 1:
        because = f"one server: the engine's own offload does the same ({own.verdict} above)"
        return Advice(technique, NO, because, None, "https://docs.lmcache.ai")
    return Advice(technique, own.verdict, f"{servers:,} servers could share what one of them computed: {own.because}", how if own.verdict != NO else None,
                  "https://docs.lmcache.ai")  # fmt: skip


def weights(case: Case) -> list[Advice]:
    """Weights in the host's memory: every step waits for them. no where none lie there, since they fit; else by the TPOT
    objective: yes within it, no beyond it, depends without one. depends: layers that the host computes (llama.cpp)."""
    technique, source, link = "CPU offload of weights", "vLLM --cpu-offload-gb", link_gbs(case)
    away = case.deployment.serving.cpu_offload or 0
    if case.numbers.host_weights and not away:
        return [_layers(case, technique)]
    if not case.deployment.gpus and not away:
        return [Advice(technique, NO, "the weights are in the host's memory already", None, source)]
    if link is None:
        return [
            Advice(
                technique, DEPENDS if away else NO, "no rate between the GPU and other memory is known", None, source
            )
        ]
    gbs, _ = link
    if not away:
        because = f"the weights fit ({size(case.numbers.rank_weights)} {case.each}), and each GiB beside it would add {seconds(GIB / (gbs * 1e9))} to every step"  # fmt: skip
        return [Advice(technique, NO, because, None, source)]
    added = away / (gbs * 1e9)
    words = f"{size(away)} of each GPU's weights come over {gbs:.3g} GB/s, {seconds(added)} in every step"
    limit = case.work.tpot
    if limit is None:
        return [Advice(technique, DEPENDS, f"{words}; without an objective for TPOT that may do", None, source)]
    if added > limit:
        return [
            Advice(
                technique,
                NO,
                f"{words}, and {seconds(limit)} are allowed",
                "more GPUs, or a smaller format of the weights",
                source,
            )
        ]
    return [Advice(technique, YES, f"{words}, within {seconds(limit)}", None, source)]


def _layers(case: Case, technique: str) -> Advice:
    """Whole layers that the host computes (-ngl): depends, for how fast it does is not known; of a mixture with the other way,
    which leaves the host the routed experts alone, and the GPU the attention of every layer."""
    of, away = len(case.spec.layers), case.numbers.host_weights
    kept = of - min(case.deployment.serving.gpu_layers or 0, of)
    words = (
        f"{kept:,} of {of:,} layers, {size(away)} of weights, are in the host's memory and are computed there, and how fast that "
        "is, is not known"
    )
    source = "llama.cpp tools/server/README.md (--n-gpu-layers, --n-cpu-moe)"
    found = _mixture(case.spec)
    if found is None or not kept:
        return Advice(technique, DEPENDS, words, "--verify measures it", source)
    share, layers, taken, experts = found
    # The cache of the layers that come back takes its part of the GPU, too.
    back = case.numbers.token_bytes * case.deployment.context * case.work.concurrency * kept / (of - kept) if of > kept else 0  # fmt: skip
    more = math.ceil((away + back) / (away / kept * share))
    words += (
        f"; routed experts are {share:.0%} of a layer's parameters, and a token goes through {taken:,} of {experts:,}: with those of "
        f"{'all' if more >= layers else f'about {more:,}'} layers there, the GPU would hold all else, with attention and its cache; which of the two is "
        "faster, a load test tells"
    )
    flag = "--cpu-moe" if more >= layers else f"--n-cpu-moe {more}"
    return Advice(technique, DEPENDS, words, f"{flag} in place of --n-gpu-layers (it is not written by --emit)", source)


def _mixture(spec: ModelSpec) -> tuple[float, int, int, int] | None:
    """Of a mixture: the share of routed experts in a layer's parameters, layers that have them, those that a token goes through,
    and all; None of others, or where that is not known."""
    try:
        work = work_of(spec, Formats(BF16, plain(BF16), plain(BF16)))
    except KvctlError:
        return None
    if not work.experts or not work.expert_layers:
        return None
    routed = work.expert * work.experts / work.expert_layers
    share = routed / (routed + work.dense / work.layers)
    return share, work.expert_layers, work.chosen, work.experts
