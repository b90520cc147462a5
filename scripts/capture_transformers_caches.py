"""Measure transformers' static, offloaded, quantized and paged caches on small models.

    python scripts/capture_transformers_caches.py OUT.json FOLDER [PART...]

Needs transformers 5.24 and torch; the quantized part also optimum-quanto and hqq. FOLDER holds
one JSON file a case, `config` (what a saved config.json holds) and `model_class`; the real
classes run with random weights on a CPU. PART is one of static, offloaded, quantized, paged,
budget; parts that are not named are kept as OUT.json has them.

What is written, by part; bytes are those of every tensor, storages once, position counters left out:
static      case: [[batch, max_cache_len, encoder positions, bytes of each layer as [value, repeats]]]
offloaded   [case, cache_implementation, tokens, most bytes on the accelerator at a time, bytes in all]
quantized   [case, cache_config, dtype, batch, tokens, generated tokens, bytes of each layer as [value, repeats]
            or null where a backend refuses]
paged       case: [bytes of a sector, sectors, bytes of the tensor, {kind: [layers, bytes of a block]}],
            or null where generate_batch() does not run
budget      {"configs", "cases": [case, settings, [sectors, bytes of a sector] or null where it refuses]}
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from itertools import groupby, product
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoConfig, GenerationConfig, cache_utils  # noqa: E402
from transformers.generation.configuration_utils import ContinuousBatchingConfig  # noqa: E402
from transformers.generation.continuous_batching import cache as paged_cache  # noqa: E402
from transformers.generation.continuous_batching.distributed import DistributedHelper  # noqa: E402

PAGE, BLOCKS = 16, 8
QUANTIZED: tuple[dict[str, Any], ...] = (
    {"backend": "quanto"}, {"backend": "quanto", "nbits": 2, "residual_length": 4}, {"backend": "hqq", "nbits": 4},
    {"backend": "hqq", "nbits": 2, "residual_length": 3}, {"backend": "fp8"},
)  # fmt: skip
ON_LLAMA: tuple[dict[str, Any], ...] = (
    {"backend": "quanto", "axis_key": -1, "axis_value": -1}, {"backend": "quanto", "q_group_size": 32, "residual_length": 1},
    {"backend": "quanto", "q_group_size": 768}, {"backend": "hqq", "nbits": 1}, {"backend": "hqq", "nbits": 3},
    {"backend": "hqq", "nbits": 8, "residual_length": 0}, {"backend": "hqq", "axis_key": 1, "axis_value": 1},
    {"backend": "hqq", "q_group_size": 16, "axis_value": 1},
)  # fmt: skip


def real(value: Any) -> Any:
    """A configuration with its infinities."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: real(inner) for key, inner in value.items()}
    return [real(inner) for inner in value] if isinstance(value, list) else value


def model_of(case: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, case["model_class"])(AutoConfig.for_model(**real(case["config"])))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    model.generation_config.decoder_start_token_id = 1
    return model.to(dtype).eval()


