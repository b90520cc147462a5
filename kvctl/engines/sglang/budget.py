"""SGLang's versions, and how its memory is divided: tokens, state slots, requests.

Sources: sglang 0.5.23 srt/model_executor/pool_configurator.py and srt/mem_cache/kv_cache_configurator.py;
before 0.5.16 srt/model_executor/model_runner.py and model_runner_kv_cache_mixin.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kvctl.allocation import Serving
from kvctl.engines.sglang.pools import BUFFERED, Layout, Stage, page_size
from kvctl.engines.versions import dotted, numbers, unknown
from kvctl.errors import ConfigError, UsageError
from kvctl.record import Record
from kvctl.spec import Formats, ModelSpec
from kvctl.units import GIB

_WALKED = frozenset({"gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gpt_oss"})
_LISTED = frozenset({"llama4", "gpt_oss", "mimo_v2_flash"})


class Rules(Record):
    """How a version divides memory; the defaults are those of 0.4.4."""

    since: tuple[int, int, int]
    windowed: frozenset[str] = frozenset()
    """Model types whose windowed layers have a pool of their own."""
    split: str = ""
    """How memory is split over the two: by "tokens" of equal layers, in whole pages ("pages"), by "memory"
    of tokens counted first, or by one "cell" of both."""
    dtypes: tuple[str, ...] = ("fp8_e5m2", "fp8_e4m3")
    """What --kv-cache-dtype takes beside auto."""
    sparse: bool = False
    """Whether sparse latent attention is served."""
    states: bool = False
    """Whether kvctl knows how recurrent states are sized."""
    spare: int = 0
    """State slots that are part of the budget and hold none."""
    buffered: bool = False
    """Whether extra states for prefix caching are the default of models that have them."""
    drafts: bool = False
    """Whether a draft model's layers are part of a token's bytes."""
    scales_priced: bool = False
    """Whether scales of fp8 latents are part of a token's bytes."""
    elided: bool = False
    """Whether layers that share another's indexer hold no keys for it."""
    half: bool = False
    """Whether requests are at most half of the tokens; before, they follow the tokens first counted."""
    half_of_asked: bool = False
    """Whether that bounds a number of requests that was asked for, too."""
    caps: str = ""
    """Whether windows without prefix caching follow requests: "chunk" in a way not known here, or "request"."""
    named_dtype: bool = False
    """Whether the log names the dtype."""
    labels: bool = False
    """Whether the log names the pools, full layers first."""


_CHANGES: tuple[tuple[tuple[int, int, int], dict[str, Any]], ...] = (
    ((0, 4, 6), {}),  # prints pools of latents too
    ((0, 4, 10), {"windowed": _WALKED, "split": "tokens"}),
    ((0, 5, 4), {"sparse": True, "dtypes": ("fp8_e5m2", "fp8_e4m3", "bf16", "bfloat16"), "windowed": _WALKED | {"olmo2", "olmo3"}}),
    ((0, 5, 5), {"dtypes": ("fp8_e5m2", "fp8_e4m3", "bf16", "bfloat16", "fp4_e2m1")}),
    ((0, 5, 7), {"windowed": frozenset({"mimo_v2_flash"}), "split": "pages"}),
    ((0, 5, 8), {"windowed": _LISTED, "states": True}),
    ((0, 5, 9), {"add": {"step3p5"}, "split": "memory"}),
    ((0, 5, 10), {"half": True}),
    ((0, 5, 11), {"add": {"mimo_v2", "gemma4", "gemma4_text"}, "split": "cell"}),
    ((0, 5, 12), {"add": {"laguna"}}),
    ((0, 5, 13), {"add": {"gemma4_unified", "step3p7"}, "named_dtype": True}),
    ((0, 5, 14), {"drafts": True, "half_of_asked": True, "caps": "chunk"}),
    ((0, 5, 15), {"buffered": True}),
    ((0, 5, 16), {"add": {"mellum"}, "dtypes": (
        "fp8_e5m2", "fp8_e4m3", "mxfp8", "bf16", "bfloat16", "nvfp4", "fp4_mx_block16", "fp4_e2m1")}),
    ((0, 5, 17), {"spare": 1, "scales_priced": True, "labels": True}),
    ((0, 5, 18), {"add": {"muse_glimmer"}, "elided": True}),
    ((0, 5, 21), {"add": {"diffusion_gemma"}, "dtypes": (
        "fp8_e5m2", "fp8_e4m3", "mxfp8", "bf16", "bfloat16", "nvfp4", "fp4_mx_block16")}),
    ((0, 5, 22), {"caps": "request"}),
)  # fmt: skip
"""What changed, and when; "add" adds to `windowed`."""


