"""The files of a model that is to be quantized: where they are, or from the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvctl.errors import KvctlError, SourceError
from kvctl.measure.published import place
from kvctl.weights.checkpoint import open_source, refuse_quantized

if TYPE_CHECKING:
    from kvctl.spec import ModelSpec

_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer*", "*.model", "*.txt", "*.jinja", "LICENSE*",
          "LICENCE*", "NOTICE*", "USE_POLICY*", "README.md")  # fmt: skip


def check_source(spec: ModelSpec) -> None:
    """Refuses a model that cannot be quantized, before it is fetched or an environment is made for it: by its configuration,
    and by its files' headers where they are in a folder.

    Raises:
        ConfigError: it is quantized already.
        SourceError: its weights are missing or damaged.

    """
    if spec.provenance.source != "local":
        refuse_quantized(spec.config, spec.id)
        return
    folder, gguf_file = _place(spec)
    if gguf_file is None:
        open_source(Path(folder))


def _place(spec: ModelSpec) -> tuple[str, str | None]:
    try:
        return place(spec)
    except SourceError as error:
        if "--weights random" in (error.hint or ""):  # which is for `profile`: there is nothing to quantize
            raise SourceError(error.message, hint="hf download fetches a model") from None
        raise


def files_of(spec: ModelSpec, revision: str | None) -> Path:
    """A folder of safetensors, or a GGUF file; of a model on the Hub its files are fetched.

    Raises:
        SourceError: there are none, or the Hub does not give them.

    """
    from kvctl.measure.checkpoint import hub_reason
    from kvctl.measure.hush import quiet

    where, gguf_file = _place(spec)
    if gguf_file is not None:
        return Path(where) / gguf_file
    if spec.provenance.source == "local":
        return Path(where)
    wanted = revision or spec.provenance.revision
    try:
        from huggingface_hub import snapshot_download

        with quiet():
            return Path(snapshot_download(where, revision=wanted, allow_patterns=list(_FILES)))
    except KvctlError:
        raise
    except Exception:
        reason, hint = hub_reason(where, wanted) or ("its files could not be fetched", "try again")
        raise SourceError(f"{spec.id}: {reason}", hint=hint) from None
