"""A deployment as an engine's own command line, every option that changes memory written out.

The other way round of `kvctl.engines.commandline`: options are spelled from `kvctl.engines.flags`, and reading the command gives
`told` again. Numbers are plain integers: vLLM reads 128k as 128,000, others do not read it at all.

Adding an engine: a row in `_ENGINES`, and one in `told`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvctl.engines.commandline.config_files import TENSORRT_LLM
from kvctl.engines.spelling import spelled
from kvctl.errors import UsageError
from kvctl.recommend.emit import images, nodes
from kvctl.recommend.emit.documents import document
from kvctl.recommend.emit.site import bracketed
from kvctl.recommend.emit.told import cache_types, cells, told
from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.allocation import Serving
    from kvctl.recommend.deployment import Deployment
    from kvctl.recommend.emit.nodes import Node
    from kvctl.recommend.emit.site import Site

FILES = "/etc/engine"
"""Where an engine's own file lies in a container."""
Option = tuple[str, ...]
"""An option and its values."""

_NUMBER = re.compile(r"-\d+(\.\d+)?")
_ON_LOAD: Mapping[str, Mapping[str, Sequence[Option]]] = {
    # vllm/config/quantization.py: names of what it converts every linear layer and all experts to while it loads.
    "vllm": {
        "fp8": [("--quantization", "fp8_per_tensor")],
        "fp8-block": [("--quantization", "fp8_per_block")],
        "fp8-channel": [("--quantization", "fp8_per_channel")],
    },
    # sglang/srt/arg_groups/choices.py
    "sglang": {
        "fp8": [("--quantization", "fp8")],
        "nvfp4": [("--quantization", "nvfp4_online")],
        "nf4": [("--load-format", "bitsandbytes"), ("--quantization", "bitsandbytes")],
    },
    # transformers/cli/serve.py
    "transformers": {
        "nf4": [("--quantization", "bnb-4bit")],
        "int8": [("--quantization", "bnb-8bit")],
    },
}
_ONE_NAME_UNTIL = (0, 32)
"""Earlier versions call fp8 by scales of whole tensors fp8; 0.32 takes that word for checkpoints alone (Fp8Config)."""
_OF_TRANSFORMERS = (
    "--continuous-batching",
    "--cb-block-size",
    "--cb-num-blocks",
    "--cb-max-batch-tokens",
    "--cb-max-memory-percent",
)
"""Of the paged cache, those that `transformers serve` has (transformers/cli/serve.py)."""


class Command(Record):
    """What starts one server."""

    program: tuple[str, ...]
    options: tuple[Option, ...]
    """A word without an option's name is the model."""
    variables: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    """Names of files that must be there, and what is in them."""
    after: tuple[str, ...] = ()
    """Commands to run beside it when it is up."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """The words after the program."""
        return tuple(word for option in self.options for word in option)


class Place(Record):
    """Where a command is run."""

    host: str
    container: bool = False
    node: Node | None = None


def command(deployment: Deployment, site: Site, place: Place | None = None) -> Command:
    """The command of one replica's server, on a machine or in a container.

    Raises:
        UsageError: the engine cannot be started so.

    """
    place = place or Place(site.host)
    nodes.check(deployment, site)
    serving = told(deployment)
    _on_load(deployment)
    build = _ENGINES[deployment.engine.name]
    return build(deployment, serving, site, place)


def model(deployment: Deployment, site: Site, place: Place) -> str:
    """What the engine is told to load: a name, or a path as the machine or the container sees it."""
    path = deployment.model
    if not is_local(deployment) or not place.container:
        return path
    inside = (
        posixpath.relpath(path, site.folder)
        if path.startswith(site.folder + "/")
        else posixpath.basename(path.rstrip("/"))
    )
    return posixpath.join(images.MODELS, inside)


def is_local(deployment: Deployment) -> bool:
    """Whether the model is a file or a folder, not a name on the Hub."""
    path = deployment.model
    if path.startswith(("/", "./", "../", "~")) or deployment.made == "make":
        return True
    return path.lower().endswith(".gguf") and path.count("/") < 2


def served(deployment: Deployment, site: Site) -> str:
    """What requests call the model, where the engine can be told."""
    return site.served or deployment.base


def asked_for(deployment: Deployment, site: Site) -> str | None:
    """What requests call the model; None where the server's own list says it."""
    engine = deployment.engine.name
    if engine == "ollama":
        return site.name if is_local(deployment) else deployment.model
    own = {"transformers": deployment.model, "tensorrt-llm": None}
    return own[engine] if engine in own else served(deployment, site)


# -- engines --------------------------------------------------------------------------------


