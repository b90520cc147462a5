"""Weights as transformers looks for them: a folder's are looked at first, and the Hub is asked why it gave none.

What transformers itself says of either does not help.
"""

from __future__ import annotations

import errno
import os
import stat
import zipfile
from collections.abc import Sequence
from pathlib import Path

from kvctl.errors import ConfigError, Hint, KvctlError, SourceError
from kvctl.sources import gguf, jsonfile, safetensors

_SINGLE, _BIN = "model.safetensors", "pytorch_model.bin"
_BIN_INDEX = f"{_BIN}.index.json"
_ZIP = b"PK\x03\x04"
"""How files of torch.save begin, which are zip archives."""
_POINTER = b"version https://git-lfs.github.com/spec/"
_AGAIN = "download it again"
_RANDOM = Hint("--weights random builds the model from its configuration alone", "profile",
               otherwise="give a folder that has them, or a model that has some on the Hub")  # fmt: skip


def check_folder(folder: Path) -> None:
    """Refuses a folder whose weights are not all there.

    Raises:
        SourceError: there are none, files are missing, cut off, or no safetensors files.
        ConfigError: they are packed, and nothing says how.

    """
    where = jsonfile.plain(str(folder))
    if os.path.lexists(folder / _SINGLE):
        files = [_SINGLE]
    elif os.path.lexists(folder / safetensors.INDEX):
        files = _indexed(folder / safetensors.INDEX)
    elif os.path.lexists(folder / _BIN):
        files = [_BIN]
    elif os.path.lexists(folder / _BIN_INDEX):
        files = _indexed(folder / _BIN_INDEX)
    else:
        raise _none(folder, where)
    missing = [(name, what) for name in files if (what := _absent(folder / name)) is not None]
    if missing:
        (name, what), more = missing[0], f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise SourceError(f"{where}: {jsonfile.plain(name)} {what}{more}", hint=_AGAIN)
    for name in files:
        _check_file(folder / name)
    _check_explained(folder, [folder / name for name in files if name.endswith(".safetensors")])


def _check_explained(folder: Path, files: Sequence[Path]) -> None:
    """Refuses packed weights of a folder that does not say how they are packed: transformers would take them as they are."""
    from kvctl.sources import packed

    path = folder / "config.json"
    if not path.is_file() or packed.quantized(jsonfile.read_file(path), folder) is not None:
        return
    odd = packed.unexplained([named for file in files for named in safetensors.read_header(file)])
    if odd is not None:
        where = jsonfile.plain(str(folder))
        raise ConfigError(f"{where}: {jsonfile.plain(odd[0])} is of {odd[1]}, and config.json says nothing of quantization: what it stands for is not known",
                          hint="quantization_config of the model's own config.json says it: download that again")  # fmt: skip


def _indexed(path: Path) -> list[str]:
    """The files that an index of weights names."""
    try:
        return safetensors.index_files(jsonfile.read_file(path, limit=safetensors.INDEX_LIMIT))
    except KvctlError as error:
        where = jsonfile.plain(str(path.parent))
        raise SourceError(f"{where}: its index of weights is damaged: {error.message}", hint=_AGAIN) from None


def _absent(path: Path) -> str | None:
    """Why there is no regular file at a path; None where there is one."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if path.is_symlink():
            return "is a link to itself" if error.errno == errno.ELOOP else "is a link to a file that is gone"
        return "is not there" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
    if stat.S_ISREG(mode):
        return None
    return "is a folder" if stat.S_ISDIR(mode) else "is no regular file"


def _check_file(path: Path) -> None:
    """Refuses a file that is empty, a pointer, or not all there."""
    where = jsonfile.plain(str(path))
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(_POINTER))
        if not size:
            raise SourceError(f"{where} is empty", hint=_AGAIN)
        if start == _POINTER:
            raise SourceError(f"{where} is a Git LFS pointer, not the weights", hint="git lfs pull fetches them")
        if path.suffix == ".safetensors":
            _check_tensors(path, where, start, size)
        elif start.startswith(_ZIP) and not zipfile.is_zipfile(path):
            raise SourceError(f"{where} is cut short", hint=_AGAIN)
    except OSError as error:
        raise SourceError(
            jsonfile.unreadable(where, error).message, hint="make it readable, or download it again"
        ) from None


def _check_tensors(path: Path, where: str, start: bytes, size: int) -> None:
    """A file's header, and whether all that it lists is there: tensors lie one behind the other (format's own rule)."""
    header = 8 + int.from_bytes(start[:8], "little")
    if len(start) >= 8 and header > size and header <= safetensors.HEADER_LIMIT:
        raise SourceError(f"{where} ends after {size:,} bytes, within its header", hint=_AGAIN)
    try:
        whole = header + sum(length for *_, length in safetensors.read_header(path))
    except ConfigError:
        raise SourceError(f"{where} has no valid safetensors header", hint=_AGAIN) from None
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


def check_gguf(path: Path) -> None:
    """Refuses a GGUF file that ends before its tensors do, or of which parts are missing."""
    for name in gguf.parts_of(path.name):
        part = path.with_name(name)
        where = jsonfile.plain(str(part))
        absent = _absent(part)
        if absent is not None:
            raise SourceError(f"{where} {absent}", hint=_AGAIN)
        if gguf.read_header(part, where).cut:
            raise SourceError(f"{where} ends after {part.stat().st_size:,} bytes, before its tensors do", hint=_AGAIN)


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
