"""Lines that SGLang prints about its pools.

Sources: sglang 0.5.23 srt/mem_cache/memory_pool.py, swa_memory_pool.py, pool_host/base.py, managers/scheduler.py.
GB there are GiB, but for the cache in host memory. What a line holds that depends on the machine is "…".
"""

from __future__ import annotations

from kvctl.allocation import Serving
from kvctl.engines.sglang.budget import Pool, Settings, allocated, capped, windowed_tokens
from kvctl.engines.sglang.pools import TORCH_NAMES, Layout, Stage
from kvctl.errors import ConfigError
from kvctl.spec import Formats
from kvctl.units import GIB


def lines(laid: Layout, fmt: Formats, context: int, serving: Serving, settings: Settings, pool: Pool) -> list[str]:
    """What start-up prints about pools, stage by stage, each line once."""
    found: list[str] = []
    for stage in laid.stages:
        if laid.windowed is not None and not capped(serving, settings):
            found += _windows(settings, pool)
        if stage.stateful and pool.slots:
            found.append(_states(laid, stage, serving, settings, pool))
        found += _caches(laid, stage, fmt, settings, pool)
        if laid.windowed is not None and settings.rules.since >= (0, 5, 8):
            total = allocated(laid, stage, pool, settings) / GIB
            found.append(f"SWAKVPool mem usage: {total:.2f} GB, swa size: {pool.windowed}, full size: {pool.tokens}")
    copies = serving.decode_context_parallel or 1
    if settings.drafts == 1 and serving.draft is None and laid.full is not None and laid.windowed is None:
        rows = pool.tokens * copies + settings.page * copies
        row = (laid.full.key + laid.full.index // copies, laid.full.value)
        found.append(_cache(laid, fmt, settings, pool.tokens * copies, rows * row[0], rows * row[1]))
    if serving.host_ratio is not None or serving.host_gb is not None:
        found.append(_host(laid, serving, settings, pool))
    chunk = f"chunked_prefill_size={serving.max_batched}, max_prefill_tokens=16384" if serving.max_batched else "…"
    # Without a budget the number of states is open, and with it that of requests.
    requests = f"max_running_requests={pool.requests}" if pool.slots or not laid.states else "…"
    found.append(f"max_total_num_tokens={pool.tokens * copies}, {chunk}, {requests}, context_len={context}")
    return list(dict.fromkeys(found))


def _windows(settings: Settings, pool: Pool) -> list[str]:
    """How tokens are split; what the budget holds comes first, then what --max-total-tokens leaves of it."""
    use = f"Use {'S' if settings.rules.split == 'tokens' else 's'}liding window memory pool"
    found = [f"{use}. full_layer_tokens={pool.tokens}, swa_layer_tokens={pool.windowed}"]
    if settings.rules.split == "cell" and pool.fits > pool.tokens:
        windowed = windowed_tokens(pool.fits, settings)
        found.insert(0, f"{use}. full_layer_tokens={pool.fits}, swa_layer_tokens={windowed}")
    return found


def _states(laid: Layout, stage: Stage, serving: Serving, settings: Settings, pool: Pool) -> str:
    conv, matrix = laid.conv * stage.stateful, laid.matrix * stage.stateful
    line = (
        f"Mamba Cache is allocated. max_mamba_cache_size: {pool.slots}, "
        f"conv_state size: {(pool.slots + 1) * conv / GIB:.2f}GB, ssm_state size: {(pool.slots + 1) * matrix / GIB:.2f}GB"
    )
    tokens = serving.draft_tokens
    if not tokens:
        return line
    # Windows of draft tokens overlap, where it can be: each needs one column more.
    overlap = laid.columns if settings.rules.since >= (0, 5, 16) else 0
    copies = conv // overlap * (tokens + overlap - 1) if overlap else conv * tokens
    return (
        f"{line} intermediate_ssm_state_cache size: {(pool.requests + 1) * matrix * tokens / GIB:.2f}GB "
        f"intermediate_conv_window_cache size: {(pool.requests + 1) * copies / GIB:.2f}GB"
    )


def _cache(laid: Layout, fmt: Formats, settings: Settings, tokens: int, key: int, value: int, label: str = "") -> str:
    name = f"dtype: torch.{TORCH_NAMES.get(fmt.key.name, fmt.key.name)}, " if settings.rules.named_dtype else ""
    size = (
        f"KV size: {key / GIB:.2f} GB" if laid.latent else f"K size: {key / GIB:.2f} GB, V size: {value / GIB:.2f} GB"
    )
    return f"{label if settings.rules.labels else ''}KV Cache is allocated. {name}#tokens: {tokens}, {size}"


def _caches(laid: Layout, stage: Stage, fmt: Formats, settings: Settings, pool: Pool) -> list[str]:
    """One line for each pool of keys and values, its page for padded tokens included."""
    # The first pools of windowed layers had pages of one token, whatever was asked for.
    spare = 1 if laid.windowed is not None and settings.rules.split == "tokens" else settings.page
    found: list[str] = []
    if laid.latent and settings.rules.since < (0, 4, 6):
        return found  # pools of latents were not logged yet
    if laid.full is not None:
        rows = pool.tokens + spare
        key = laid.full.key * stage.full + laid.full.index * stage.indexed
        label = "Full " if laid.windowed is not None else ""
        found.append(_cache(laid, fmt, settings, pool.tokens, rows * key, rows * laid.full.value * stage.full, label))
    if laid.windowed is not None:
        rows = (pool.windowed + spare) * stage.windowed
        sizes = rows * laid.windowed.key, rows * laid.windowed.value
        found.append(_cache(laid, fmt, settings, pool.windowed, *sizes, "SWA "))
    return found if settings.rules.labels else found[::-1]


def _host(laid: Layout, serving: Serving, settings: Settings, pool: Pool) -> str:
    """The cache in host memory (HiCache): a page more than asked for; GB are 10^9 bytes."""
    known = settings.rules.since >= (0, 5, 13) and len(laid.stages) == 1
    if laid.full is None or laid.full.index or laid.windowed is not None or laid.states or not known:
        raise ConfigError("kvctl does not know SGLang's cache in host memory for this model or version")
    row = laid.full_row(laid.stages[0])
    tokens = int(serving.host_gb * 1e9 // row) if serving.host_gb else int(pool.tokens * (serving.host_ratio or 2.0))
    tokens = (tokens // settings.page + 1) * settings.page
    if settings.rules.since < (0, 5, 17):
        return f"Allocating {tokens * row / 1e9:.2f} GB host memory for hierarchical KV cache."
    return f"Allocating kv hierarchical KV host pool: {tokens} tokens, {tokens * row / 1e9:.2f} GB host memory."
