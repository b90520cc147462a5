"""llama.cpp: cells, streams and states, and the lines of its log."""

from kvctl.engines.llama_cpp.plan import check_version, kv_dtype, plan

__all__ = ["check_version", "kv_dtype", "plan"]
