"""transformers: the caches of generate() and of continuous batching."""

from kvctl.engines.transformers.plan import check_version, kv_dtype, plan

__all__ = ["check_version", "kv_dtype", "plan"]