def _vllm(deployment: Deployment, serving: Serving, site: Site, place: Place) -> Command:
    words = spelled("vllm", serving)
    options: list[Option] = [
        (model(deployment, site, place),),
        ("--served-model-name", served(deployment, site)),
        ("--host", place.host),
        ("--port", str(site.port)),
        *_on_load(deployment),
        ("--max-model-len", str(deployment.context)),
        ("--kv-cache-dtype", deployment.kv_dtype),
        *grouped(words.options),
        *nodes.options(deployment, site, place.node),
    ]
    return Command(("vllm", "serve"), tuple(options), words.variables)


def _sglang(deployment: Deployment, serving: Serving, site: Site, place: Place) -> Command:
    words = spelled("sglang", serving)
    own = deployment.serving
    options: list[Option] = [
        ("--model-path", model(deployment, site, place)),
        ("--served-model-name", served(deployment, site)),
        ("--host", place.host),
        ("--port", str(site.port)),
        *([("--device", "cpu")] if own.device == "cpu" else []),
        *_on_load(deployment),
        ("--context-length", str(deployment.context)),
        ("--kv-cache-dtype", deployment.kv_dtype),
        *grouped(words.options),
        *([("--ep-size", str(serving.tensor_parallel))] if own.expert_parallel else []),
        *([("--chunked-prefill-size", "-1")] if own.chunked_prefill is False else []),
        *([("--enable-hierarchical-cache",)] if own.host_gb or own.host_ratio else []),
        *_drafts(own),
        ("--enable-metrics",),
        *nodes.options(deployment, site, place.node),
    ]
    return Command(("python3", "-m", "sglang.launch_server"), tuple(options), words.variables)


def _drafts(serving: Serving) -> list[Option]:
    """A chain of drafts, one a step, where a number of draft tokens is told: SGLang takes the three options together or none."""
    algorithm = (serving.speculative_algorithm or "").upper()
    if not serving.draft_tokens or algorithm in ("", "NGRAM"):
        return []
    return [("--speculative-num-steps", str(max(serving.draft_tokens - 1, 1))), ("--speculative-eagle-topk", "1")]


def _llama_cpp(deployment: Deployment, serving: Serving, site: Site, place: Place) -> Command:
    words = spelled("llama.cpp", serving)
    key, value = cache_types(deployment)
    own = deployment.serving
    devices: list[Option] = [("--device", "none")] if images.kind(deployment) == "cpu" else []
    if not devices and serving.gpu_layers is None:
        devices = [("--n-gpu-layers", "all")]
    options: list[Option] = [
        *_gguf(deployment, site, place),
        ("--alias", served(deployment, site)),
        ("--host", place.host),
        ("--port", str(site.port)),
        ("--ctx-size", str(cells(deployment))),
        ("--cache-type-k", key),
        ("--cache-type-v", value),
        *([("--flash-attn", "auto")] if serving.flash_attention is None else []),
        *grouped(words.options),
        *devices,
        *([("--split-mode", "layer")] if deployment.gpus > 1 else []),
        *([("--no-cache-prompt",)] if own.prefix_caching is False else []),
        ("--metrics",),
    ]
    return Command(("llama-server",), tuple(options), words.variables)


def _gguf(deployment: Deployment, site: Site, place: Place) -> list[Option]:
    """A file, a repository with a type behind the colon, or a file in a repository."""
    path = model(deployment, site, place)
    if is_local(deployment):
        return [("--model", path)]
    if path.lower().endswith(".gguf"):
        repository, _, name = path.rpartition("/")
        return [("--hf-repo", repository), ("--hf-file", name)]
    return [("--hf-repo", path)]


def _tensorrt_llm(deployment: Deployment, serving: Serving, site: Site, place: Place) -> Command:
    """Memory is told in a file of its own: in that, kv_cache_config stands for the options of the same names."""
    words = spelled("tensorrt-llm", serving)
    own = deployment.serving
    keys = {flag: key for key, flag in TENSORRT_LLM.items()}
    settings: dict[str, Any] = {"kv_cache_config": {"dtype": deployment.kv_dtype}}
    cache = settings["kv_cache_config"]
    if own.prefix_caching is not None:
        cache["enable_block_reuse"] = own.prefix_caching
    options: list[Option] = []
    for name, *values in grouped(words.options):
        key = keys.get(name, "")
        table, dot, field = key.rpartition(".")
        if key and (dot or not values):
            (cache if table else settings)[field] = _typed(name, values)
        else:
            options.append((name, *values))
    if own.chunked_prefill is not None:
        settings["enable_chunked_prefill"] = own.chunked_prefill
    # Without it the server has no page of metrics for Prometheus.
    settings["return_perf_metrics"] = True
    name = f"{site.name}.yaml"
    file = posixpath.join(FILES, name) if place.container else name
    options = [
        (model(deployment, site, place),),
        ("--host", place.host),
        ("--port", str(site.port)),
        *options,
        *([("--ep_size", str(serving.tensor_parallel))] if own.expert_parallel else []),
        *([("--max_num_tokens", str(own.max_batched))] if own.max_batched else []),
        ("--max_seq_len", str(deployment.context)),
        ("--extra_llm_api_options", file),
    ]
    return Command(("trtllm-serve",), tuple(options), words.variables, ((name, document(settings)),))


