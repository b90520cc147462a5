"""How vLLM lays a model's layers out: every option's default filled in, and specs put into groups.

Sources: as in `vllm`; vllm 0.33.0 config/vllm.py for what turns the hybrid KV cache manager off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvctl.allocation import Serving
from kvctl.engines.versions import dotted
from kvctl.engines.vllm import packed
from kvctl.engines.vllm.groups import (
    Group,
    Placed,
    Settings,
    block_size,
    block_step,
    bytes_per_block,
    groups_of,
    placed,
    promoted,
    stage_of,
)
from kvctl.engines.vllm.models import MINIMAX_M3, MINIMAX_M3_BLOCK, least_batched, specs_of
from kvctl.engines.vllm.rules import Rules
from kvctl.engines.vllm.specs import KV_DTYPES, Spec, is_packed, told
from kvctl.engines.vllm.speculation import Drafts, drafts
from kvctl.errors import ConfigError, UsageError
from kvctl.formats import plain
from kvctl.record import Record
from kvctl.spec import Formats, Indexer, LatentAttention, ModelSpec

_ATTENTION_FREE = ("mamba", "mamba2", "falcon_mamba")
_STATE_EACH_BLOCK = ("bamba", "falcon_h1", "granitemoehybrid", "jamba", "mamba", "mamba2", "falcon_mamba", "nemotron_h",
                     "zamba2")  # fmt: skip
"""Model types that, until 0.27, kept a state at every block boundary when prefixes are cached."""


class Laid(Record):
    """Layers laid out in groups, for requests of at most `context` tokens."""

    groups: list[Group]
    settings: Settings
    block: int
    context: int
    of_stage: tuple[int, ...]
    """Bytes of a block on every pipeline stage."""
    packed: bool = False
    """Whether layers of unequal pages lie side by side."""

    @property
    def widest(self) -> int:
        return max(self.of_stage)

    @property
    def request(self) -> int:
        """Blocks that one request holds, over all groups."""
        return sum(self.settings.blocks(group[0].spec, self.context) for group in self.groups)


def lay_out(
    spec: ModelSpec, context: int, fmt: Formats, serving: Serving, rules: Rules, reasons: list[str], warnings: list[str]
) -> Laid:
    """Groups of a model's layers, and the bytes of a block on every stage."""
    side_by_side = packed.packs_layers(spec)
    if side_by_side:
        fmt = packed.cache_format(fmt, serving, rules, warnings)
    else:
        fmt = _sparse_format(spec, fmt, serving, rules, warnings)
    drafted = drafts(spec, serving.speculative, serving.draft)
    if drafted.reason:
        reasons.append(drafted.reason)
    layers = _layers(spec, fmt, serving, drafted, reasons)
    every = [item.spec for item in layers]
    if not every:
        raise ConfigError(f"{spec.model_type[:60]}: nothing that vLLM would cache")
    if not rules.hybrid and any(item.kind == "state" for item in every):
        raise ConfigError(f"vLLM {dotted(rules.since)} does not serve recurrent layers from its KV cache")
    settings = _settings(spec, fmt, serving, rules, every, context, drafted.tokens, warnings)
    settings = settings.replace(retained=drafted.retained if rules.since >= (0, 28) else 0)
    unpacked = max((item.token_bytes for item in every if item.kind == "full"), default=0) if is_packed(fmt) else 0
    block, padded = block_size(settings, every, unpacked, reasons)
    stages = range(serving.pipeline_parallel or 1)
    pooled = any(item.kind == "tail" for item in every)
    if (side_by_side or pooled) and _stored_in_full(layers, serving, rules, reasons):
        raise ConfigError(f"{spec.id}: kvctl does not know vLLM's plan without the hybrid KV cache manager",
                          hint="without what turns it off: its own option, or a KV connector")  # fmt: skip
    if side_by_side:
        groups = packed.groups_of(layers, rules)
        of_stage = tuple(packed.bytes_per_block(groups, stage, rules) for stage in stages)
        return Laid(groups, settings, block, context, of_stage, True)
    # Layers of a kind share one spec: it is placed once.
    found = {id(item.spec): item.spec for item in layers}
    there = {key: placed(one, settings, block, padded, context) for key, one in found.items()}
    layers = [Placed(there[id(item.spec)], item.stage) for item in layers]
    if not rules.hybrid or _stored_in_full(layers, serving, rules, reasons):
        layers = promoted(layers, reasons)
    groups = groups_of(layers, rules, reasons)
    step = block_step(groups[0]) if pooled and rules.since >= (0, 32) else 1
    of_stage = tuple(-(-bytes_per_block(groups, stage) // step) * step for stage in stages)
    return Laid(groups, settings, block, context, of_stage)


_PACKS_FP8 = ("FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120")
"""Backends that keep sparse latents in a layout of their own when told fp8."""


def _sparse_backend(gpu: str | None) -> str:
    """The kernels of sparse latents in fp8 on a GPU (_get_backend_priorities); Hopper's where none is known."""
    if gpu is not None and gpu.startswith("gfx"):
        return "ROCM_AITER_MLA_SPARSE"
    family = 9 if gpu is None else int(float(gpu))
    return {10: "FLASHINFER_MLA_SPARSE", 12: _PACKS_FP8[1]}.get(family, _PACKS_FP8[0])


def _sparse_format(spec: ModelSpec, fmt: Formats, serving: Serving, rules: Rules, warnings: list[str]) -> Formats:
    """fp8 means fp8_ds_mla for latents with an indexer, on the kernels that Hopper and small Blackwell GPUs run them on."""
    latents = [
        layer for layer, _ in spec.groups if any(isinstance(s, LatentAttention) for s in layer.states_in("vllm"))
    ]
    sparse = any(isinstance(state, Indexer) for layer in latents for state in layer.states_in("vllm"))
    if not sparse or serving.device == "cpu":
        return fmt
    backend = (serving.attention_backend or _sparse_backend(serving.gpu)).upper()
    untold = fmt.key == plain(fmt.model)
    told = fmt.key.name.startswith("fp8") and fmt.key.name != "fp8_ds_mla"
    if told and backend not in _PACKS_FP8 and rules.since >= (0, 20):
        return fmt
    blackwell = serving.gpu is None or (not serving.gpu.startswith("gfx") and float(serving.gpu) >= 10)
    if untold and blackwell and spec.model_type in rules.blackwell_fp8:
        warnings.append(
            f"a Blackwell GPU keeps {spec.model_type} in fp8 without being told: --kv-cache-dtype fp8 "
            "--attention-backend FLASHINFER_MLA_SPARSE"
        )
    if not told and not (untold and (rules.sparse_fp8 or backend == _PACKS_FP8[1])):
        return fmt
    if serving.gpu is None:
        warnings.append(
            "sparse latents in fp8 are kept as fp8_ds_mla, 656 bytes a token, as FlashMLA on a Hopper GPU has it; "
            "--attention-backend says another kernel (FLASHINFER_MLA_SPARSE on Blackwell, ROCM_AITER_MLA_SPARSE on AMD)"
        )
    return fmt.replace(key=KV_DTYPES["fp8_ds_mla"], value=KV_DTYPES["fp8_ds_mla"])


_WIDTHS = (320, 512, 576)
"""Latents with their rotary keys that all kernels but Triton's have (MLACommonBackend.get_supported_head_sizes)."""


def _latent_block(spec: ModelSpec, fmt: Formats, serving: Serving, rules: Rules, *, sparse: bool) -> tuple[int, str]:
    """Tokens in a block of latents by the kernels that a GPU runs them with, and what had to be assumed.

    Source: vLLM 0.32 platforms/cuda.py and rocm.py (_get_backend_priorities), v1/attention/backends/mla/*.py
    (supports_compute_capability, supported_kv_cache_dtypes, get_supported_kernel_block_sizes): the least multiple of 16 that
    the first backend takes which runs there. Before 0.20 Hopper's were forced to 64.
    """
    gpu, known = serving.gpu, rules.since >= (0, 20)
    if gpu is None or serving.attention_backend is not None:
        return 64, "block size 64, as FlashMLA on a Hopper GPU has it; --block-size sets another backend's"
    family = None if gpu.startswith("gfx") else int(float(gpu))
    if sparse:  # the indexer's own kernels take 64 on NVIDIA's
        return 64 if family is not None else 16, ""
    if family == 9 and not known:
        return 64, ""
    widths = {state.latent + state.rope for layer, _ in spec.groups for state in layer.states_in("vllm")
              if isinstance(state, LatentAttention)}  # fmt: skip
    if family not in (9, 10) or not widths <= set(_WIDTHS):
        return 16, ""  # Triton's
    if family == 9:  # FlashAttention, which has no 8-bit latents: those are FlashMLA's
        return 64 if fmt.key.name.startswith("fp8") else 16, ""
    if not known:
        return (
            64,
            f"block size 64, assumed for vLLM {dotted(rules.since)} on Blackwell; --block-size sets another backend's",
        )
    return 32, ""  # FlashInfer's


def connectors(serving: Serving) -> list[Any]:
    """Names of what moves the cache elsewhere."""
    settings = serving.kv_transfer or {}
    names = [settings["kv_connector"]] if "kv_connector" in settings else []
    inner = settings.get("kv_connector_extra_config")
    if isinstance(inner, Mapping) and isinstance(inner.get("connectors"), list):
        names += [part.get("kv_connector") for part in inner["connectors"] if isinstance(part, Mapping)]
    if serving.offload is not None:
        names.append("LMCacheConnectorV1" if serving.offload_backend == "lmcache" else "OffloadingConnector")
    return names


def _stored_in_full(layers: list[Placed], serving: Serving, rules: Rules, reasons: list[str]) -> bool:
    """Whether the hybrid KV cache manager is off: told so, or for what cannot do with it."""
    if serving.hybrid_disabled is not None:
        return serving.hybrid_disabled
    names = connectors(serving)
    unable = [str(name)[:40] for name in names if name not in rules.connectors]
    if unable and len({item.spec.kind for item in layers}) > 1:
        reasons.append(f"{unable[0]} turns the hybrid KV cache manager off")
    chunks = not rules.chunks_apart and any(item.spec.kind == "chunk" for item in layers)
    return bool(unable) or chunks


def _layers(spec: ModelSpec, fmt: Formats, serving: Serving, drafted: Drafts, reasons: list[str]) -> list[Placed]:
    """Specs of every layer in order, with its pipeline stage; those that draft come last, on the last stage."""
    ranks, cpu = serving.tensor_parallel or 1, serving.device == "cpu"
    stages = serving.pipeline_parallel or 1
    if packed.packs_layers(spec):
        return packed.layers_of(spec, serving, drafted)
    dtypes = told(serving.conv_dtype, serving.state_dtype)
    of = {id(layer): specs_of(layer, spec, fmt, ranks, cpu, drafted.tokens, dtypes) for layer, _ in spec.groups}
    stage = stage_of(len(spec.layers), stages, serving.stage_layers)
    kept: dict[int, list[Spec]] = {}
    if is_packed(fmt) and not any(item.kind == "state" for specs in of.values() for item in specs):
        # The first and last two layers of a model without recurrent ones stay in the model's dtype.
        whole = fmt.replace(key=plain(fmt.model), value=plain(fmt.model))
        count = len(spec.layers)
        edge = min(2, count // 2)
        for index in (*range(edge), *range(count - edge, count)):
            kept[index] = specs_of(spec.layers[index], spec, whole, ranks, cpu)
        reasons.append(f"the first and last {edge} layers stay in {fmt.model.name}")
    out = [
        Placed(item, stage[index]) for index, layer in enumerate(spec.layers) for item in kept.get(index, of[id(layer)])
    ]
    seen: dict[int, list[Spec]] = {}
    for layer, model in drafted.layers:
        if id(layer) not in seen:
            seen[id(layer)] = specs_of(layer, model, fmt, ranks, cpu)
        out += [Placed(item, stages - 1) for item in seen[id(layer)]]
    return out


def _settings(
    spec: ModelSpec, fmt: Formats, serving: Serving, rules: Rules, specs: list[Spec], context: int, drafted: int,
    warnings: list[str],
) -> Settings:  # fmt: skip
    cpu = serving.device == "cpu"
    kinds = {item.kind for item in specs}
    latent = "latent" in kinds
    ranks = serving.tensor_parallel or 1
    block, batched = serving.block_size, serving.max_batched
    states = _states(spec, serving, rules) if "state" in kinds else "none"
    if cpu and latent:
        if "indexer" in kinds or "state" in kinds:
            raise ConfigError("kvctl does not know vLLM's plan for this latent attention on a CPU")
        block, states, batched = 16, "none", max(context, 2048)
    elif cpu:
        block = block or 128
    elif block is None and packed.packs_layers(spec):
        block = packed.BLOCK
    elif block is None and spec.model_type in MINIMAX_M3:
        block = MINIMAX_M3_BLOCK
    elif block is None:
        block, assumed = _latent_block(spec, fmt, serving, rules, sparse="indexer" in kinds) if latent else (16, "")
        warnings += [assumed] if assumed else []
    if batched is None:
        batched = max(2048 * ranks if cpu else 8192, least_batched(spec, rules.since))
        if kinds & {"window", "chunk"} and not cpu:
            warnings.append(
                "8,192 batched tokens, vLLM's default on a GPU of 70 GiB and more; --max-num-batched-tokens sets it"
            )
    # As many batches as stages are in flight, and one more with asynchronous scheduling.
    batches = 1
    if rules.overlapped and not cpu:
        batches = (serving.pipeline_parallel or 1) + (serving.async_scheduling is not False)
    if cpu and "state" in kinds:
        warnings.append("on a CPU with AVX512-BF16 vLLM keeps Mamba and delta states in float32, which takes more")
    flashinfer = rules.delta_checkpoints and serving.gdn_prefill_backend == "flashinfer"
    if (
        rules.delta_checkpoints
        and states == "align"
        and not cpu
        and serving.gdn_prefill_backend is None
        and any(item.checkpoints == "delta" for item in specs)
    ):
        warnings.append(
            "estimated: counted for Triton's prefill of gated delta layers; where FlashInfer runs it (Hopper, and "
            "Blackwell with CUDA 13) blocks are multiples of 64 and a request holds one more in each such group: "
            "--gdn-prefill-backend flashinfer"
        )
    flashkda = rules.kda_checkpoints and not cpu
    kinds_of = (("ssd", rules.ssd_checkpoints), ("delta", flashinfer), ("kda", flashkda),
                ("glm", flashkda and rules.since >= (0, 32)))  # fmt: skip
    checkpoints = tuple(kind for kind, made in kinds_of if made)
    if states == "align" and any(item.checkpoints in {"kda", "glm"}.intersection(checkpoints) for item in specs):
        warnings.append(
            "estimated: counted for FlashKDA's prefill (Hopper and Blackwell, bounded gates); where Triton runs it a "
            "request holds one block less in each group of delta layers"
        )
    return Settings(
        cpu=cpu,
        ranks=ranks,
        block=block,
        batched=batched,
        in_flight=batches * batched,
        encoder=max(batched, spec.default_encoder or 0),
        block_given=serving.block_size is not None,
        states=states,
        chunk=spec.scan_chunk or 2048,
        checkpoints=checkpoints,
        delta_step=64 if flashinfer and any(item.checkpoints == "delta" for item in specs) else 1,
        drafted=drafted if rules.draft_blocks else 0,
        context_parallel=(serving.decode_context_parallel or 1)
        * ((serving.prefill_context_parallel or 1) if rules.dealing == "both" else 1),
        latent_step=rules.latent_step,
    )


def _states(spec: ModelSpec, serving: Serving, rules: Rules) -> str:
    """What recurrent layers keep: vLLM's mamba_cache_mode."""
    default = rules.state_caching == "default" and spec.model_type not in _ATTENTION_FREE
    caching = serving.prefix_caching if serving.prefix_caching is not None else default
    if not caching or rules.state_caching == "never":
        return "none"
    each = rules.state_each_block and spec.model_type in _STATE_EACH_BLOCK
    if serving.mamba_cache_mode == "all" and not each:
        raise UsageError(f"--mamba-cache-mode all: vLLM {dotted(rules.since)} has it not for {spec.model_type[:40]}",
                         hint="--mamba-cache-mode align")  # fmt: skip
    if each and serving.mamba_cache_mode != "align":
        return "all"
    return "align" if rules.align_others else "none"
