"""GGUF files as folders of safetensors: transformers reads and dequantizes them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from kvctl.errors import ConfigError, KvctlError, SourceError
from kvctl.measure.checkpoint import check_gguf
from kvctl.measure.faults import first_line
from kvctl.measure.memory import is_out_of_memory, shortage
from kvctl.measure.published import no_bars
from kvctl.sources import gguf, jsonfile
from kvctl.weights.tensorfile import cannot_write

_PLAIN = frozenset(("F32", "F16", "BF16", "F64"))


def is_gguf(source: Path) -> bool:
    """Whether a path is that of a GGUF file."""
    return source.suffix.lower() == ".gguf"


def configuration(path: Path) -> Any:
    """transformers' configuration of the model in a GGUF file.

    Raises:
        SourceError: the file, or a part of it, is not there or cut short.
        ConfigError: it is no GGUF, or transformers does not read its architecture.

    """
    import transformers

    where = jsonfile.plain(str(path))
    check_gguf(path)
    try:
        return transformers.AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    except Exception as error:
        raise ConfigError(f"{where}: transformers cannot read it: {first_line(error)}",
                          hint="give the folder that it was made of") from None  # fmt: skip


def note(path: Path) -> str | None:
    """What is to be said of a file whose tensors are quantized; None where they are not."""
    from gguf import GGUFReader

    found: Counter[str] = Counter()
    for name in gguf.parts_of(path.name):
        found.update(tensor.tensor_type.name for tensor in GGUFReader(str(path.with_name(name))).tensors)
    quantized = [kind for kind, _ in found.most_common() if kind not in _PLAIN]
    if not quantized:
        return None
    return (f"{jsonfile.plain(path.name)} is quantized already ({', '.join(quantized)}): transformers dequantizes it, and what "
            "was lost stays lost; the model that it was made of is the better source")  # fmt: skip


def elements(path: Path) -> int:
    """Of all tensors."""
    parts = (path.with_name(name) for name in gguf.parts_of(path.name))
    return sum(gguf.read_header(part, jsonfile.plain(str(part))).elements for part in parts)


def convert(path: Path, folder: Path, dtype: str) -> None:
    """Write a GGUF file's model, its tokenizer with the chat template, and its generation settings to a new folder.

    The whole model is in memory meanwhile, in float32 while transformers reads it.

    Raises:
        KvctlError: transformers cannot read it, memory or the disk is full.

    """
    import torch
    import transformers

    where = jsonfile.plain(str(path))
    check_gguf(path)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(path.parent), gguf_file=path.name, local_files_only=True
        )
    except Exception as error:
        raise ConfigError(f"{where}: transformers cannot read its tokenizer: {first_line(error)}") from None
    full = None
    try:
        with no_bars():
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(path.parent), gguf_file=path.name, local_files_only=True, dtype=getattr(torch, dtype),
                quantization_config=transformers.GgufConfig(dequantize=True), device_map="cpu",
            )  # fmt: skip
        folder.mkdir(parents=True)
        model.save_pretrained(folder, max_shard_size="5GB")
        tokenizer.save_pretrained(folder)
    except OSError as error:
        if error.errno is None:  # transformers' own words for a file that it cannot use
            raise SourceError(f"{where}: transformers cannot read it: {first_line(error)}") from None
        raise cannot_write(folder, error) from None
    except Exception as error:
        if not is_out_of_memory(error):
            raise _unwritten(folder, where, error) from None
        full = shortage(error)
    if full is not None:
        raise KvctlError(f"{where}: not enough memory to dequantize it: {full}")


def _unwritten(folder: Path, where: str, error: Exception) -> KvctlError:
    if type(error).__name__ == "SafetensorError":  # how its library tells of a full disk
        return KvctlError(f"cannot write {jsonfile.plain(str(folder))[:200]}: {first_line(error)}")
    return SourceError(f"{where}: transformers cannot read it: {first_line(error)}")
