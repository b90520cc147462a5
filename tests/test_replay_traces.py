"""Reading traces and message logs, good and bad."""

from __future__ import annotations

import gzip
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvctl.errors import SourceError
from kvctl.replay import Request, Setup, read_trace, replay
from kvctl.replay import trace as trace_module
from kvctl.traffic import _tokenizer

Row = dict[str, Any]

# The first, second and a later pair of lines of Mooncake's conversation trace and of its README (Apache-2.0,
# github.com/kvcache-ai/Mooncake, FAST25-release).
MOONCAKE = """\
{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]}
{"timestamp": 0, "input_length": 2290, "output_length": 316, "hash_ids": [0, 42, 43, 44, 45]}
{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2353, 2354]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2366]}
"""  # fmt: skip


def write(tmp_path: Path, data: bytes | str) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def rows(tmp_path: Path, *lines: Row, **how: Any) -> list[Request]:
    return list(read_trace(write(tmp_path, "".join(json.dumps(line) + "\n" for line in lines)), **how))


def refusal(tmp_path: Path, data: bytes | str, **how: Any) -> str:
    with pytest.raises(SourceError) as error:
        list(read_trace(write(tmp_path, data), **how))
    assert "\n" not in error.value.message
    return error.value.message


def test_mooncake(tmp_path: Path) -> None:
    found = list(read_trace(write(tmp_path, MOONCAKE)))
    assert found[0] == Request(0, 6758, 500, tuple(range(14)))
    assert [r.arrival for r in found] == [0, 0, 27_482_000, 30_535_000]
    # The second has hash 0 in common with the first: 512 tokens. The fourth has 12 with the third: 6,144.
    prefix = replay(found, Setup(16, None, 1, 131_072)).policies[2]
    assert (prefix.queried_tokens, prefix.hit_tokens) == (6758 + 2290 + 6955 + 6472, 512 + 6144)


def test_gzip_and_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = list(read_trace(write(tmp_path, MOONCAKE)))
    assert list(read_trace(write(tmp_path, gzip.compress(MOONCAKE.encode())))) == plain
    for data in (MOONCAKE.encode(), gzip.compress(MOONCAKE.encode())):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert list(read_trace("-")) == plain


def test_a_file_is_read_a_line_at_a_time(tmp_path: Path) -> None:
    lines = read_trace(write(tmp_path, MOONCAKE + "rubbish\n"))
    assert next(lines).input_length == 6758
    assert len([next(lines) for _ in range(3)]) == 3
    with pytest.raises(SourceError, match="line 5: not JSON"):
        next(lines)


def test_bailian(tmp_path: Path) -> None:
    # github.com/alibaba-edu/qwen-bailian-usagetraces-anon: 16 tokens a hash, seconds.
    line = {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, "output_length": 132,
            "type": "text", "turn": 2, "hash_ids": list(range(33))}  # fmt: skip
    assert rows(tmp_path, line) == [Request(61_114_000, 521, 132, tuple(range(33)), hash_tokens=16)]


def test_hashes_of_another_size_and_without_the_rest(tmp_path: Path) -> None:
    line = {"timestamp": 1.5, "input_length": 100, "output_length": 1, "hash_ids": [1, 2, 3]}
    assert rows(tmp_path, line, hash_tokens=32)[0].hash_ids == (1, 2, 3)  # the last 4 tokens have no hash
    assert rows(tmp_path, line | {"hash_ids": [1, 2, 3, 4]}, hash_tokens=32)[0].arrival == 1500
    assert "3 hash_ids for 100 tokens; with 512 tokens each it would be 1" in refusal(tmp_path, json.dumps(line))


