"""The tensors of a model, where their headers are at hand: in its folder, or on the Hub by ranged reads.

Only asked for when something depends on single tensors (ranks, other formats): for the total, a folder's
headers and the Hub's model information are enough.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvctl.errors import KvctlError, SourceError
from kvctl.sources import jsonfile, local, safetensors
from kvctl.spec import ModelSpec
from kvctl.tensors import Named, Tensor, grouped

if TYPE_CHECKING:
    from kvctl.sources.hub import Hub

# Of all headers together; the largest models have some 20 MB in 200 files.
_MOST_FILES, _MOST_BYTES, _MOST_SECONDS = 1_000, 2**27, 300.0
_LONGEST_HEADER = 2**24
_FIRST_RANGE = 2**16


def attach(spec: ModelSpec) -> ModelSpec:
    """The model with its tensors; without, and with a note where they are there and cannot be read."""
    read = {"local": _of_folder, "cache": _of_folder, "hub": _of_hub}.get(spec.provenance.source)
    if read is None or spec.overrides or spec.tensors is not None:
        return spec
    try:
        tensors = read(spec)
    except KvctlError as error:
        return spec.replace(notes=(*spec.notes, f"tensors unknown: {error.message}"))
    except OSError as error:
        message = jsonfile.unreadable(jsonfile.plain(spec.provenance.location), error).message
        return spec.replace(notes=(*spec.notes, f"tensors unknown: {message}"))
    return spec if tensors is None else spec.replace(tensors=tensors)


def _of_folder(spec: ModelSpec) -> tuple[Tensor, ...] | None:
    path = spec.provenance.place
    if path.name == local.CONFIG and not path.is_dir():
        path = path.parent
    return safetensors.folder_tensors(path) if path.is_dir() else None


def _of_hub(spec: ModelSpec) -> tuple[Tensor, ...]:
    from kvctl.sources.hub import Hub, Unreachable

    hub = _Headers(Hub(spec.id, spec.provenance.revision, forced=True))
    try:
        return grouped(hub.read())
    except Unreachable as down:
        raise SourceError(f"the Hub cannot be reached ({down})") from None


class _Headers:
    """The headers of a repository's safetensors files, within limits on files, bytes and time."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._end = time.monotonic() + _MOST_SECONDS
        self._bytes = 0

    def read(self) -> list[Named]:
        """Every tensor of every file."""
        index = self._part(safetensors.INDEX, range(safetensors.INDEX_LIMIT))
        names = ["model.safetensors"]
        if index is not None:
            where = f"{safetensors.INDEX} of {self._hub.repo}"
            names = safetensors.index_files(jsonfile.parse(index, where, limit=safetensors.INDEX_LIMIT))
        if len(names) > _MOST_FILES:
            raise SourceError(f"{self._hub.repo} has {len(names):,} files of weights, and kvctl reads {_MOST_FILES:,}")
        return [named for name in names for named in self._header(name)]

    def _header(self, name: str) -> list[Named]:
        start = self._part(name, range(_FIRST_RANGE))
        if start is None:
            raise SourceError(f"{self._hub.repo} has no file {jsonfile.plain(name)}")
        length = int.from_bytes(start[:8], "little")
        if len(start) < 10 or not 2 <= length <= _LONGEST_HEADER:
            raise safetensors.malformed(name)
        rest = b""
        if 8 + length > len(start):
            rest = self._part(name, range(len(start), 8 + length)) or b""
        header = (start + rest)[8 : 8 + length]
        if len(header) != length:
            raise safetensors.malformed(name)
        return safetensors.parse_header(header, name)

    def _part(self, name: str, span: range) -> bytes | None:
        """A part of a file; None where there is no such file."""
        if self._bytes > _MOST_BYTES or time.monotonic() > self._end:
            raise SourceError(f"the headers of {self._hub.repo} are too long, or take too long, to read them all")
        answer = self._hub.patiently(self._hub.file_url(name), span)
        if answer.status == 200:
            raise SourceError(f"the Hub ({self._hub.host()}) does not answer parts of files")
        if answer.headers.get("X-Error-Code") == "EntryNotFound":
            return None
        if answer.status != 206:
            self._hub.refused(answer)
        self._bytes += len(answer.body)
        return answer.body
