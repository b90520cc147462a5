"""SGLang: pools of tokens, windows and states."""

from kvctl.engines.sglang.plan import check_version, kv_dtype, plan

__all__ = ["check_version", "kv_dtype", "plan"]