GOOD: Row = {"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"input_length": None}, "no input_length"),
        ({"input_length": 0, "hash_ids": []}, "input_length is out of range"),
        ({"input_length": -600}, "input_length is out of range"),
        ({"input_length": 600.0}, "input_length is not a whole number"),
        ({"input_length": True}, "input_length is not a whole number"),
        ({"input_length": 10**30}, "input_length is out of range"),
        ({"output_length": "7"}, "output_length is not a whole number"),
        ({"output_length": -1}, "output_length is out of range"),
        ({"hash_ids": [1]}, None),
        ({"hash_ids": [1, 2, 3]}, "3 hash_ids for 600 tokens"),
        ({"hash_ids": []}, "0 hash_ids for 600 tokens"),
        ({"hash_ids": [1, None]}, "hash_ids is not a list of whole numbers"),
        ({"hash_ids": [1, True]}, "hash_ids is not a list of whole numbers"),
        ({"hash_ids": {"1": 2}}, "hash_ids is not a list of whole numbers"),
        ({"hash_ids": [1, -2]}, "hash_ids has a number out of range"),
        ({"hash_ids": [1, 2**64]}, "hash_ids has a number out of range"),
        ({"timestamp": -1}, "timestamp is out of range"),
        ({"timestamp": "noon"}, "timestamp is not a number"),
        ({"timestamp": [1]}, "timestamp is not a number"),
        ({"timestamp": 10**400}, "timestamp is out of range"),
        ({"timestamp": float("nan")}, "NaN is not a number"),
        ({"timestamp": float("inf")}, "Infinity is not a number"),
        ({"n": 0}, "n is out of range"),
        ({"n": 10**6}, "n is out of range"),
    ],
)
def test_bad_lines_of_lengths(tmp_path: Path, change: Row, says: str | None) -> None:
    data = json.dumps(GOOD) + "\n" + json.dumps(GOOD | change) + "\n"
    if says is None:
        assert len(list(read_trace(write(tmp_path, data)))) == 2
    else:
        message = refusal(tmp_path, data)
        assert message.startswith(f"{tmp_path / 'trace.jsonl'}, line 2: {says}")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "has no requests"),
        (b"\n", "line 1: blank"),
        (b"  \t\n", "line 1: blank"),
        (json.dumps(GOOD).encode() + b"\n\n", "line 2: blank"),
        (b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), "line 1: begins with a byte order mark"),
        (json.dumps(GOOD).encode()[:-9], "line 1: not JSON"),
        (b"\x80\x81\n", "line 1: not text in UTF-8"),
        (b"\x00\x00\x00\n", "line 1: not JSON"),
        (b"[1, 2]\n", "line 1: not a JSON object"),
        (b"7\n", "line 1: not a JSON object"),
        (b"{}\n", "line 1: neither input_length nor messages nor prompt"),
        (b'{"a":' * 100_000, "line 1: nested too deeply"),
        (b'{"input_length": ' + b"9" * 5000 + b"}", "line 1: a number with too many digits"),
        (b"\x1f\x8b\x08", "the gzip data is cut off"),
        (b"\x1f\x8bnot gzip at all", "the gzip data is damaged"),
        (gzip.compress(MOONCAKE.encode())[:-12], "the gzip data is cut off"),
    ],
)
def test_bad_files(tmp_path: Path, data: bytes | str, says: str) -> None:
    assert says in refusal(tmp_path, data)


def test_damaged_gzip_data(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(MOONCAKE.encode() * 50))
    for at in range(20, len(packed), 7):
        damaged = bytearray(packed)
        damaged[at] ^= 0x55
        with pytest.raises(SourceError):
            list(read_trace(write(tmp_path, bytes(damaged))))


def test_times_must_not_go_back(tmp_path: Path) -> None:
    data = json.dumps(GOOD) + "\n" + json.dumps(GOOD | {"timestamp": 4}) + "\n"
    assert "line 2: it arrives before the line above" in refusal(tmp_path, data)


def test_a_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "MAX_LINE", 1000)
    assert "line 1: longer than" in refusal(tmp_path, b'{"a": "' + b"x" * 2000)


def test_a_gzip_bomb_is_not_unpacked_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "MAX_LINE", 2**20)
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb") as file:
        for _ in range(300):
            file.write(b"x" * 2**20)
    assert "line 1: longer than" in refusal(tmp_path, packed.getvalue())


def test_paths(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path, "a\0b"):
        with pytest.raises(SourceError):
            list(read_trace(path))


# Message logs.


def tokens(text: str) -> list[int]:
    """A token for each word and each line."""
    return [sum(word.encode()) * 31 + len(word) for word in text.replace("\n", " \n ").split(" ") if word]


