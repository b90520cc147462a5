"""What models are given while their weights are searched: samples of a text, or of rows of chats and texts, drawn by a seed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError, UsageError
from kvctl.measure.faults import first_line
from kvctl.record import Record
from kvctl.sources import jsonfile
from kvctl.weights import from_gguf, rows

if TYPE_CHECKING:
    import torch

SHIPPED = "calibration"
_OWN, _OWN_LICENCE = "kvctl's own text", "public domain; code: Apache-2.0; Chinese: MIT"
"""data/texts/README.md has both in full."""
_BATCH = 64
"""Rows that are read by the tokenizer at a time."""


class Wanted(Record):
    """What calibration is asked for."""

    source: str | None = None
    """A file, or a data set on the Hub (`hub_datasets.parse`); None: the text that comes with kvctl."""
    chat: bool = False
    """Whether texts go through the chat template too, as a user's turns."""

    @property
    def path(self) -> Path | None:
        """Of a file."""
        if self.source is None or not (_names_file(self.source) or os.path.lexists(self.source)):
            return None
        return Path(self.source)

    def check(self) -> None:
        """Refuses what is neither a file nor a name on the Hub; reads nothing.

        Raises:
            UsageError: it is neither.

        """
        if self.path is not None:
            _check_file(self.path)
        elif self.source is not None:
            from kvctl.weights import hub_datasets

            hub_datasets.parse(self.source)


class Corpus(Record):
    """What samples are drawn from."""

    rows: tuple[rows.Row, ...]
    facts: Mapping[str, Any]
    prose: bool = False
    """One text, of which samples are windows from all of its parts."""


class Samples(Record):
    """Token ids [samples, length], and where they are from."""

    ids: torch.Tensor
    facts: Mapping[str, Any]
    """name, revision and licence where they are known, columns, rows, whether a chat template was used, tokens."""


def _names_file(text: str) -> bool:
    """Whether a name is that of a file, there or not; data sets have neither such ends nor such beginnings."""
    known = (".txt", ".md", ".json", ".jsonl", ".ndjson", ".parquet", ".gz", ".zst", ".csv")
    if text.startswith("hf://"):
        return False
    return text.startswith((".", "/", "~")) or text.lower().endswith(known) or (text.count("/") > 1 and "@" not in text)


def _check_file(path: Path) -> str:
    where = jsonfile.plain(str(path))
    try:
        if path.is_file():
            return where
    except (OSError, ValueError):
        pass
    raise UsageError(
        f"{where} is no file", hint="a text in UTF-8, JSON Lines, Parquet, or a data set's name on the Hub"
    )


def read(path: Path | None = None) -> str:
    """A text file, also packed with gzip, or the text that comes with kvctl (data/texts/README.md says from where).

    Raises:
        UsageError: it is not there, no text, or longer than 100 MB.
        SourceError: what is packed is damaged.

    """
    if path is None:
        return resources.files("kvctl").joinpath("data", "texts", f"{SHIPPED}.txt").read_text(encoding="utf-8")
    where = jsonfile.plain(str(path))
    try:
        if not path.is_file():
            raise UsageError(f"{where} is no file", hint="give a text file in UTF-8")
    except OSError as error:
        raise UsageError(jsonfile.unreadable(where, error).message, hint="give a text file in UTF-8") from None
    with rows.opened(path, where) as file:
        data = file.read(rows.LONGEST + 1)
    if len(data) > rows.LONGEST:
        raise UsageError(f"{where} has more than {rows.LONGEST // 10**6} MB", hint="a few hundred kilobytes are enough")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8 text (byte {error.start})", hint="give a text file in UTF-8") from None


def gather(wanted: Wanted) -> Corpus:
    """Read what is asked for; a data set is fetched.

    Raises:
        UsageError: it is not there, or has nothing that is known.
        SourceError: it is damaged, or the Hub does not give it.

    """
    if wanted.source is None:
        own = {"name": _OWN, "licence": _OWN_LICENCE}
        return Corpus((rows.Row((read(),)),), own, True)
    path = wanted.path
    if path is not None:
        where = _check_file(path)
        if rows.ending(path.name) == "text":
            return Corpus((rows.Row((read(path),)),), {"name": where}, True)
        return _corpus(rows.read([(path, where)]), {"name": where})
    from kvctl.weights import hub_datasets

    part = hub_datasets.find(hub_datasets.parse(wanted.source))
    used: list[str] = []

    def fetched() -> Iterator[tuple[Path, str]]:
        for found, name in hub_datasets.fetch(part):
            used.append(name)
            yield found, name

    found = rows.read(fetched())
    return _corpus(found, {
        "name": part.repo, "config": part.config, "split": part.split, "revision": part.revision,
        "licence": part.licence, "files": used,
    })  # fmt: skip


def _corpus(found: rows.Rows, facts: Mapping[str, Any]) -> Corpus:
    return Corpus(found.rows, {**facts, "columns": list(found.columns), "rows_read": len(found.rows)})