def stored(value: Any, seen: set[int]) -> int:
    """Bytes of the tensors in a value; tensors of subclasses are their parts."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            return sum(stored(getattr(value, name), seen) for name in value.__tensor_flatten__()[0])
        where = value.untyped_storage().data_ptr()
        if where in seen:
            return 0
        seen.add(where)
        return int(value.untyped_storage().nbytes())
    if isinstance(value, dict):
        value = list(value.values())
    return sum(stored(inner, seen) for inner in value) if isinstance(value, (list, tuple)) else 0


def layer_bytes(layer: Any, seen: set[int]) -> int:
    # A tensor without dimensions among the attributes is a position counter.
    return stored([v for v in vars(layer).values() if not (isinstance(v, torch.Tensor) and not v.dim())], seen)


def logical_bytes(cache: Any, away: frozenset[int] | set[int] = frozenset()) -> int:
    """Bytes of what the tensors show, without the layers that are away; a copy to another device takes just this."""
    shown = [
        tensor
        for index, layer in enumerate(cache.layers) if index not in away
        for value in vars(layer).values()
        for tensor in (value.values() if isinstance(value, dict) else [value])
        if isinstance(tensor, torch.Tensor) and tensor.dim()
    ]  # fmt: skip
    return sum(tensor.numel() * tensor.element_size() for tensor in shown)


def stacks(cache: Any) -> list[Any]:
    whole = not isinstance(cache, cache_utils.EncoderDecoderCache)
    return [cache] if whole else [cache.self_attention_cache, cache.cross_attention_cache]


def by_layer(cache: Any) -> list[list[int]]:
    seen: set[int] = set()
    totals: dict[int, int] = {}
    for stack in stacks(cache):
        for index, layer in enumerate(stack.layers):
            totals[index] = totals.get(index, 0) + layer_bytes(layer, seen)
    values = [totals[index] for index in sorted(totals)]
    return [[value, len(list(group))] for value, group in groupby(values)]


def own_state(model: Any) -> None:
    """Refuses models that keep state on their modules, where no cache counts it."""
    names = {
        name
        for module in model.modules()
        for name in vars(module)
        if name.endswith(("recurrent_states", "conv1d_state"))
    }
    if names:
        raise TypeError(f"keeps {' and '.join(sorted(names))} on its modules")


def generated(model: Any, batch: int, prompt: int, new: int, **settings: Any) -> Any:
    """The cache after generate(); its last token is never cached."""
    ids = torch.randint(3, 100, (batch, prompt))
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        # Whatever its encoder takes, ten positions come out of it.
        width = model.config.hidden_size
        states = torch.randn(batch, 10, width, dtype=model.dtype)
        inputs = {"encoder_outputs": transformers.modeling_outputs.BaseModelOutput(last_hidden_state=states),
                  "decoder_input_ids": torch.cat([torch.ones_like(ids[:, :1]), ids[:, 1:]], 1)}  # fmt: skip
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False, num_beams=1,
                             return_dict_in_generate=True, disable_compile=True, **settings)  # fmt: skip
    return out.cache


def static(cases: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, case in cases.items():
        runs = []
        model = model_of(case)
        own_state(model)
        for batch, length in ((1, 24), (2, 40)):
            model._previous_max_cache_length = -1
            cache = generated(model, batch, length - 2, 3, cache_implementation="static")
            if not all(type(stack) is cache_utils.StaticCache for stack in stacks(cache)):
                raise TypeError(f"made a {type(cache).__name__}")
            lengths = {layer.keys.shape[2] for layer in stacks(cache)[0].layers
                       if type(layer) is cache_utils.StaticLayer and layer.is_initialized}  # fmt: skip
            if lengths - {length}:
                raise TypeError(f"sizes its cache itself: {lengths}")
            encoder = stacks(cache)[1].get_max_length() if len(stacks(cache)) > 1 else 0
            runs.append([batch, length, encoder, by_layer(cache)])
        yield name, runs


class _Stream:
    """A stream on a machine without any."""

    def wait_stream(self, other: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


def on_accelerator(model: Any, kind: str, tokens: int) -> list[int]:
    """Most bytes at a time that are not in host memory, and bytes in all, over one more token."""
    with (
        mock.patch.object(torch, "Stream", _Stream),
        mock.patch.object(torch.cuda, "default_stream", return_value=_Stream()),
    ):
        config = model.config.get_text_config(decoder=True)
        cache = (cache_utils.StaticCache(config, max_cache_len=tokens, offloading=True) if "static" in kind
                 else cache_utils.DynamicCache(config=config, offloading=True))  # fmt: skip
        away: set[int] = set()
        most = 0

        def watch(index: int, layer: Any) -> None:
            offload, prefetch = layer.offload, layer.prefetch

            def leave() -> None:
                nonlocal most
                most = max(most, logical_bytes(cache, away))
                away.add(index)
                offload()

            def come() -> None:
                away.discard(index)
                prefetch()

            layer.offload, layer.prefetch = leave, come

        for index, layer in enumerate(cache.layers):
            watch(index, layer)
        ids = torch.randint(3, 100, (1, tokens))
        with torch.no_grad():
            model(ids[:, :-1], cache=cache, use_cache=True)
            most = 0
            model(ids[:, -1:], cache=cache, use_cache=True)
        return [max(most, logical_bytes(cache, away)), logical_bytes(cache)]


def offloaded(cases: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, case in cases.items():
        model = model_of(case)
        own_state(model)
        if not model.config.is_encoder_decoder:
            for kind in ("offloaded", "offloaded_static"):
                most, whole = on_accelerator(model, kind, 24)
                if whole:
                    yield name, [kind, 24, most, whole]


def quantized(cases: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, case in cases.items():
        model = model_of(case)
        config = model.config.get_text_config(decoder=True)
        if config.is_encoder_decoder or set(cache_utils.get_layer_types_and_kwargs(config)[0]) != {"full_attention"}:
            continue
        for settings in (*QUANTIZED, *(ON_LLAMA if name == "llama" else ())):
            for dtype, batch, new in ((torch.bfloat16, 1, 1), (torch.bfloat16, 2, 9)) + ((torch.float32, 1, 4),) * (
                name == "llama"
            ):
                try:
                    cache = generated(
                        model.to(dtype), batch, 24, new, cache_implementation="quantized", cache_config=dict(settings)
                    )
                    layers = by_layer(cache)
                except (AssertionError, RuntimeError, ValueError):
                    layers = None
                yield name, [settings, str(dtype).removeprefix("torch."), batch, 24 + new - 1, new - 1, layers]


def pool(config: Any, settings: dict[str, Any], ranks: int = 1) -> Any:
    helper = DistributedHelper(None, None, {})
    helper.tp_size, helper.are_kv_heads_tp_ed, helper.tp_all_reduce_min = ranks, lambda: True, lambda x: x
    return paged_cache.PagedAttentionCache(
        config, ContinuousBatchingConfig(**settings), "cpu", helper, torch.bfloat16, True
    )


def paged(cases: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, case in cases.items():
        config = AutoConfig.for_model(**real(case["config"])).get_text_config()
        config._attn_implementation = "sdpa"
        settings = {"page_size": PAGE, "num_blocks": BLOCKS, "max_batch_tokens": 64, "max_memory_percent": 1.0}
        try:
            prompts = torch.randint(3, 100, (2, 20)).tolist()
            out = model_of(case, torch.float32).generate_batch(
                prompts, GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0),
                ContinuousBatchingConfig(**settings), progress_bar=False)  # fmt: skip
            if any(len(answer.generated_tokens) != 4 for answer in out.values()):
                raise ValueError("does not run")
            settings |= {"max_blocks_per_request": 0, "use_async_batching": False, "max_requests_per_batch": 4}
            made = pool(config, settings)
        except Exception:
            yield name, None
            continue
        kinds = {key: [len(a.layer_indices), a.bytes_per_block] for key, a in made.cache_allocators.items()}
        yield name, [made.bytes_per_sector, made.num_sectors, made.cache_tensor.untyped_storage().nbytes(), kinds]


BUDGET = ("llama", "gemma3_text", "mistral", "qwen3_moe", "gpt_oss")


def budget(cases: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What the planner of the pool makes of a memory that is given to it, with a GPU's settings too."""
    for name in BUDGET:
        if name not in cases:
            continue
        for flash, memory, batched, page, ranks, overlap, requests in product(
            (True, False), (10**8 + 7, 2**28), (64, 1024), (16, 256), (1, 2), (True, False), (1024, 7)
        ):
            config = AutoConfig.for_model(**real(cases[name]["config"]))
            config._attn_implementation = "flash_attention_2" if flash else "sdpa"
            windows = paged_cache.SLIDING_ATTENTION in paged_cache.group_layers_by_attn_type(config)
            settings = {"page_size": page, "max_batch_tokens": batched, "max_memory_percent": 1.0, "use_async_batching": overlap,
                        "max_blocks_per_request": 32 if flash and not windows else 0, "max_requests_per_batch": requests}  # fmt: skip
            with mock.patch.object(paged_cache, "get_device_and_memory_breakdown", lambda m=memory: (None, m, 0, 0)):
                try:
                    made = pool(config, settings, ranks)
                    result = [made.num_sectors, made.bytes_per_sector]
                except (ValueError, MemoryError):
                    result = None
            yield name, [[flash, memory, batched, page, ranks, overlap, requests], result]