CHAT: Row = {
    "timestamp": "2026-01-02T03:04:05Z",
    "messages": [{"role": "system", "content": "a " * 40}, {"role": "user", "content": "b " * 10}],
    "choices": [{"message": {"role": "assistant", "content": "c " * 9}}],
}


def test_messages_with_a_tokenizer(tmp_path: Path) -> None:
    follow = json.loads(json.dumps(CHAT))
    follow["timestamp"] = "2026-01-02T03:04:15+00:00"
    follow["messages"] += [{"role": "assistant", "content": "c " * 9}, {"role": "user", "content": "d " * 30}]
    one, two = rows(tmp_path, CHAT, follow, tokenizer=tokens)
    # Roles and line ends: "system \n a…a \n", so 40 + 3 and 10 + 3 tokens.
    assert (one.input_length, one.output_length, one.hash_tokens) == (56, 9, 16)
    assert (two.input_length, len(two.hash_ids)) == (56 + 12 + 33, 6)
    assert one.arrival is not None
    assert two.arrival == one.arrival + 10_000_000
    # 56 tokens are three runs of 16 and 8 more; the runs are found again.
    assert two.hash_ids[:3] == one.hash_ids
    found = replay([one, two], Setup(16, None, 1, 4096)).policies[2]
    assert found.hit_tokens == 48


def test_hashes_stand_for_all_before_them(tmp_path: Path) -> None:
    other = json.loads(json.dumps(CHAT))
    other["messages"][0]["content"] = "z " + "a " * 39
    one, two = rows(tmp_path, CHAT, other, tokenizer=tokens)
    assert not set(one.hash_ids) & set(two.hash_ids)


def test_usage_without_a_tokenizer(tmp_path: Path) -> None:
    log = {"created": 1_700_000_000, "request": {"messages": CHAT["messages"], "n": 3, "max_tokens": 99},
           "response": {"body": {"usage": {"prompt_tokens": 61, "completion_tokens": 20}}}}  # fmt: skip
    # 20 tokens over three choices: 7 each, rounded up.
    assert rows(tmp_path, log) == [Request(1_700_000_000_000_000, 61, 7, (), 3, 99, 16)]


def test_usage_corrects_the_tokenizer(tmp_path: Path) -> None:
    (found,) = rows(tmp_path, CHAT | {"usage": {"prompt_tokens": 70, "completion_tokens": 11}}, tokenizer=tokens)
    assert (found.input_length, found.output_length, len(found.hash_ids)) == (70, 11, 3)
    (found,) = rows(tmp_path, CHAT | {"usage": {"prompt_tokens": 20, "completion_tokens": 11}}, tokenizer=tokens)
    assert len(found.hash_ids) == 1


@pytest.mark.parametrize(
    ("value", "microseconds"),
    [
        ({"timestamp": 1_700_000_000.5}, 1_700_000_000_500_000),
        ({"timestamp": 1_700_000_000_500}, 1_700_000_000_500_000),
        ({"timestamp": 1500}, 1_500_000),
        ({"created": 1500}, 1_500_000_000),
        ({"timestamp": "1970-01-02"}, 86_400_000_000),
        ({}, None),
    ],
)
def test_times_of_logs(tmp_path: Path, value: Row, microseconds: int | None) -> None:
    log = {"prompt": "a", "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    assert rows(tmp_path, log | value)[0].arrival == microseconds


def test_other_shapes_of_logs(tmp_path: Path) -> None:
    plain = {"prompt": "a b c", "completion": "d e", "best_of": 2}
    assert rows(tmp_path, plain, tokenizer=tokens) == [Request(None, 3, 1, (), 2, None, 16)]
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a b"}]},
                          {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}],
             "choices": [{"text": "d e"}, {"text": "f g"}]}  # fmt: skip
    (found,) = rows(tmp_path, parts, tokenizer=tokens)
    assert (found.sequences, found.output_length) == (2, 2)
    surrogate = {"prompt": "a \ud800", "completion": "b"}
    assert rows(tmp_path, surrogate, tokenizer=tokens)[0].input_length == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"messages": []}, "messages is not a list of messages"),
        ({"messages": "hello"}, "messages is not a list of messages"),
        ({"messages": [1]}, "messages has something that is no message"),
        ({"messages": [{"content": "x"}]}, "a message without a role"),
        ({"messages": [{"role": "user", "content": 5}]}, "content is not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content has a part that is not text"),
        ({"choices": 5}, "choices is not a list of choices"),
        ({"choices": [5]}, "choices is not a list of choices"),
        ({"choices": None}, "neither an answer nor usage"),
        ({"n": "2"}, "n is not a whole number"),
        ({"usage": {"prompt_tokens": -1, "completion_tokens": 1}}, "prompt_tokens is out of range"),
        ({"usage": {}}, "no prompt_tokens"),
        ({"timestamp": "yesterday"}, "timestamp is neither a number nor a date"),
        ({"timestamp": "0001-01-01T00:00:00+14:00"}, "timestamp is out of range"),
        ({"timestamp": True}, "timestamp is not a number"),
    ],
)
def test_bad_lines_of_logs(tmp_path: Path, change: Row, says: str) -> None:
    assert says in refusal(tmp_path, json.dumps(CHAT | change), tokenizer=tokens)


