"""What models are given while their weights are searched: windows of a text, drawn by a seed."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError, UsageError
from kvctl.sources import jsonfile

if TYPE_CHECKING:
    import torch

SHIPPED = "calibration"
_LONGEST = 100_000_000
"""Bytes of a text that is read."""


def read(path: Path | None = None) -> str:
    """A text file, or the text that comes with kvctl (data/texts/README.md says from where).

    Raises:
        UsageError: it is not there, no text, or longer than 100 MB.

    """
    if path is None:
        return resources.files("kvctl").joinpath("data", "texts", f"{SHIPPED}.txt").read_text(encoding="utf-8")
    where = jsonfile.plain(str(path))
    try:
        if not path.is_file():
            raise UsageError(f"{where} is no file", hint="give a text file in UTF-8")
        with path.open("rb") as file:
            data = file.read(_LONGEST + 1)
    except OSError as error:
        raise UsageError(jsonfile.unreadable(where, error).message, hint="give a text file in UTF-8") from None
    if len(data) > _LONGEST:
        raise UsageError(f"{where} has more than {_LONGEST // 10**6} MB", hint="a few hundred kilobytes are enough")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8 text (byte {error.start})", hint="give a text file in UTF-8") from None


def windows(ids: Any, samples: int, length: int, seed: int, first: int | None = None) -> torch.Tensor:
    """Token ids [samples, length] from those of a text: windows that do not overlap, drawn by `seed`, in the text's order.

    `first`: a token that each begins with, beside those of the text.

    Raises:
        UsageError: the text has fewer.

    """
    import torch

    if samples < 1 or length < 2:
        raise UsageError(f"{samples} calibration samples of {length} tokens: at least one of two tokens is needed")
    own = length if first is None else length - 1
    there = len(ids) // own
    if there < samples:
        raise UsageError(f"the calibration text has {len(ids):,} tokens: {there} of {samples} samples of {length:,}",
                         hint=f"at most {there} samples, shorter ones, or a longer text")  # fmt: skip
    drawn = torch.randperm(there, generator=torch.Generator().manual_seed(seed))[:samples].sort().values
    chosen = torch.tensor(ids[: there * own]).view(there, own)[drawn]
    return chosen if first is None else torch.cat([torch.full((samples, 1), first), chosen], 1)


def tokenize(folder: Path, text: str, vocabulary: int) -> tuple[list[int], int | None]:
    """The tokens of a text, by the tokenizer in a model's folder, and the one that it puts before every text, if it does.

    Raises:
        ConfigError: there is none, or it has tokens that the model does not know.

    """
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise ConfigError(f"{jsonfile.plain(str(folder))}: no tokenizer can be loaded from it",
                          hint="copy the model's tokenizer files there") from error  # fmt: skip
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        raise ConfigError("the tokenizer makes nothing of the calibration text")
    if max(ids) >= vocabulary:
        raise ConfigError(f"the tokenizer has token {max(ids):,}, the model {vocabulary:,} of them",
                          hint="the tokenizer is another model's: copy this model's there")  # fmt: skip
    begins = tokenizer("a")["input_ids"][:1]
    first = tokenizer.bos_token_id
    return list(ids), first if first is not None and begins == [first] else None