def draw(source: Path, wanted: Wanted, samples: int, length: int, seed: int) -> Samples:
    """Samples of as many tokens each, by the tokenizer in folder or GGUF file `source`.

    Of one text they are windows that do not overlap, from anywhere in it. Rows are taken in an order that the seed gives,
    one after another until there are enough tokens, and cut into samples: chats through the model's template, each from
    its beginning; texts with an empty line between them.

    Raises:
        UsageError: there is too little; or as `gather`.
        ConfigError: no tokenizer, one of another model, or no chat template where one is needed.

    """
    corpus = gather(wanted)
    tokenizer = _tokenizer(source)
    first = _first(tokenizer)
    templated = wanted.chat or any(row.messages for row in corpus.rows)
    if corpus.prose and not templated:
        ids = _plain(tokenizer, ["".join(corpus.rows[0].parts)])[0]
        chosen, used, left_out = windows(ids, samples, length, seed, first), 1, 0
    else:
        if corpus.prose:  # a paragraph a turn
            parts = [part for part in corpus.rows[0].parts[0].split("\n\n") if part.strip()]
            corpus = corpus.replace(rows=tuple(rows.Row((part,)) for part in parts))
        need = samples * (length if first is None else length - 1)
        ids, used, left_out = _tokens(tokenizer, corpus, wanted.chat, need, seed, first)
        chosen = windows(ids[:need], samples, length, seed, first)
    facts = {**corpus.facts, "chat_template": templated, "tokens": chosen.numel()}
    if templated or not corpus.prose:
        facts |= {"rows": used, "rows_left_out": left_out}
    return Samples(chosen, facts)


def check_vocabulary(samples: Samples, vocabulary: int) -> None:
    """Refuses tokens that a model does not have.

    Raises:
        ConfigError: there is one.

    """
    largest = int(samples.ids.max())
    if largest >= vocabulary:
        raise ConfigError(f"the tokenizer has token {largest:,}, the model {vocabulary:,} of them",
                          hint="the tokenizer is another model's: copy this model's there")  # fmt: skip


def _tokens(
    tokenizer: Any, corpus: Corpus, chat: bool, need: int, seed: int, first: int | None
) -> tuple[list[int], int, int]:
    """Tokens of rows in the seed's order, of how many, and how many the template refused; as many as are needed."""
    import torch

    order = torch.randperm(len(corpus.rows), generator=torch.Generator().manual_seed(seed)).tolist()
    ids: list[int] = []
    used = left_out = 0
    why = ""
    ordered = iter([corpus.rows[at] for at in order])
    while len(ids) < need and (batch := list(islice(ordered, _BATCH))):
        texts: list[str] = []
        for row in batch:
            if not (chat or row.messages):
                texts.append("".join(row.parts).strip("\n") + "\n\n")
                continue
            try:
                texts.append(_templated(tokenizer, row))
            except _RefusedError as error:
                left_out, why = left_out + 1, why or str(error)
        for own in _plain(tokenizer, texts):
            if len(ids) < need:
                used += 1
                # Every sample begins with this token: a template's own would follow on it.
                ids += own[1:] if own[:1] == [first] else own
    if not ids and left_out:
        raise ConfigError(
            f"the model's chat template refuses all rows: {why}", hint="rows of another form, or plain texts"
        )
    return ids, used, left_out


class _RefusedError(Exception):
    """What a template says of a chat that it is not made for."""


def _templated(tokenizer: Any, row: rows.Row) -> str:
    if not tokenizer.chat_template:
        raise ConfigError("the model's tokenizer has no chat template, and calibration data are chats",
                          hint='plain texts need none: {"text": "…"}, without --calib-chat')  # fmt: skip
    try:
        return str(tokenizer.apply_chat_template([dict(one) for one in row.chat()], tokenize=False))
    except ImportError as error:
        raise ConfigError(f"chat templates need a package: {first_line(error)}") from None
    except Exception as error:  # whatever a template raises: it is code of the model's
        raise _RefusedError(first_line(error)) from None


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


def _tokenizer(source: Path) -> Any:
    import transformers

    told = {"gguf_file": source.name} if from_gguf.is_gguf(source) else {}
    folder = source.parent if told else source
    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **told)
    except Exception as error:
        raise ConfigError(f"{jsonfile.plain(str(source))}: no tokenizer can be loaded from it",
                          hint="copy the model's tokenizer files there") from error  # fmt: skip


def _first(tokenizer: Any) -> int | None:
    """The token that it puts before every text, if it does."""
    begins, first = tokenizer("a")["input_ids"][:1], tokenizer.bos_token_id
    return first if first is not None and begins == [first] else None


def _plain(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    return [list(map(int, ids)) for ids in tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]] if texts else []  # fmt: skip


def tokenize(folder: Path, text: str, vocabulary: int) -> tuple[list[int], int | None]:
    """The tokens of a text, by the tokenizer in a model's folder, and the one that it puts before every text, if it does.

    Raises:
        ConfigError: there is none, or it has tokens that the model does not know.

    """
    tokenizer = _tokenizer(folder)
    (ids,) = _plain(tokenizer, [text])
    if not ids:
        raise ConfigError("the tokenizer makes nothing of the calibration text")
    if max(ids) >= vocabulary:
        raise ConfigError(f"the tokenizer has token {max(ids):,}, the model {vocabulary:,} of them",
                          hint="the tokenizer is another model's: copy this model's there")  # fmt: skip
    return ids, _first(tokenizer)
