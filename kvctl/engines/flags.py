"""Options that change what an engine reserves, under every engine's own names.

One row a setting: which engines have it, how each spells it, how its value is read. The
command line, `--engine-args`, the man page and the completions all follow from `FLAGS`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kvctl.allocation import MOST_SLOTS, Serving
from kvctl.errors import UsageError
from kvctl.record import Record
from kvctl.units import parse_bytes, parse_tokens

DEVICES = ("gpu", "cpu")


class Kind(Record):
    """How the value of a flag is read: `read(text, spelling, flag)`; None is a switch."""

    metavar: str
    read: Callable[[str, str, Flag], Any] | None


class Flag(Record):
    """One setting of an engine's start."""

    field: str
    """Where it goes in `Serving`."""
    kind: Kind
    names: Mapping[str, tuple[str, ...]]
    """Spellings by engine; "" stands for kvctl's own, which every engine of the row understands."""
    help: str
    low: float = 1
    high: float = 2**20
    choices: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    """Spellings of a switch that turn it off."""
    value: Any = True
    """What a switch sets."""

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name)

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every spelling as an option, long ones first; settings of the environment have none."""
        every = dict.fromkeys(name for names in self.names.values() for name in names if name.startswith("-"))
        return tuple(sorted(every, key=lambda name: not name.startswith("--")))

    def narrowed(self, engines: Collection[str], taken: Collection[str]) -> Flag:
        """The same for some engines alone, without spellings that something else has."""
        names = {
            engine: tuple(name for name in own if name not in taken)
            for engine, own in self.names.items()
            if not engine or engine in engines
        }
        return self.replace(names=names if any(names) else {})

    @property
    def key(self) -> str:
        """A name for it that is unique in the table."""
        return self.spellings[0].lstrip("-").replace("-", "_") if self.spellings else self.field

    def read(self, text: str, spelling: str) -> Any:
        """The value that `text` stands for."""
        assert self.kind.read is not None
        return self.kind.read(text, spelling, self)


# -- values ---------------------------------------------------------------------------------


def _count(text: str, spelling: str, flag: Flag) -> int:
    try:
        value = int(text.strip().replace("_", "")) if len(text) <= 40 else None
    except ValueError:
        value = None
    if value is None:
        raise UsageError(f"{spelling}: {text[:40]!r} is not a whole number")
    return int(_bounded(value, spelling, flag))


def _bounded(value: float, spelling: str, flag: Flag) -> float:
    if not flag.low <= value <= flag.high:
        raise UsageError(f"{spelling}: {value:g} is out of range" if isinstance(value, float)
                         else f"{spelling}: {value} is out of range", hint=f"from {flag.low:,} to {flag.high:,}")  # fmt: skip
    return value


def _tokens(text: str, spelling: str, flag: Flag) -> int:
    value = parse_tokens(text, what=spelling)
    if value < flag.low:
        raise UsageError(f"{spelling}: {value} is out of range", hint=f"at least {flag.low:,}")
    return value


def _bytes(text: str, spelling: str, flag: Flag) -> int:
    value = parse_bytes(text, what=spelling)
    if value < 1024 and text.strip().replace(".", "", 1).isdigit():
        raise UsageError(f"{spelling}: {text.strip()} bytes hold nothing", hint=f"did you mean {text.strip()}GiB?")
    return value


def _number(text: str, spelling: str, flag: Flag) -> float:
    try:
        value = float(text) if len(text) <= 40 else float("nan")
    except ValueError:
        value = float("nan")
    if value != value:
        raise UsageError(f"{spelling}: {text[:40]!r} is not a number")
    return _bounded(value, spelling, flag)


def _gib(text: str, spelling: str, flag: Flag) -> int:
    """GiB as a bare number, as vLLM reads it; kvctl's own units are understood too."""
    bare = text.strip().replace(".", "", 1).isdigit()
    return parse_bytes(text + "GiB" if bare else text, what=spelling)


def _choice(text: str, spelling: str, flag: Flag) -> str:
    if text.lower() not in flag.choices:
        raise UsageError(f"{spelling}: unknown value {text[:40]!r}", hint="one of " + ", ".join(flag.choices))
    return text.lower()


