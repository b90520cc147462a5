"""Versions of TensorRT-LLM, and its options with their defaults filled in.

Sources: TensorRT-LLM llmapi/llm_args.py, docs/source/features/kvcache.md, release notes.
"""

from __future__ import annotations

from kvctl.allocation import Serving
from kvctl.engines.versions import pair, unknown
from kvctl.errors import ConfigError, UsageError
from kvctl.record import Record
from kvctl.spec import Attention, Formats, ModelSpec
from kvctl.units import plural

_SECOND_IN_1_3 = (
    "nemotron_h", "qwen3_next", "deepseek_v4", "gpt_oss", "gemma3", "gemma3_text", "gemma4", "gemma4_text",
    "llama", "llama4", "llama4_text",
)  # fmt: skip
"""Model types that the second manager serves in 1.3 without being told (docs, features/kvcache.md)."""


class Rules(Record):
    """What changed between versions, from version `since` on."""

    since: tuple[int, int]
    rounds_up: bool
    """Whether the last block may be only partly covered by the budget."""
    nvfp4: bool
    indexer: bool
    """Whether sparse attention with an indexer is served."""
    sequence_line: bool
    """Whether the log names the blocks of a sequence."""
    second: str
    """Where the second manager is the default: "never", "listed" model types, "always"."""
    candidate: bool = False
    """Read from release candidates."""


RULES: tuple[Rules, ...] = (
    Rules((1, 0), True, False, False, False, "never"),
    Rules((1, 1), True, False, False, False, "never"),
    Rules((1, 2), False, True, True, True, "never"),
    Rules((1, 3), False, True, True, True, "listed", True),
    Rules((1, 4), False, True, True, True, "always", True),
)
_DEFAULT = (1, 2)
"""The newest release."""


def rules_for(version: str | None) -> tuple[Rules, str | None]:
    """Rules of a version ("1.2", "1.2.1", "v1.3"), and a warning where no release has them yet."""
    asked = _DEFAULT
    if version is not None:
        asked = pair(version, "TensorRT-LLM", "tensorrt-llm@1.2")
    for rules in RULES:
        if rules.since == asked:
            doubt = f"estimated: TensorRT-LLM {asked[0]}.{asked[1]} goes by the rules of its release candidates"
            return rules, doubt if rules.candidate else None
    raise unknown(version or "", "TensorRT-LLM", RULES[0].since, RULES[-1].since)


def check_version(version: str) -> None:
    """Refuses a version whose rules are not known."""
    rules_for(version)


class Settings(Record):
    """Options with the engine's defaults filled in."""

    rules: Rules
    context: int
    sequences: int
    """Requests on one rank."""
    ranks: int
    stages: int
    block: int
    budget: int | None
    max_tokens: int | None
    max_sequences: int
    second: bool


def settings_for(
    spec: ModelSpec, context: int, sequences: int, fmt: Formats, serving: Serving, rules: Rules
) -> Settings:
    """Defaults filled in; refuses what TensorRT-LLM refuses, or kvctl does not know."""
    if context < 1:
        raise UsageError("--ctx 0: TensorRT-LLM needs a maximum length of at least one token")
    if serving.device != "gpu":
        raise UsageError("TensorRT-LLM runs on GPUs only", hint="--device gpu")
    if fmt.key != fmt.value:
        raise UsageError("tensorrt-llm keeps keys and values in one format", hint="--kv-cache-dtype sets both")
    if fmt.key.name == "fp32":
        raise ConfigError("kvctl does not know what TensorRT-LLM makes of a cache in fp32", hint="--dtype bf16")
    if fmt.key.name == "nvfp4" and not rules.nvfp4:
        raise UsageError(f"--kv-cache-dtype nvfp4: kvctl does not know it in TensorRT-LLM 1.{rules.since[1]}",
                         hint="auto, or fp8")  # fmt: skip
    ranks, stages, block = serving.tensor_parallel or 1, serving.pipeline_parallel or 1, serving.block_size or 32
    if block < 2 or block & (block - 1):
        raise UsageError(
            f"--block-size {block} is no power of two", hint="TensorRT-LLM's tokens_per_block is one: 32, 64, …"
        )
    heads = spec.attention_heads
    if heads is not None and heads % ranks and not serving.attention_dp:
        raise UsageError(f"--tensor-parallel-size {ranks} does not divide the {heads} attention heads",
                         hint="TensorRT-LLM refuses this split")  # fmt: skip
    if not serving.attention_dp:
        _check_kv_heads(spec, ranks)
    if stages > len(spec.layers):
        raise UsageError(f"--pipeline-parallel-size {stages}: the model has {plural(len(spec.layers), 'layer')}")
    second = serving.second_manager
    if second and rules.second == "never":
        raise UsageError(f"kvctl does not know the second cache manager of TensorRT-LLM 1.{rules.since[1]}",
                         hint="--engine tensorrt-llm@1.3")  # fmt: skip
    if second is None:
        second = rules.second == "always" or (rules.second == "listed" and spec.model_type in _SECOND_IN_1_3)
    return Settings(
        rules=rules, context=context, sequences=-(-sequences // ranks) if serving.attention_dp else sequences,
        ranks=ranks, stages=stages, block=block, budget=serving.kv_budget, max_tokens=serving.max_tokens,
        max_sequences=serving.max_sequences or 2048, second=second,
    )  # fmt: skip


def _check_kv_heads(spec: ModelSpec, ranks: int) -> None:
    """Refuses a split that leaves ranks with unequal KV heads (_torch/models/modeling_utils.py: duplicate_kv_weight)."""
    states = (state for layer, _ in spec.groups for state in layer.states)
    for heads in sorted({state.kv_heads for state in states if isinstance(state, Attention)}):
        if heads % ranks and ranks % heads:
            raise UsageError(f"--tensor-parallel-size {ranks} neither divides {plural(heads, 'KV head')} nor is a multiple of them",
                             hint="TensorRT-LLM refuses this split")  # fmt: skip