def _history() -> tuple[Rules, ...]:
    rules = [Rules((0, 4, 4))]
    for since, changes in _CHANGES:
        windowed = changes.get("windowed", rules[-1].windowed) | changes.get("add", set())
        rest = {name: value for name, value in changes.items() if name != "add"}
        rules.append(rules[-1].replace(**{**rest, "since": since, "windowed": windowed}))
    return tuple(rules)


RULES = _history()
NEWEST = (0, 5, 23)
_READ = {*((0, 4, patch) for patch in range(4, 11)), *((0, 5, patch) for patch in range(1, 24))}


@lru_cache(maxsize=64)
def rules_for(version: str | None) -> tuple[Rules, str | None]:
    """Rules of a version ("0.5.13", "0.5.13.post1", "v0.5"), and a warning where they were not read from it."""
    if version is None:
        return RULES[-1], None
    asked = numbers(version, "SGLang", "sglang@0.5.13")[:3]
    if len(asked) == 2:
        # A minor release by itself is its newest patch.
        asked = max((known for known in _READ if known[:2] == asked), default=(*asked, 0))
    if not RULES[0].since <= asked <= NEWEST:
        raise unknown(version, "SGLang", RULES[0].since, NEWEST)
    rules = next(rules for rules in reversed(RULES) if rules.since <= asked)
    if "rc" in version.lower():
        return rules, f"estimated: SGLang {version[:40]} goes by the rules of the release, {dotted(asked)}"
    if asked in _READ:
        return rules, None
    return rules, f"estimated: SGLang {version} goes by the rules of {dotted(rules.since)}, the nearest version read"


def check_version(version: str) -> None:
    """Refuses a version whose rules are not known."""
    rules_for(version)


class Pool(Record):
    """Pools as they are allocated."""

    tokens: int
    """max_total_num_tokens of a rank."""
    windowed: int
    """Tokens of the pool of windowed layers."""
    slots: int
    """Recurrent states."""
    requests: int
    fits: int = 0
    """Tokens that the budget holds, where options name fewer."""


class Settings(Record):
    """Options with SGLang's defaults filled in."""

    rules: Rules
    page: int
    ratio: float
    """Tokens of a windowed layer for each of a full one."""
    workers: int
    """Data-parallel workers that share one limit of requests."""
    slots: int
    """States that one running request may hold."""
    drafts: int
    """Layers of a draft model, taken for the model's own."""
    max_sequences: int | None


_DRAFTS_IN_FULL = ("gpt_oss", "llama4")
"""Model types with a pool of windows whose draft models have full layers alone."""