PARTS = {"static": static, "offloaded": offloaded, "quantized": quantized, "paged": paged, "budget": budget}


def main() -> None:
    out, folder, wanted = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] or list(PARTS)
    transformers.logging.set_verbosity_error()
    cases = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    found = json.loads(out.read_text()) if out.exists() else {}
    found["measured"] = f"transformers {transformers.__version__}, torch {torch.__version__}"
    for part in wanted:
        found[part] = {} if part in ("static", "paged") else []
        skipped = []
        for name, case in cases.items():
            try:
                for _, result in PARTS[part]({name: case}):
                    if isinstance(found[part], dict):
                        found[part][name] = result
                    else:
                        found[part].append([name, *result])
            except Exception as err:
                skipped.append(f"{name} ({type(err).__name__}: {str(err)[:60]})")
        print(f"{part}: {len(found[part])} results; not measured: {'; '.join(skipped)}", flush=True)
    found["configs"] = {name: cases[name]["config"] for name in BUDGET if name in cases}
    rows = []
    for key, value in found.items():
        if isinstance(value, dict):
            inner = ",\n".join(f"{json.dumps(k)}:{json.dumps(v, separators=(',', ':'))}" for k, v in value.items())
            rows.append(f'"{key}":{{\n{inner}}}')
        elif isinstance(value, list):
            rows.append(f'"{key}":[\n' + ",\n".join(json.dumps(row, separators=(",", ":")) for row in value) + "]")
        else:
            rows.append(f'"{key}":{json.dumps(value)}')
    out.write_text("{" + ",\n".join(rows) + "}\n")


if __name__ == "__main__":
    main()