def _on_off(text: str, spelling: str, flag: Flag) -> bool | None:
    # llama.cpp's words for the three.
    known = {"auto": None, "-1": None, "on": True, "enabled": True, "true": True, "1": True,
             "off": False, "disabled": False, "false": False, "0": False}  # fmt: skip
    if text.lower() not in known:
        raise UsageError(f"{spelling}: unknown value {text[:40]!r}", hint="one of auto, on, off")
    return known[text.lower()]


def _object(text: str, spelling: str, flag: Flag) -> Mapping[str, Any]:
    import json

    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"{spelling}: {text[:60]!r} is not a JSON object",
                         hint="""quote it for the shell: '{"method": "mtp", "num_speculative_tokens": 1}'""")  # fmt: skip
    return value


def _counts(text: str, spelling: str, flag: Flag) -> tuple[int, ...]:
    return tuple(_count(part, spelling, flag) for part in text.strip("[]() ").split(","))


def _text(text: str, spelling: str, flag: Flag) -> str:
    if not text.strip():
        raise UsageError(f"{spelling} is empty")
    return text.strip()


def _layers(text: str, spelling: str, flag: Flag) -> int | None:
    """A number of layers; all of them for llama.cpp's words for that."""
    return None if text.lower() in ("all", "auto", "-1", "-2") else _count(text, spelling, flag)


def _shares(text: str, spelling: str, flag: Flag) -> tuple[float, ...]:
    return tuple(_number(part, spelling, flag) for part in text.replace("/", ",").split(","))


def _margin(text: str, spelling: str, flag: Flag) -> int | None:
    """MiB to leave free; off leaves none, and on the usual ones."""
    known = _on_off(text, spelling, flag) if not text.strip().isdigit() else None
    return 0 if known is False else None if not text.strip().isdigit() else _count(text, spelling, flag)


SWITCH = Kind("", None)
LAYERS = Kind("N", _layers)
SHARES = Kind("N,N,…", _shares)
MARGIN = Kind("MIB", _margin)
COUNT = Kind("N", _count)
TOKENS = Kind("TOKENS", _tokens)
BYTES = Kind("SIZE", _bytes)
GIB = Kind("GIB", _gib)
NUMBER = Kind("X", _number)
CHOICE = Kind("NAME", _choice)
ON_OFF = Kind("NAME", _on_off)
OBJECT = Kind("JSON", _object)
TEXT = Kind("NAME", _text)
COUNTS = Kind("N,N,…", _counts)


# -- the table ------------------------------------------------------------------------------


