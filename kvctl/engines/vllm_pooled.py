"""GLM-5.3 in vLLM: latents and pooled index keys side by side in a block, delta states in the places of latents.

An indexer keeps one key for a pool of tokens, and the raw keys and gates of the pool that is
still open in a ring of its own. Delta layers are dealt out to as few groups as fit a block.

Sources: vllm 0.31.0 v1/core/kv_cache_utils.py (_get_kv_cache_groups_glm5_next), 0.33.0 v1/core/kv_cache_planning.py
(_get_packed_kv_cache_groups) and models/glm5next/common/attention.py.
"""

from __future__ import annotations

import math

from kvctl.allocation import Serving
from kvctl.engines.vllm_groups import Group, Placed
from kvctl.engines.vllm_rules import Rules
from kvctl.engines.vllm_specs import Spec
from kvctl.errors import ConfigError, UsageError
from kvctl.formats import BF16, plain
from kvctl.spec import Formats, Indexer, ModelSpec

TYPES = ("glm5_next_text", "glm5_next")
_POOLS = (1, 2, 4)
"""Tokens in a pool whose kernels take the blocks that delta states ask for."""
_KERNEL_KEYS = 64
"""Keys in a page that the indexer's kernel reads."""


def check(fmt: Formats, serving: Serving) -> None:
    """Refuses what is not known of this model.

    Raises:
        ConfigError: such a plan.

    """
    if serving.device == "cpu" or (serving.pipeline_parallel or 1) > 1:
        raise ConfigError("kvctl knows vLLM's plan for GLM-5.3 on GPUs alone, without pipeline stages")
    if (serving.decode_context_parallel or 1) * (serving.prefill_context_parallel or 1) > 1:
        raise ConfigError("kvctl does not know vLLM's plan for GLM-5.3 with tokens dealt out over ranks")
    if fmt.key != plain(BF16):
        raise UsageError(f"kvctl does not know how vLLM keeps latents of 512 without a rotary part in {fmt.key.name}",
                         hint="without --kv-cache-dtype: bf16")  # fmt: skip


def pool_of(spec: ModelSpec) -> int:
    """Tokens that share an index key."""
    nested = spec.config.get("text_config")
    pool = (nested if isinstance(nested, dict) else spec.config).get("index_kpool")
    if pool not in _POOLS:
        raise ConfigError(f"{spec.id}: kvctl does not know vLLM's blocks for index keys of {str(pool)[:20]} tokens",
                          hint="published servers pool 4: --set index_kpool=4")  # fmt: skip
    assert isinstance(pool, int)
    return pool


def key_specs(state: Indexer, spec: ModelSpec, drafted: int) -> list[Spec]:
    """The pooled keys in fp8, each with a scale, and the ring of the pool that is open."""
    pool, width = pool_of(spec), state.dim // 2  # a key and a gate
    ring = pool * (1 << (-(-(pool + drafted) // pool) - 1).bit_length())
    return [Spec("indexer", (width + width // 128 * 4) // pool, 0), Spec("ring", 0, ring, page=2 * ring * width * 2)]


def groups_of(layers: list[Placed], rules: Rules) -> list[Group]:
    """Attention with its keys, the rings, and the delta layers in as many groups as the block makes necessary."""
    attention: Group = [item for item in layers if item.spec.kind in ("latent", "indexer")]
    rings: Group = [item for item in layers if item.spec.kind == "ring"]
    states: Group = [item for item in layers if item.spec.kind == "state"]
    latents = sum(item.spec.kind == "latent" for item in attention)
    fit, even = latents, latents
    if rules.since >= (0, 32):
        fit = max(sum(item.spec.page for item in attention) // states[0].spec.page, 1)
        # Places for the three kinds of layers that leave fewest empty; the largest of the best.
        counts = (latents, len(rings), len(states))
        even = min(range(latents, max(counts) + 1), key=lambda size: (sum(-count % size for count in counts), -size))
    number = max(-(-len(states) // fit), -(-len(states) // even))
    return [attention, rings, *(states[index::number] for index in range(number))]


def bytes_per_block(groups: list[Group], spec: ModelSpec, rules: Rules) -> int:
    """Bytes of one block."""
    size = max(sum(item.spec.page for item in group) for group in groups)
    if rules.since < (0, 32):
        return size
    latent, keys = groups[0][0].spec, next(item.spec for item in groups[0] if item.spec.kind == "indexer")
    kernel = math.gcd(_KERNEL_KEYS * pool_of(spec), keys.block)
    # Blocks are whole rows of latents apart, and whole pages of keys where a kernel splits them.
    step = math.lcm(latent.token_bytes, 1 if kernel == keys.block else kernel * keys.token_bytes)
    return -(-size // step) * step