def settings_for(
    spec: ModelSpec, laid: Layout, fmt: Formats, serving: Serving, rules: Rules, reasons: list[str], warnings: list[str]
) -> Settings:
    """Defaults filled in, and what SGLang refuses refused."""
    sparse = laid.full is not None and laid.full.index > 0
    page, why = page_size(spec, serving, sparse)
    if why:
        reasons.append(why)
    if sparse and not rules.sparse:
        raise ConfigError(f"SGLang {dotted(rules.since)} does not serve sparse latent attention")
    if sparse and fmt.key.name not in ("bf16", "bfloat16", "fp8_e4m3"):
        raise UsageError(f"SGLang keeps sparse latents in bf16 or fp8_e4m3, not in {fmt.key.name}")
    if sparse and fmt.key.name == "bf16":
        warnings.append("estimated: --kv-cache-dtype auto is bf16 here; on Blackwell it is fp8_e4m3")
    if spec.kv_format == "fp8" and fmt.key.name in ("bf16", "fp16"):
        warnings.append("estimated: the checkpoint names fp8 for the cache, which SGLang follows in ModelOpt's files alone; "
                        "--kv-cache-dtype fp8_e4m3 says so")  # fmt: skip
    for name, value in (
        ("--swa-full-tokens-ratio", serving.swa_ratio),
        ("--mamba-full-memory-ratio", serving.mamba_ratio),
    ):
        if value is not None and (value <= 0 or (name.startswith("--swa") and value > 1)):
            raise UsageError(f"{name} {value:g} is out of range", hint="above 0, and for windows 1 at most")
    copies = serving.decode_context_parallel or 1
    if copies > 1 and (rules.since < (0, 5, 18) or laid.windowed or laid.states):
        raise ConfigError("kvctl does not know SGLang's --dcp-size for this model or version")
    if laid.states and not rules.states:
        raise ConfigError(f"kvctl knows SGLang's pool of recurrent states from 0.5.8 on, not of {dotted(rules.since)}")
    drafts = _draft_layers(spec, serving)
    if drafts and not rules.drafts:
        raise ConfigError(f"kvctl knows SGLang's draft layers from 0.5.14 on, not of {dotted(rules.since)}")
    odd = laid.windowed and (spec.model_type not in _DRAFTS_IN_FULL or rules.since < (0, 5, 15))
    if drafts and (len(laid.stages) > 1 or odd):
        raise ConfigError(f"{spec.id}: kvctl does not know where SGLang keeps this model's draft layers")
    requests = serving.max_sequences
    if requests is None and (drafts or serving.draft_tokens or serving.speculative_algorithm):
        requests = 48
        reasons.append("48 requests at a time: SGLang's default with a draft model")
    return Settings(
        rules=rules,
        page=page,
        ratio=0.8 if serving.swa_ratio is None else serving.swa_ratio,
        workers=(serving.data_parallel or 1) if serving.attention_dp else 1,
        slots=_slots_of_request(spec, serving, rules),
        drafts=drafts,
        max_sequences=requests,
    )


def _draft_layers(spec: ModelSpec, serving: Serving) -> int:
    """Layers that drafting adds: those that were named, the draft model's, or the model's own prediction modules."""
    if serving.draft_layers is not None:
        return serving.draft_layers
    algorithm = (serving.speculative_algorithm or "NGRAM").upper()
    if algorithm == "NGRAM":
        return 0
    if algorithm not in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE"):
        raise ConfigError(f"kvctl does not know what SGLang's --speculative-algorithm {algorithm[:40]} keeps",
                          hint="known are EAGLE, EAGLE3, NEXTN, STANDALONE and NGRAM")  # fmt: skip
    if serving.draft is not None:
        return serving.draft.prediction_modules or len(serving.draft.layers)
    return spec.prediction_modules or 0


def _slots_of_request(spec: ModelSpec, serving: Serving, rules: Rules) -> int:
    """States for each running request: one that runs, two that prefix caching keeps, more with buffers."""
    if serving.prefix_caching is False:
        return 1
    strategy = serving.mamba_strategy or "auto"
    if strategy == "auto":
        strategy = "extra_buffer" if rules.buffered and spec.model_type in BUFFERED else "no_buffer"
    extra = {"no_buffer": 0, "extra_buffer": 2, "extra_buffer_lazy": 1}.get(strategy)
    if extra is None:
        raise UsageError(f"--mamba-radix-cache-strategy: {strategy[:40]!r}",
                         hint="one of auto, no_buffer, extra_buffer, extra_buffer_lazy")  # fmt: skip
    return 3 + extra


# -- from the budget to pools -------------------------------------------------------------


