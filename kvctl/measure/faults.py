"""What goes wrong in transformers and torch, in plain lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError, Hint, KvctlError, SourceError
from kvctl.measure.checkpoint import hub_reason

ON_HUB = ("cache", "hub", "catalogue")
_VALIDATION = re.compile(r"(?:Class v|V)alidation error for \w+ '(\w+)':")
"""How transformers' configuration classes begin; what is wrong stands on the line below, after the kind of error."""
_KIND = re.compile(r"^\w+Error: ")
RANDOM = Hint("--weights random builds the model from its configuration alone", "profile")
if TYPE_CHECKING:
    from kvctl.spec import ModelSpec


class NotFinite(KvctlError):
    """A model makes NaN or infinity of a text."""


@contextmanager
def blaming_weights(model: Any) -> Iterator[None]:
    """Of numbers that are not finite, say whether the weights have them already.

    Raises:
        SourceError: they have: which.
        NotFinite: they have not.

    """
    try:
        yield
    except NotFinite:
        import torch

        for name, value in model.named_parameters():
            if value.is_floating_point() and value.numel() and not bool(torch.isfinite(value).all()):
                raise SourceError(f"{name} has numbers that are not finite", hint="download the model again") from None
        raise


def unknown_type(spec: ModelSpec, name: str, *, trusted: bool) -> ConfigError:
    import transformers

    if spec.config.get("auto_map") and not trusted:
        return ConfigError(f"{spec.id} runs code from its repository ({name[:60]!r} is no type of transformers), "
                           "and that is not done unasked",
                           hint=Hint("--trust-remote-code, if you have read that code and trust it", "profile"))  # fmt: skip
    return ConfigError(f"{spec.id}: transformers {transformers.__version__} does not know the type {name[:60]!r}",
                       hint="kvctl size needs no transformers; a newer transformers may know it")  # fmt: skip


def cannot_build(spec: ModelSpec, error: Exception) -> ConfigError:
    import transformers

    return ConfigError(f"{spec.id}: transformers cannot build it: {first_line(error)}",
                       hint=f"its config.json is wrong, or not for transformers {transformers.__version__}")  # fmt: skip


def cannot_load(spec: ModelSpec, error: Exception, attention: str | None = None) -> SourceError:
    text = first_line(error)
    hint: str = RANDOM
    if type(error).__name__ == "SafetensorError":
        text, hint = f"a damaged safetensors file ({text})", "download it again"
    elif "Weights only load failed" in text:
        # What torch advises there is to run whatever the file holds.
        text, hint = (
            "a .bin file is damaged, or holds more than tensors",
            "safetensors files hold nothing that could run",
        )
    elif attention is not None and ("attn" in text.lower() or "attention" in text.lower()):
        hint = Hint("--attn sdpa or eager", "profile")
    elif isinstance(error, ImportError):
        hint = Hint(
            "install what is missing, or run it without its quantization: --weights random",
            "profile",
            otherwise="install what is missing",
        )
    elif ("architecture" in text and "GGUF" in text) or text.startswith("Dequantization"):
        hint = Hint("--engine llama.cpp runs GGUF files", "profile", otherwise="give the folder that it was made of")
    elif isinstance(error, OSError) and spec.provenance.source in ON_HUB:
        text, hint = hub_reason(spec.id, spec.provenance.revision) or (text, hint)
    return SourceError(f"{spec.id}: transformers cannot load it: {text}", hint=hint)


def first_line(error: BaseException) -> str:
    """What an exception of torch or transformers says, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    name = type(error).__name__
    said = lines[0] if lines else name
    about = _VALIDATION.fullmatch(said)
    if about is not None and len(lines) > 1:
        below = _KIND.sub("", lines[1]).partition(" Errors: ")[0]
        said = below if about[1] in below else f"{about[1]}: {below}"
    if isinstance(error, KeyError):
        said = f"{name}: {said}"
    return "".join(letter for letter in said if letter.isprintable())[:300]