def _typed(name: str, values: Sequence[str]) -> Any:
    """A value as YAML has it: a switch is true, on and off are true and false, several are a list."""
    if not values:
        return True
    if name == TENSORRT_LLM["kv_cache_config.use_kv_cache_manager_v2"]:
        return values[0] == "on"
    numbers = [float(value) if "." in value or "e" in value else int(value) for value in values]
    return numbers if name == TENSORRT_LLM["kv_cache_config.max_attention_window"] else numbers[0]


def _ollama(deployment: Deployment, serving: Serving, site: Site, place: Place) -> Command:
    """Everything is in the environment; Ollama reads 1 and 0 there, and every other word as yes."""
    words = spelled("ollama", serving)
    yes_or_no = {"on": "1", "off": "0"}
    variables = {
        "OLLAMA_HOST": f"{bracketed(place.host)}:{site.port}",
        "OLLAMA_CONTEXT_LENGTH": str(deployment.context),
        "OLLAMA_KV_CACHE_TYPE": cache_types(deployment)[0],
        **{name: yes_or_no.get(value, value) for name, value in words.variables},
        "OLLAMA_MAX_LOADED_MODELS": "1",
        "OLLAMA_KEEP_ALIVE": "-1",
    }
    if words.options:
        raise UsageError(f"{words.options[0]}: ollama has no such setting", hint="leave it out")
    path = model(deployment, site, place)
    if not is_local(deployment):
        return Command(("ollama", "serve"), (), tuple(variables.items()), after=(f"ollama pull {path}",))
    recipe = f"FROM {path}\nPARAMETER num_ctx {deployment.context}\n"
    file = posixpath.join(FILES, "Modelfile") if place.container else "Modelfile"
    return Command(("ollama", "serve"), (), tuple(variables.items()), (("Modelfile", recipe),),
                   (f"ollama create {site.name} -f {file}",))  # fmt: skip


def _transformers(deployment: Deployment, serving: Serving, site: Site, place: Place) -> Command:
    words = spelled("transformers", serving.replace(cache_implementation=None))
    options: list[Option] = [("--continuous-batching",), *grouped(words.options)]
    if strange := next((option[0] for option in options if option[0] not in _OF_TRANSFORMERS), None):
        raise UsageError(f"{strange}: `transformers serve` has no such option", hint="leave it out, or another engine")
    all_options: list[Option] = [
        (model(deployment, site, place),),
        ("--host", place.host),
        ("--port", str(site.port)),
        ("--device", "cpu" if deployment.serving.device == "cpu" else "auto"),
        *_on_load(deployment),
        *options,
    ]
    return Command(("transformers", "serve"), tuple(all_options), words.variables)


_ENGINES: Mapping[str, Callable[[Deployment, Serving, Site, Place], Command]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "llama.cpp": _llama_cpp,
    "tensorrt-llm": _tensorrt_llm,
    "ollama": _ollama,
    "transformers": _transformers,
}


def _on_load(deployment: Deployment) -> Sequence[Option]:
    """What has the engine convert the weights while it loads them.

    Raises:
        UsageError: it does not.

    """
    if deployment.made != "load":
        return []
    known = _ON_LOAD.get(deployment.engine.name, {})
    if deployment.engine.name == "vllm" and nodes.minor_of(deployment.engine.version) < _ONE_NAME_UNTIL:
        known = {"fp8": [("--quantization", "fp8")]}
    if deployment.weights not in known:
        raise UsageError(f"{deployment.engine.name} makes no {deployment.weights} weights while it loads",
                         hint="of " + (", ".join(known) or "no format") + "; `kvctl quantize` makes others")  # fmt: skip
    return known[deployment.weights]


def grouped(words: Iterable[str]) -> list[Option]:
    """Options with their values."""
    out: list[list[str]] = []
    for word in words:
        if word.startswith("-") and not _NUMBER.fullmatch(word):
            out.append([word])
        else:
            out[-1].append(word)
    return [tuple(option) for option in out]
