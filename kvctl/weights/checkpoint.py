"""Checkpoints: what is quantized, and the folder that comes of it, which is there whole or not at all.

Work goes on in a hidden folder beside the target: a file for every layer, the calibration tokens' states after the last,
and a journal of what is complete. A run that was killed goes on from there, and the same bytes come out. At the end the
files are joined, the rest is copied, and the folder gets its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvctl.errors import ConfigError, KvctlError, SourceError, UsageError
from kvctl.measure.checkpoint import check_folder
from kvctl.quantization import facts_of, of_cache_alone, scheme
from kvctl.sources import jsonfile, packed, safetensors
from kvctl.weights import tensorfile
from kvctl.weights.tensorfile import Source, Written, cannot_write

_KEPT = (
    "generation_config.json", "chat_template.*", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "*.model", "preprocessor_config.json", "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
"""Files that belong to the model as it was and hold of what it becomes."""
Finish = Callable[[Path], Mapping[str, str]]
"""Called with a folder that is complete but for its name; texts by file name that it is to have besides."""
_PLAIN = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
"""Methods that models are published in, and by which name transformers 5.24 turns them into plain weights."""
_SHARD = 5 * 10**9
_JOURNAL, _LOCK, _OLD = "journal.json", "lock", "old"


def open_source(folder: Path) -> tuple[Source, dict[str, Any]]:
    """A model's tensors and its configuration.

    Raises:
        SourceError: no folder, no weights there, or none in safetensors.
        ConfigError: it is quantized already.

    """
    where = jsonfile.plain(str(folder))
    if not folder.is_dir():
        raise SourceError(f"{where} is no folder with a model's files", hint="hf download fetches a model")
    config = jsonfile.read_file(folder / "config.json")
    refuse_quantized(config, where, folder)
    check_folder(folder)
    if (folder / safetensors.INDEX).is_file() and not (folder / "model.safetensors").is_file():
        names = safetensors.index_files(jsonfile.read_file(folder / safetensors.INDEX, limit=safetensors.INDEX_LIMIT))
    else:
        names = ["model.safetensors"]
    if not all(name.endswith(".safetensors") and (folder / name).is_file() for name in names):
        raise SourceError(f"{where} has no weights in safetensors",
                          hint="transformers' save_pretrained writes them so")  # fmt: skip
    return Source(folder, [folder / name for name in names]), config


def refuse_quantized(config: Mapping[str, Any], where: str, folder: Path | None = None) -> None:
    """Refuses a model whose configuration, or a file beside it, says that it is quantized.

    Raises:
        ConfigError: it is: in which way, and what to quantize instead.

    """
    facts = facts_of(config) if folder is None else packed.quantized(config, folder)
    if facts is None:
        return
    if of_cache_alone(facts):
        raise ConfigError(f"{where} has scales of an FP8 cache, which hold for its weights as they are",
                          hint="quantize the model that it was made of, and calibrate what comes of that")  # fmt: skip
    method = facts.get("quant_method") or facts.get("quant_algo") or "unknown"
    try:
        found = scheme({"quantization_config": facts})
        words = str(method) if found is None else found.words
    except ConfigError:
        words = str(method)
    plain = _PLAIN.get(method) if isinstance(method, str) else None
    other = f"; where there is none, load it with transformers' {plain}(dequantize=True) and save that" if plain else ""
    raise ConfigError(
        f"{where} is quantized already ({words[:60]})", hint=f"quantize the model that it was made of{other}"
    )


def check_target(target: Path, source: Path, force: bool) -> None:
    """Refuses a place that a checkpoint cannot come to; writes nothing.

    Raises:
        UsageError: something is there, or it is the source.
        KvctlError: its folder is missing, or cannot be written to.

    """
    where = jsonfile.plain(str(target))
    if target.resolve() == source.resolve():
        raise UsageError(f"{where} is the model itself", hint="name another folder")
    if target.resolve() in source.resolve().parents:
        raise UsageError(f"{where} holds the model itself", hint="name another folder")
    if os.path.lexists(target):
        if not target.is_dir() or target.is_symlink():
            raise UsageError(f"{where} is there, and no folder", hint="name another one")
        if not force:
            raise UsageError(f"{where} is there already", hint="--force replaces it")
        if any(target.iterdir()) and not (target / "config.json").is_file():
            raise UsageError(
                f"{where} is no model's folder, and --force would remove what is in it", hint="name another one"
            )
    if not target.parent.is_dir():
        raise KvctlError(f"cannot write {where}: there is no folder {jsonfile.plain(str(target.parent))}")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise KvctlError(f"cannot write {where}: its folder is read-only")


def check_resumable(target: Path) -> None:
    """Refuses to go on with nothing.

    Raises:
        UsageError: there is nothing.

    """
    if not (work_folder(target) / _JOURNAL).is_file():
        raise UsageError(f"nothing of {jsonfile.plain(str(target))} is there to go on with",
                         hint="start it without --resume")  # fmt: skip


def work_folder(target: Path) -> Path:
    """Where work on a target goes on."""
    return target.with_name(f".{target.name}.kvctl-part")


class Work:
    """The hidden folder, and the journal of what in it is complete."""

    def __init__(self, target: Path, key: str, facts: Mapping[str, Any], resume: bool) -> None:
        """Go on where a run with the same key stopped, with `resume`; else begin.

        Raises:
            UsageError: there is nothing to go on with, it was begun otherwise, or another process is at it.

        """
        self.target, self.folder = target, work_folder(target)
        self.done: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = dict(facts)
        """Of the run that began: what has to be the same for the same bytes, such as the number of threads."""
        self._key = key
        try:
            if resume:
                check_resumable(target)
            self.folder.mkdir(exist_ok=True)
            self._lock = _locked(self.folder / _LOCK, target)
            if (self.folder / _OLD).is_dir() and not target.exists():
                (self.folder / _OLD).rename(target)  # killed between two renamings: what was there comes back
            if resume:
                self._read()
            else:
                self._clear()
                self._save()
        except OSError as error:
            raise cannot_write(self.folder, error) from None

    def _read(self) -> None:
        journal = jsonfile.read_file(self.folder / _JOURNAL, limit=safetensors.INDEX_LIMIT)
        if journal.get("key") != self._key:
            raise UsageError(f"work on {jsonfile.plain(str(self.target))} was begun with other settings, or another model",
                             hint="ask for the same, or start anew without --resume")  # fmt: skip
        self.facts, self.done = journal["facts"], journal["done"]
        for entry in self.done:
            for name, digest in entry["files"].items():
                if not (self.folder / name).is_file() or _sha256(self.folder / name) != digest:
                    raise KvctlError(f"{name} in {jsonfile.plain(str(self.folder))} is damaged",
                                     hint="start anew without --resume")  # fmt: skip

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path.name != _LOCK:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def record(self, entry: Mapping[str, Any], files: Sequence[Written], replaced: Sequence[str] = ()) -> None:
        """Files are complete: the journal says so, then what they replace goes."""
        for old in self.done:
            for name in replaced:
                old["files"].pop(name, None)
        self.done.append({**entry, "files": {file.name: file.sha256 for file in files}})
        self._save()
        for name in replaced:
            (self.folder / name).unlink(missing_ok=True)

    def _save(self) -> None:
        data = json.dumps({"key": self._key, "facts": self.facts, "done": self.done})
        try:
            part = self.folder / f"{_JOURNAL}.part"
            with part.open("w", encoding="utf-8") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.folder / _JOURNAL)
            _sync_folder(self.folder)
        except OSError as error:
            raise cannot_write(self.folder / _JOURNAL, error) from None

    def publish(
        self, source: Path, config: Mapping[str, Any], pieces: Sequence[str], finish: Finish | None = None
    ) -> tuple[Path, ...]:
        """Join the pieces, add what else a model's folder has, and give it the target's name; `finish`: see `place`."""

        def fill(ready: Path) -> None:
            _join(ready, [self.folder / name for name in pieces])
            copy_kept(source, ready)
            write_config(ready, config)

        return self.place(fill, finish)

    def place(self, fill: Callable[[Path], None], finish: Finish | None = None) -> tuple[Path, ...]:
        """Give the target's name to a folder that `fill` fills.

        `finish` is called with it before that, and its texts are added; what it raises keeps the name from it.
        """
        ready = self.folder / "ready"
        try:
            if ready.exists():
                shutil.rmtree(ready)
            ready.mkdir()
            fill(ready)
            for name, text in (finish(ready) if finish is not None else {}).items():
                (ready / name).unlink(missing_ok=True)  # it may be a link to the source's own
                (ready / name).write_text(text, encoding="utf-8")
            for path in ready.iterdir():
                _sync(path)
            _sync_folder(ready)
            files = tuple(self.target / path.name for path in sorted(ready.iterdir()))
            self._swap(ready)
        except OSError as error:
            raise cannot_write(self.target, error) from None
        return files

    def _swap(self, ready: Path) -> None:
        old = self.folder / _OLD
        if self.target.exists():
            self.target.rename(old)
        try:
            ready.rename(self.target)
        except OSError:
            if old.exists():
                old.rename(self.target)
            raise
        _sync_folder(self.target.parent)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Let others at it."""
        self._lock.close()