def pools(laid: Layout, context: int, serving: Serving, settings: Settings) -> Pool | None:
    """The pools that fit; None without a budget, unless the tokens are named."""
    budget, most = serving.kv_budget, serving.max_tokens
    if budget is None and most is None:
        return None
    slots, rest = 0, budget or 0
    if laid.states:
        if budget is None:
            slots = given_slots(serving, settings) or 0
        else:
            slots, left = _split_states(laid, budget / GIB, serving, settings)
            if slots <= 0 or left <= 0:
                return Pool(0, 0, max(0, slots), 0)  # it does not start
            rest = int(left * GIB)
    if budget is None:
        counted = most or 0
    else:
        counted = min(_counted(laid, stage, rest, context, serving, settings) for stage in laid.stages)
    fits, _ = min(_split(laid, stage, counted, None, settings) for stage in laid.stages)
    tokens, windowed = min(_split(laid, stage, counted, most, settings) for stage in laid.stages)
    if laid.windowed and capped(serving, settings):
        windowed = min(_request_cap(laid, serving, settings), most or 2**63)
    if tokens <= 0:
        return Pool(0, 0, slots, 0)
    # Before 0.5.10 requests were limited by the tokens first counted.
    limit = tokens if settings.rules.half else counted
    return Pool(tokens, windowed, slots, _requests(limit, slots, context, laid, settings), fits)