def test_no_tokenizer_and_no_usage(tmp_path: Path) -> None:
    assert "no usage to take lengths from, and no tokenizer" in refusal(tmp_path, json.dumps(CHAT))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        "timestamp",
        "input_length",
        "output_length",
        "hash_ids",
        "n",
        "max_tokens",
        "chat_id",
        "parent_chat_id",
        "messages",
        "prompt",
        "completion",
        "choices",
        "response",
        "request",
        "body",
        "usage",
        "prompt_tokens",
        "completion_tokens",
        "created",
        "role",
        "content",
        "message",
        "text",
        "tool_calls",
    ]
)
ROWS = st.recursive(
    VALUES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=6), max_leaves=8
)


@settings(max_examples=300, deadline=None)
@given(row=ROWS, known=st.booleans())
@example(row={"prompt": [], "completion": ""}, known=True)
def test_anything_is_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, row: Any, known: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text(json.dumps(row) + "\n")
    try:
        for request in read_trace(path, tokenizer=tokens if known else None):
            assert request.input_length > 0
    except SourceError as error:
        assert "\n" not in error.message  # noqa: PT017


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), changes=st.integers(1, 8))
def test_damaged_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, seed: int, changes: int) -> None:
    dice = random.Random(seed)
    data = bytearray((MOONCAKE + json.dumps(CHAT) + "\n").encode())
    for _ in range(changes):
        data[dice.randrange(len(data))] = dice.randrange(256)
    path = tmp_path_factory.getbasetemp() / "bytes.jsonl"
    path.write_bytes(bytes(data[: dice.randrange(len(data))]))
    try:
        list(read_trace(path, tokenizer=tokens))
    except SourceError as error:
        assert "\n" not in error.message  # noqa: PT017


def test_standard_input_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)  # what Python makes of kvctl … <&-
    with pytest.raises(SourceError, match="standard input is closed"):
        list(read_trace("-"))


def test_a_trace_without_a_name() -> None:
    with pytest.raises(SourceError, match="without a name"):
        list(read_trace(""))


class Panic(BaseException):
    """Rust's panics, as Python sees them."""


@pytest.mark.parametrize(
    ("kind", "reason"), [("folder", "no such file"), ("sparse", "256 MiB"), ("hostile", "upside down")]
)
def test_what_is_no_tokenizer(tmp_path, monkeypatch: pytest.MonkeyPatch, kind: str, reason: str) -> None:
    """Nothing endless is read, and a panic is one plain line too."""

    class Tokenizer:
        @staticmethod
        def from_file(path: str) -> None:
            raise Panic("upside down")

    monkeypatch.setitem(sys.modules, "tokenizers", type("tokenizers", (), {"Tokenizer": Tokenizer}))
    path = tmp_path / "tokenizer.json"
    if kind == "folder":
        path.mkdir()
    else:
        path.write_text("{}")
        with path.open("r+b") as file:
            file.truncate(2**28 + 1 if kind == "sparse" else 2)
    with pytest.raises(SourceError, match=reason):
        _tokenizer(str(path))
