"""Weights as transformers looks for them: a folder's are looked at first, and the Hub is asked why it gave none.

What transformers itself says of either does not help.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvctl.errors import ConfigError, KvctlError, SourceError
from kvctl.sources import jsonfile, safetensors

_SINGLE, _BIN = "model.safetensors", "pytorch_model.bin"
_POINTER = b"version https://git-lfs.github.com/spec/"
_AGAIN = "download it again"
_RANDOM = "--weights random builds the model from its configuration alone"


def check_folder(folder: Path) -> None:
    """Refuses a folder whose weights are not all there.

    Raises:
        SourceError: there are none, files are missing, cut off, or no safetensors files.

    """
    where = jsonfile.plain(str(folder))
    files = []
    if os.path.lexists(folder / _SINGLE):
        files = [_SINGLE]
    elif os.path.lexists(folder / safetensors.INDEX):
        try:
            index = jsonfile.read_file(folder / safetensors.INDEX, limit=safetensors.INDEX_LIMIT)
            files = safetensors.index_files(index)
        except KvctlError as error:
            raise SourceError(f"{where}: its index of weights is damaged: {error.message}", hint=_AGAIN) from None
    elif not any((folder / name).is_file() for name in (_BIN, f"{_BIN}.index.json")):
        raise _none(folder, where)
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        what = "is a link to a file that is gone" if os.path.islink(folder / missing[0]) else "is not there"
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise SourceError(f"{where}: {jsonfile.plain(missing[0])} {what}{more}", hint=_AGAIN)
    for name in files:
        _check_file(folder / name)


def _check_file(path: Path) -> None:
    """A file's header, and whether all that it lists is there: tensors lie one behind the other (format's own rule)."""
    where = jsonfile.plain(str(path))
    try:
        with path.open("rb") as file:
            start = file.read(len(_POINTER))
        if start == _POINTER:
            raise SourceError(f"{where} is a Git LFS pointer, not the weights", hint="git lfs pull fetches them")
        header = 8 + int.from_bytes(start[:8], "little")
        size = path.stat().st_size
        if len(start) >= 8 and header > size and header <= safetensors.HEADER_LIMIT:
            raise SourceError(f"{where} ends after {size:,} bytes, within its header", hint=_AGAIN)
        whole = header + sum(length for *_, length in safetensors.read_header(path))
    except ConfigError as error:
        raise SourceError(f"{where}: {error.message}", hint=_AGAIN) from None
    except OSError as error:
        raise SourceError(jsonfile.unreadable(where, error).message) from None
    if size < whole:
        raise SourceError(f"{where} ends after {size:,} of {whole:,} bytes", hint=_AGAIN)


def _none(folder: Path, where: str) -> SourceError:
    """The error for a folder without weights that transformers would look for."""
    if (folder / "adapter_config.json").is_file():
        return SourceError(
            f"{where} has an adapter's weights, and not those of the model", hint="give its base model's folder"
        )
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if shards:
        return SourceError(f"{where} has {jsonfile.plain(shards[0])}, and neither {_SINGLE} nor {safetensors.INDEX}",
                           hint="the index says which tensor is in which file: download it too")  # fmt: skip
    return SourceError(f"{where}: no weights there ({_SINGLE})", hint=_RANDOM)


def check_gguf(path: Path, tensors_bytes: int | None) -> None:
    """Refuses a GGUF file that is shorter than its tensors are together."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise SourceError(jsonfile.unreadable(jsonfile.plain(str(path)), error).message) from None
    if tensors_bytes is not None and size < tensors_bytes:
        raise SourceError(f"{jsonfile.plain(str(path))} ends after {size:,} bytes, and its tensors alone take {tensors_bytes:,}",
                          hint=_AGAIN)  # fmt: skip


def hub_reason(repository: str, revision: str | None) -> tuple[str, str] | None:
    """Why a repository's weights did not come, and what to do; None where the Hub has an answer to give.

    No text of the client's is shown: it may hold addresses that are signed.
    """
    from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_url

    if constants.HF_HUB_OFFLINE:
        return "its weights are not in the Hub's cache, and HF_HUB_OFFLINE is set", f"hf download {repository}"
    try:
        for name in (_SINGLE, safetensors.INDEX):
            try:
                get_hf_file_metadata(hf_hub_url(repository, name, revision=revision))
            except errors.EntryNotFoundError:
                continue
            return None
    except errors.GatedRepoError:
        return (
            "it is gated, and its owner has not granted you access",
            "ask for it on the model's page, then hf auth login",
        )
    except errors.RepositoryNotFoundError:
        return "it is not on the Hub, or private", "hf auth login"
    except errors.HfHubHTTPError as error:
        return f"the Hub answers {error.response.status_code}", "try again later"
    except Exception:
        return "its weights are not in the Hub's cache, and the Hub cannot be reached", "try again with a connection"
    return "it has no weights in safetensors", _RANDOM
