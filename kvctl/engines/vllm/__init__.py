"""vLLM: groups, blocks and capacity, by the rules of its version."""

from kvctl.engines.vllm.plan import check_version, kv_dtype, plan

__all__ = ["check_version", "kv_dtype", "plan"]
