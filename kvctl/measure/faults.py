"""What goes wrong in transformers and torch, in plain lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.errors import ConfigError, SourceError
from kvctl.measure.checkpoint import hub_reason

ON_HUB = ("cache", "hub", "catalogue")
RANDOM = "--weights random builds the model from its configuration alone"
if TYPE_CHECKING:
    from kvctl.spec import ModelSpec


def unknown_type(spec: ModelSpec, name: str, *, random: bool) -> ConfigError:
    import transformers

    if random and spec.config.get("auto_map"):
        return ConfigError(f"{spec.id}: random weights are given to transformers' own classes, and {name[:60]!r} is none of its types",
                           hint="its own weights run with --trust-remote-code, if you have read its code and trust it")  # fmt: skip
    if spec.config.get("auto_map"):
        return ConfigError(f"{spec.id} runs code from its repository ({name[:60]!r} is no type of transformers), "
                           "and that is not done unasked",
                           hint="--trust-remote-code, if you have read that code and trust it")  # fmt: skip
    return ConfigError(f"{spec.id}: transformers {transformers.__version__} does not know the type {name[:60]!r}",
                       hint="kvctl size needs no transformers; a newer transformers may know it")  # fmt: skip


def cannot_build(spec: ModelSpec, error: Exception) -> ConfigError:
    return ConfigError(f"{spec.id}: transformers cannot build it: {first_line(error)}")


def cannot_load(spec: ModelSpec, error: Exception, attention: str | None = None) -> SourceError:
    text = first_line(error)
    hint = RANDOM
    if type(error).__name__ == "SafetensorError":
        text, hint = f"a damaged safetensors file ({text})", "download it again"
    elif "Weights only load failed" in text:
        # What torch advises there is to run whatever the file holds.
        text, hint = (
            "a .bin file is damaged, or holds more than tensors",
            "safetensors files hold nothing that could run",
        )
    elif attention is not None and ("attn" in text.lower() or "attention" in text.lower()):
        hint = "--attn sdpa or eager"
    elif isinstance(error, ImportError):
        hint = "install what is missing, or run it without its quantization: --weights random"
    elif "architecture" in text and "GGUF" in text:
        hint = "--engine llama.cpp runs GGUF files"
    elif isinstance(error, OSError) and spec.provenance.source in ON_HUB:
        text, hint = hub_reason(spec.id, spec.provenance.revision) or (text, hint)
    return SourceError(f"{spec.id}: transformers cannot load it: {text}", hint=hint)


def first_line(error: BaseException) -> str:
    """What an exception of torch or transformers says, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    name = type(error).__name__
    said = lines[0] if lines else name
    if said.endswith(":") and len(lines) > 1:  # what is wrong stands on the next
        said = f"{said} {lines[1]}"
    if isinstance(error, KeyError):
        said = f"{name}: {said}"
    return "".join(letter for letter in said if letter.isprintable())[:300]
