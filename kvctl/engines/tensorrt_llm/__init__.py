"""TensorRT-LLM: blocks of its two cache managers."""

from kvctl.engines.tensorrt_llm.plan import check_version, kv_dtype, plan

__all__ = ["check_version", "kv_dtype", "plan"]