def _counted(laid: Layout, stage: Stage, memory: int, context: int, serving: Serving, settings: Settings) -> int:
    """Tokens of one stage in `memory`, before whole pages."""
    rules = settings.rules
    full, windowed = _cell(laid, stage, settings), laid.windowed_row(stage)
    if not full and not windowed:
        # No cache here that grows: another stage's tokens count, or none at all.
        return 2**63 if len(laid.stages) > 1 and laid.full else serving.max_tokens or context
    if not windowed:
        return memory // full
    if laid.full is None or laid.windowed is None or not stage.full:
        raise ConfigError("kvctl does not know how SGLang sizes a stage whose layers are all windowed")
    if capped(serving, settings):
        return (memory - _request_cap(laid, serving, settings) * windowed) // full
    if rules.split == "cell":
        return int(memory // (full + settings.ratio * windowed))
    if rules.split == "memory" or laid.windowed.bytes == laid.full.bytes:
        return memory // (full + windowed)
    # mimo_v2_flash: from 0.5.8 on all layers counted as full ones, and the windows once more.
    layers = stage.full + (stage.windowed if rules.since >= (0, 5, 8) else 0)
    return memory // (laid.full.bytes * layers + windowed)


def _split(laid: Layout, stage: Stage, counted: int, most: int | None, settings: Settings) -> tuple[int, int]:
    """Tokens of full and of windowed layers for so many counted, `most` of them at most."""
    page, ratio, split = settings.page, settings.ratio, settings.rules.split
    tokens = (counted if most is None else min(counted, most)) // page * page
    if not laid.windowed:
        return tokens, 0
    if split == "cell":
        return tokens, windowed_tokens(tokens, settings)
    if split == "memory":
        full, windowed = laid.full_row(stage), laid.windowed_row(stage)
        tokens = int(tokens * (full + windowed) / (full + ratio * windowed))
    else:
        tokens = int(tokens * (stage.full + stage.windowed) / (ratio * stage.windowed + stage.full))
    # Windows followed the full layers before those came in whole pages, up to 0.5.9.
    loose = windowed_tokens(tokens, settings)
    tokens = tokens if split == "tokens" else tokens // page * page
    return tokens, loose if settings.rules.since < (0, 5, 10) else windowed_tokens(tokens, settings)


def _cell(laid: Layout, stage: Stage, settings: Settings) -> int:
    """Bytes of one token of the full layers, draft layers included, as SGLang prices them."""
    if laid.full is None or not stage.full:
        return 0
    each = laid.full.bytes
    if laid.full.index and not settings.rules.scales_priced and each == 656:
        each = 576  # 512 + 64 elements, without scales and as if the rotary key were fp8 too
    cell = each * stage.full + laid.full.index * stage.indexed
    if settings.drafts:
        cell += (each + laid.full.index) * settings.drafts
    return cell


def windowed_tokens(tokens: int, settings: Settings) -> int:
    """Tokens of the pool of windowed layers."""
    held = int(tokens * settings.ratio)
    return held if settings.rules.split == "tokens" else held // settings.page * settings.page


def capped(serving: Serving, settings: Settings) -> bool:
    """Whether windows are sized by requests: without prefix caching, where their number is named."""
    return serving.prefix_caching is False and serving.max_sequences is not None and settings.rules.caps != ""


def _request_cap(laid: Layout, serving: Serving, settings: Settings) -> int:
    """Tokens of windowed layers for the requests that run: windows, what awaits eviction, and two chunks."""
    if settings.rules.caps != "request" or settings.drafts or serving.draft_tokens:
        raise ConfigError("kvctl does not know how this SGLang sizes windows without prefix caching",
                          hint="leave --max-running-requests or --disable-radix-cache out")  # fmt: skip
    if serving.max_batched is None:
        raise UsageError("without prefix caching SGLang sizes windows by the prefill chunk, which depends on the GPU",
                         hint="name it with --chunked-prefill-size")  # fmt: skip
    each = laid.window + 128 + 2 * settings.page
    requests = max(1, (serving.max_sequences or 1) // settings.workers)
    cap = each * requests + 2 * serving.max_batched + settings.page
    return -(-cap // settings.page) * settings.page


def given_slots(serving: Serving, settings: Settings) -> int | None:
    """State slots that options name."""
    if serving.mamba_slots is not None:
        return serving.mamba_slots // settings.workers
    if serving.prefix_caching is False and serving.max_sequences is not None:
        return max(1, serving.max_sequences // settings.workers)
    if serving.prefix_caching is False and settings.rules.since < (0, 5, 10):
        return 512 // settings.workers
    return None


def _split_states(laid: Layout, rest: float, serving: Serving, settings: Settings) -> tuple[int, float]:
    """State slots, and the GiB that they leave; in floats, in the order of SGLang's own arithmetic."""
    spare = settings.rules.spare
    each = laid.state
    verified = serving.draft_tokens or 0
    if verified and settings.rules.since < (0, 5, 13):
        raise ConfigError(f"kvctl does not know SGLang {dotted(settings.rules.since)}'s states of draft tokens")
    requests = max(1, (settings.max_sequences or 1) // settings.workers)
    slots = given_slots(serving, settings)
    if slots is not None:
        running = slots if serving.mamba_slots is None else min(requests, slots // settings.slots)
    else:
        ratio = 0.9 if serving.mamba_ratio is None else serving.mamba_ratio
        share = rest * ratio / (1 + ratio) * GIB
        slots = int((share - spare * each * (1 + verified)) // (each * (1 + verified / settings.slots)))
        running = min(requests, slots // settings.slots)
    if verified:
        rest -= each * (running + spare) * verified / GIB
    return slots, rest - (slots + spare) * each / GIB


def _requests(tokens: int, slots: int, context: int, laid: Layout, settings: Settings) -> int:
    """max_running_requests of one worker."""
    rules = settings.rules
    estimated = max(min(int(tokens / context * 512), 4096), 2048)
    limit = tokens // 2 if rules.half else estimated
    if settings.max_sequences is not None:
        asked = max(1, settings.max_sequences // settings.workers)
        found = min(asked, limit if rules.half_of_asked else estimated) if rules.half else asked
    else:
        found = min(estimated, limit)
    return min(found, slots // settings.slots) if laid.states and slots else found


def allocated(laid: Layout, stage: Stage, pool: Pool, settings: Settings) -> int:
    """Bytes of a stage's pools, the page for padded tokens and the slot for padded requests included."""
    total = (pool.tokens + settings.page) * laid.full_row(stage)
    if laid.windowed and stage.windowed:
        total += (pool.windowed + settings.page) * laid.windowed_row(stage)
    return total + (pool.slots + 1) * (laid.conv + laid.matrix) * stage.stateful