def discard(target: Path) -> None:
    """Remove what an unfinished run left; what it was about to replace comes back."""
    old = work_folder(target) / _OLD
    if old.is_dir() and not target.exists():
        old.rename(target)
    shutil.rmtree(work_folder(target), ignore_errors=True)


def _locked(path: Path, target: Path) -> Any:
    import fcntl

    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UsageError(f"another process is writing {jsonfile.plain(str(target))}", hint="wait for it") from None
    return file


def _join(folder: Path, pieces: Sequence[Path]) -> None:
    """Files of at most 5 GB, as transformers names them, and their index where there are several."""
    shards: list[list[tuple[Path, str]]] = [[]]
    size = total = 0
    for piece in pieces:
        for name, length in tensorfile.sizes(piece).items():
            if shards[-1] and size + length > _SHARD:
                shards.append([])
                size = 0
            shards[-1].append((piece, name))
            size, total = size + length, total + length
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        parts = list(dict.fromkeys(piece for piece, _ in shard))
        tensorfile.join(folder / file, parts, [[name for at, name in shard if at == piece] for piece in parts])
        index |= dict.fromkeys((name for _, name in shard), file)
    if len(shards) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (folder / safetensors.INDEX).write_text(text + "\n", encoding="utf-8")


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """A model's config.json."""
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def copy_kept(source: Path, folder: Path) -> None:
    """Files beside the weights that hold of what becomes of the model."""
    for pattern in _KEPT:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and not path.name.endswith((".safetensors", ".bin")):
                shutil.copyfile(path, folder / path.name)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