FLAGS: tuple[Flag, ...] = (
    Flag("kv_budget", BYTES, {"": ("--kv-budget",), "vllm": ("--kv-cache-memory-bytes",), "llama.cpp": (),
         "tensorrt-llm": (), "ollama": (), "transformers": (), "sglang": ()},
         "Memory for the cache on each GPU: 16GiB, 16GB or bytes. An engine then says how many tokens fit."),
    Flag("device", CHOICE, {"": ("--device",), "vllm": (), "transformers": (), "sglang": ()},
         "gpu or cpu: an engine's rules differ. Default: gpu.",
         choices=DEVICES),
    Flag("tensor_parallel", COUNT, {"vllm": ("--tensor-parallel-size", "-tp"),
         "tensorrt-llm": ("--tp_size", "--tensor_parallel_size"), "transformers": (),
         "sglang": ("--tensor-parallel-size", "--tp-size", "--tp")},
         "GPUs that share every layer.",
         high=1024),
    Flag("pipeline_parallel", COUNT, {"vllm": ("--pipeline-parallel-size", "-pp"),
         "tensorrt-llm": ("--pp_size", "--pipeline_parallel_size"),
         "sglang": ("--pipeline-parallel-size", "--pp-size")},
         "Stages that the layers are divided over.",
         high=1024),
    Flag("stage_layers", COUNTS, {"vllm": ("VLLM_PP_LAYER_PARTITION",), "sglang": ("SGLANG_PP_LAYER_PARTITION",)},
         "Layers of every pipeline stage."),
    Flag("data_parallel", COUNT, {"vllm": ("--data-parallel-size", "-dp"),
         "sglang": ("--data-parallel-size", "--dp-size", "--dp")},
         "Engines side by side, each with a cache of its own.",
         high=4096),
    Flag("expert_parallel", SWITCH, {"vllm": ("--enable-expert-parallel", "-ep")},
         "Keep experts whole and spread them over the ranks: weights alone differ.",
         off=("--no-enable-expert-parallel",)),
    Flag("decode_context_parallel", COUNT, {"vllm": ("--decode-context-parallel-size", "-dcp"),
         "sglang": ("--decode-context-parallel-size", "--dcp-size")},
         "Ranks of --tensor-parallel-size over which tokens of the cache are dealt out.",
         high=1024),
    Flag("prefill_context_parallel", COUNT, {"vllm": ("--prefill-context-parallel-size", "-pcp")},
         "Ranks that share a prompt.",
         high=1024),
    Flag("block_size", COUNT, {"vllm": ("--block-size",), "tensorrt-llm": ("--tokens-per-block",),
         "transformers": ("--cb-block-size",), "sglang": ("--page-size",)},
         "Tokens in a block. Default: the engine's."),
    Flag("num_blocks", COUNT, {"vllm": ("--num-gpu-blocks-override",), "transformers": ("--cb-num-blocks",)},
         "Blocks of the cache, whatever its budget.",
         high=2**40),
    Flag("max_batched", TOKENS, {"vllm": ("--max-num-batched-tokens",), "transformers": ("--cb-max-batch-tokens",),
         "sglang": ("--chunked-prefill-size",)},
         "Tokens in a batch: windows hold those in flight. Default: 8192; 2048 on a CPU."),
    Flag("max_sequences", COUNT, {"vllm": ("--max-num-seqs",), "tensorrt-llm": ("--max_batch_size",),
         "transformers": ("--max-requests-per-batch",), "sglang": ("--max-running-requests",)},
         "Requests in a batch at most."),
    Flag("utilization", NUMBER, {"vllm": ("--gpu-memory-utilization",),
         "tensorrt-llm": ("--kv_cache_free_gpu_memory_fraction", "--free_gpu_memory_fraction"),
         "transformers": ("--cb-max-memory-percent",), "sglang": ("--mem-fraction-static",)},
         "Share of a GPU's memory that the engine may take. The bytes that this leaves for the cache go to "
         "--kv-budget.",
         low=0.01, high=1),
    Flag("enforce_eager", SWITCH, {"vllm": ("--enforce-eager",)},
         "Capture no CUDA graphs.",
         off=("--no-enforce-eager",)),
    Flag("capture_sizes", COUNTS, {"vllm": ("--cudagraph-capture-sizes", "--cuda-graph-sizes")},
         "Batch sizes that CUDA graphs are captured for."),
    Flag("chunked_prefill", SWITCH, {"vllm": ("--enable-chunked-prefill",)},
         "Whether prompts are cut into batches.",
         off=("--no-enable-chunked-prefill",)),
    Flag("cpu_offload", GIB, {"vllm": ("--cpu-offload-gb",), "sglang": ("--cpu-offload-gb",)},
         "Weights of each GPU that stay in host memory: GiB, or with a unit."),
    Flag("gpu_layers", LAYERS, {"llama.cpp": ("--n-gpu-layers", "-ngl", "--gpu-layers")},
         "Layers on the GPUs, with their part of the cache; the others stay with the CPU. Default: all.",
         low=0),
    Flag("tensor_split", SHARES, {"llama.cpp": ("--tensor-split", "-ts")},
         "Shares of the layers that GPUs get. Default: by their free memory.",
         low=0),
    Flag("fit_margin", MARGIN, {"llama.cpp": ("--fit-target", "--fit", "-fit")},
         "MiB that llama.cpp leaves free on each GPU; off leaves none. Default: 1024.",
         low=0),
    Flag("attention_dp", SWITCH, {"tensorrt-llm": ("--enable-attention-dp",), "sglang": ("--enable-dp-attention",)},
         "Every rank keeps whole heads, for requests of its own."),
    Flag("max_tokens", TOKENS, {"tensorrt-llm": ("--max-tokens",), "sglang": ("--max-total-tokens",)},
         "Tokens of the cache at most."),
    Flag("attention_windows", COUNTS, {"tensorrt-llm": ("--max-attention-window",)},
         "Tokens that layers keep, repeated over the layers."),
    Flag("second_manager", ON_OFF, {"tensorrt-llm": ("--use-kv-cache-manager-v2",)},
         "Which cache manager of TensorRT-LLM: on, off or auto.",
         choices=("auto", "on", "off")),
    Flag("offload", GIB, {"vllm": ("--kv-offloading-size",), "transformers": ("--cpu-offload-space",)},
         "Host memory for blocks that leave the GPU, over all ranks: GiB, or with a unit."),
    Flag("offload_backend", CHOICE, {"vllm": ("--kv-offloading-backend",)},
         "What moves blocks to host memory.", choices=("native", "lmcache")),
    Flag("kv_transfer", OBJECT, {"vllm": ("--kv-transfer-config",)},
         "What moves the cache elsewhere: with some connectors windowed layers keep every token."),
    Flag("kv_budget", GIB, {"vllm": ("VLLM_CPU_KVCACHE_SPACE",)}, "Memory for the cache on a CPU, in GiB."),
    Flag("lmcache_size", GIB, {"vllm": ("LMCACHE_MAX_LOCAL_CPU_SIZE",)}, "Host memory of LMCache on each rank, in GiB."),
    Flag("lmcache_chunk", COUNT, {"vllm": ("LMCACHE_CHUNK_SIZE",)}, "Tokens of a chunk of LMCache."),
    Flag("async_scheduling", SWITCH, {"vllm": ("--async-scheduling",)},
         "Whether a second batch is scheduled while one runs. Default: yes, from vLLM 0.26 on.",
         off=("--no-async-scheduling",)),
    Flag("prefix_caching", SWITCH, {"vllm": ("--enable-prefix-caching",)},
         "Keep blocks for later requests; recurrent layers then hold more. Default: the engine's.",
         off=("--no-enable-prefix-caching",)),
    Flag("mamba_cache_mode", CHOICE, {"vllm": ("--mamba-cache-mode",)},
         "What recurrent layers keep for prefix caching. Default: by model and version.",
         choices=("none", "align", "all")),
    Flag("conv_dtype", CHOICE, {"vllm": ("--mamba-cache-dtype",)},
         "Dtype of recurrent layers' states (vLLM). Default: the model's.",
         choices=("auto", "float32", "float16", "bfloat16")),
    Flag("state_dtype", CHOICE, {"vllm": ("--mamba-ssm-cache-dtype",)},
         "Dtype of the recurrent states alone (vLLM). Default: the configuration's, or that of --mamba-cache-dtype.",
         choices=("auto", "float32", "float16", "bfloat16")),
    Flag("gdn_prefill_backend", CHOICE, {"vllm": ("--gdn-prefill-backend",)},
         "What runs the prefill of gated delta layers: FlashInfer keeps a block more.",
         choices=("triton", "flashinfer", "cutedsl")),
    Flag("hybrid_disabled", SWITCH, {"vllm": ("--disable-hybrid-kv-cache-manager",)},
         "Keep every token of windowed layers, as some connectors need.",
         off=("--no-disable-hybrid-kv-cache-manager",)),
    Flag("hybrid_disabled", SWITCH, {"sglang": ("--disable-hybrid-swa-memory",)},
         "Keep every token of windowed layers."),
    Flag("speculative", OBJECT, {"vllm": ("--speculative-config", "-sc")},
         "How tokens are drafted: method, num_speculative_tokens, model. Draft layers have a cache too."),
    Flag("prefix_caching", SWITCH, {"sglang": ("--disable-radix-cache",)},
         "Keep nothing for later requests.",
         value=False),
    Flag("swa_ratio", NUMBER, {"sglang": ("--swa-full-tokens-ratio",)},
         "Tokens of windowed layers for each token of full ones. Default: 0.8.",
         low=1e-06, high=1),
    Flag("mamba_ratio", NUMBER, {"sglang": ("--mamba-full-memory-ratio",)},
         "Memory of recurrent states for each byte of the cache that grows. Default: 0.9.",
         low=1e-06, high=1000),
    Flag("mamba_slots", COUNT, {"sglang": ("--max-mamba-cache-size",)},
         "Recurrent states that SGLang keeps.",
         high=2**30),
    Flag("mamba_strategy", CHOICE, {"sglang": ("--mamba-radix-cache-strategy", "--mamba-scheduler-strategy")},
         "How SGLang keeps recurrent states for prefixes.",
         choices=("auto", "no_buffer", "extra_buffer", "extra_buffer_lazy")),
    Flag("state_dtype", CHOICE, {"sglang": ("--mamba-ssm-dtype",)},
         "Dtype of recurrent states.",
         choices=("float32", "bfloat16", "float16")),
    Flag("attention_backend", TEXT, {"sglang": ("--attention-backend",), "vllm": ("--attention-backend", "VLLM_ATTENTION_BACKEND")},
         "Kernels of attention: some need pages of their own size, or keep fp8 in their own layout (vLLM)."),
    Flag("sparse_backend", CHOICE, {"sglang": ("--dsa-decode-backend", "--dsa-prefill-backend")},
         "Kernels of sparse latent attention.",
         choices=("flashmla_sparse", "flashmla_kv", "flashmla_auto", "flashmla_prefill", "flashmla_decode", "fa3",
                  "tilelang", "aiter", "trtllm")),
    Flag("speculative_algorithm", TEXT, {"sglang": ("--speculative-algorithm",), "llama.cpp": ("--spec-type",)},
         "How tokens are drafted: SGLang's EAGLE, EAGLE3, NEXTN, STANDALONE, NGRAM; llama.cpp's draft-mtp, ngram-…."),
    Flag("draft_path", TEXT, {"sglang": ("--speculative-draft-model-path",)},
         "The model that drafts."),
    Flag("draft_tokens", COUNT, {"sglang": ("--speculative-num-draft-tokens",), "llama.cpp": ("--spec-draft-n-max",)},
         "Tokens verified in a step, or drafted (llama.cpp: 3).",
         high=1024),
    Flag("draft_key", TEXT, {"llama.cpp": ("--spec-draft-type-k", "--cache-type-k-draft", "-ctkd")},
         "Type of the keys of draft layers. Default: f16."),
    Flag("draft_value", TEXT, {"llama.cpp": ("--spec-draft-type-v", "--cache-type-v-draft", "-ctvd")},
         "Type of the values of draft layers. Default: f16."),
    Flag("host_ratio", NUMBER, {"sglang": ("--hicache-ratio",)},
         "Tokens of SGLang's cache in host memory for each one on the GPU.",
         low=0, high=1000),
    Flag("host_gb", NUMBER, {"sglang": ("--hicache-size",)},
         "Size of SGLang's cache in host memory, in GB (10^9).",
         low=0, high=1e+06),
    Flag("slots", COUNT, {"llama.cpp": ("--parallel", "-np"), "ollama": ("OLLAMA_NUM_PARALLEL",)},
         "Slots of llama.cpp; --ctx is their total. Default: 4 that share one cache.",
         high=MOST_SLOTS),
    Flag("unified", SWITCH, {"llama.cpp": ("--kv-unified", "-kvu")},
         "Whether llama.cpp's slots share one cache. Default: no, with --parallel.",
         off=("--no-kv-unified", "-no-kvu")),
    Flag("slot_limit", TOKENS, {"llama.cpp": ("--kv-unified-per-slot",)},
         "Tokens that one slot of llama.cpp takes at most."),
    Flag("batch", COUNT, {"llama.cpp": ("--batch-size", "-b")},
         "Tokens of a logical batch of llama.cpp; a physical one is never more. Default: 2048."),
    Flag("ubatch", COUNT, {"llama.cpp": ("--ubatch-size", "-ub"), "ollama": ()},
         "Tokens of a physical batch of llama.cpp: windows hold one. Default: 512."),
    Flag("prompt_cache", COUNT, {"llama.cpp": ("--cache-ram", "-cram")},
         "MiB of host memory for earlier prompts: 0 for none, -1 without a limit.", low=-1, high=2**30),
    Flag("kv_on_host", SWITCH, {"llama.cpp": ("--no-kv-offload", "-nkvo")},
         "Keep the cache in the host's memory.",
         off=("--kv-offload", "-kvo")),
    Flag("swa_full", SWITCH, {"llama.cpp": ("--swa-full",)},
         "Keep every token of windowed layers."),
    Flag("flash_attention", ON_OFF, {"llama.cpp": ("--flash-attn", "-fa"), "ollama": ("OLLAMA_FLASH_ATTENTION",),
         "transformers": ()},
         "auto, on or off.",
         choices=("auto", "on", "off")),
    Flag("cache_implementation", CHOICE, {"transformers": ("--cache-implementation",)},
         "Which of transformers' caches. Default: dynamic.",
         choices=("dynamic", "static", "offloaded", "offloaded_static", "quantized", "paged")),
    Flag("cache_implementation", SWITCH, {"transformers": ("--continuous-batching",)},
         "The paged cache of transformers serve.",
         value="paged"),
    Flag("cache_backend", CHOICE, {"transformers": ("--cache-backend",)},
         "What quantises the cache. Default: quanto.",
         choices=("quanto", "hqq", "fp8")),
    Flag("nbits", COUNT, {"transformers": ("--nbits",)},
         "Bits an element of a quantised cache. Default: 4.",
         high=8),
    Flag("q_group_size", COUNT, {"transformers": ("--q-group-size",)},
         "Elements that share a scale. Default: 64."),
    Flag("residual_length", COUNT, {"transformers": ("--residual-length",)},
         "Newest tokens that stay in the model's dtype. Default: 128.",
         low=0),
    Flag("axis_key", COUNT, {"transformers": ("--axis-key",)},
         "Axis along which keys are grouped.",
         low=-1, high=3),
    Flag("axis_value", COUNT, {"transformers": ("--axis-value",)},
         "Axis along which values are grouped.",
         low=-1, high=3),
    Flag("generated", TOKENS, {"transformers": ("--generated",)},
         "Tokens of --ctx that come one by one, for a quantised cache. Default: none.",
         low=0),
    Flag("max_blocks_per_request", COUNT, {"transformers": ("--max-blocks-per-request",)},
         "Width of the block table of the fast decode path; 0 turns that off.",
         low=0),
    Flag("async_batching", ON_OFF, {"transformers": ("--use-async-batching",)},
         "Whether two batches of the paged cache are in flight.",
         choices=("auto", "on", "off")),
)  # fmt: skip


