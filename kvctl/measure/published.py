"""Models with the weights that were published for them: from a folder, the Hub or a GGUF file."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvctl.errors import Hint, KvctlError, SourceError, UsageError
from kvctl.measure.architecture import class_of, config_of, torch_dtype
from kvctl.measure.checkpoint import check_folder, check_gguf
from kvctl.measure.devices import located
from kvctl.measure.faults import ON_HUB, cannot_load
from kvctl.measure.loaded import Loaded, Wanted, weights_bytes
from kvctl.measure.memory import is_out_of_memory
from kvctl.quantization import of_cache_alone

if TYPE_CHECKING:
    from kvctl.formats import DType
    from kvctl.spec import ModelSpec


def with_published_weights(spec: ModelSpec, wanted: Wanted, dtype: DType) -> Loaded:
    import transformers

    where, gguf_file = place(spec)
    told: dict[str, Any] = {}
    if spec.provenance.source in ON_HUB:
        told["revision"] = wanted.revision or spec.provenance.revision
    model_class: Any = transformers.AutoModelForCausalLM
    if gguf_file is None:
        told["config"] = config_of(spec, wanted)
        model_class = class_of(spec, wanted, told["config"])
    else:
        told["gguf_file"] = gguf_file
    if wanted.tensor_parallel > 1:
        from transformers.distributed import DistributedConfig

        told["distributed_config"] = DistributedConfig(tp_size=wanted.tensor_parallel)
    else:
        told["device_map"] = wanted.device if wanted.device_map is None else wanted.device_map
    try:
        # gptqmodel greets on stdout.
        with no_bars(), contextlib.redirect_stdout(io.StringIO()):
            model, info = model_class.from_pretrained(
                # Tensors of other shapes are told of, and refused below.
                where, dtype=torch_dtype(dtype), output_loading_info=True, ignore_mismatched_sizes=True, **told,
                **wanted.attention_setting,
            )  # fmt: skip
    except Exception as error:
        if isinstance(error, KvctlError) or is_out_of_memory(error):
            raise
        raise cannot_load(spec, error, wanted.attention) from None
    _check_loaded(spec, info)
    model.eval()
    notes = _unquantized(spec, model)
    ranks = wanted.tensor_parallel
    return located(
        Loaded(model, spec, wanted.device, weights_bytes(model), None, where, gguf_file, notes, ranks=ranks), wanted
    )


@contextlib.contextmanager
def no_bars() -> Iterator[None]:
    """transformers shows its bar for GGUF files whatever it is told."""
    from transformers import modeling_gguf_pytorch_utils as reading

    shown = reading.tqdm
    reading.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        reading.tqdm = shown


def _unquantized(spec: ModelSpec, model: Any) -> tuple[str, ...]:
    """A note where a quantized checkpoint does not run as it is stored."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    facts = spec.config.get("quantization_config")
    if not isinstance(facts, Mapping) or of_cache_alone(facts) or getattr(model, "hf_quantizer", None) is not None:
        return ()
    method = str(facts.get("quant_method"))
    if method in AUTO_QUANTIZER_MAPPING:
        return (f"{method[:40]} does not run on {model.device.type}: transformers dequantized the weights",)
    return (f"transformers does not know the checkpoint's quantization ({method[:40]}) and loaded its tensors as they are: "
            "the cache is its own, what it generates is not",)  # fmt: skip


def _random(otherwise: str) -> Hint:
    return Hint("--weights random", "profile", otherwise=otherwise)


def place(spec: ModelSpec) -> tuple[str, str | None]:
    """What from_pretrained is given, and the name of a GGUF file in it."""
    source = spec.provenance.source
    if source == "local":
        path = spec.provenance.place
        if path.suffix == ".gguf":
            check_gguf(path)
            return str(path.parent), path.name
        folder = path if path.is_dir() else path.parent
        check_folder(folder)
        return str(folder), None
    if source == "stdin":
        raise SourceError("a configuration from stdin has no weights", hint=_random("give a model's folder"))
    if "/" not in spec.id:
        raise SourceError(
            f"{spec.id}: no such model is published, so there are no weights", hint=_random("give a model's folder")
        )
    repository, _, file = spec.id.partition(":")
    if file or repository.count("/") > 1:
        raise UsageError(f"{spec.id}: name a GGUF file on this machine", hint="hf download fetches one")
    return repository, None


def _check_loaded(spec: ModelSpec, info: Mapping[str, Any]) -> None:
    """Refuses a checkpoint with holes: what is missing would run with random numbers."""
    mismatched = [
        f"{row[0]} ({_shape(row[1])} for {_shape(row[2])})" if isinstance(row, (list, tuple)) else str(row)
        for row in info.get("mismatched_keys") or ()
    ]
    for what, names in (("has other shapes for", mismatched), ("lacks", info.get("missing_keys"))):
        found = sorted(map(str, names or ()))
        if found:
            shown = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
            raise SourceError(f"{spec.id}: the checkpoint {what} {len(found)} of the model's tensors: {shown}",
                              hint=Hint("download it again, or --weights random", "profile", otherwise="download it again"))  # fmt: skip


def _shape(sizes: Any) -> str:
    return " × ".join(map(str, sizes)) or "1"