# -- reading --------------------------------------------------------------------------------


class Given(Record):
    """One flag as somebody gave it, its value read."""

    flag: Flag
    spelling: str
    value: Any


def given(flag: Flag, spelling: str, value: str | bool) -> Given:
    """A flag with its text read; a switch has whether it is on."""
    if isinstance(value, bool):
        return Given(flag, spelling, flag.value if value else not flag.value)
    return Given(flag, spelling, flag.read(value, spelling))


def spelling_of(field: str, engine: str) -> str:
    """What the option for a setting is called, in an engine's own words where it has some."""
    flag = next(flag for flag in FLAGS if flag.field == field and engine in flag.engines)
    return next((name for name in flag.names[engine] if name.startswith("--")), flag.spellings[0])


def serving(engine: str, items: Sequence[Given], *, strict: bool) -> Serving:
    """How `engine` is started. Flags of other engines are refused (`strict`) or left to those."""
    settings: dict[str, Any] = {}
    for item in items:
        flag = item.flag
        if engine not in flag.engines:
            if strict:
                takers = " or ".join(f"--engine {name}" for name in flag.engines)
                raise UsageError(f"{item.spelling} says how an engine is started; {engine} has no use for it",
                                 hint=f"it is for {takers}")  # fmt: skip
        elif item.value is not None:
            settings[flag.field] = item.value
    return Serving(**settings)
