"""Calibration data: files of texts and chats, data sets on a Hub of the tests' own, and what is drawn from them.

Tokens are worked out by hand: the tokenizer has one for every character.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome
from fake_hub import FakeHub

from kvctl.errors import ConfigError, KvctlError, SourceError, UsageError
from kvctl.weights import calibration, hub_datasets, rows
from kvctl.weights.calibration import Wanted

Run = Callable[..., Outcome]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"


def lines(*values: Any) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def read(tmp_path: Path, data: bytes, name: str = "rows.jsonl") -> rows.Rows:
    (tmp_path / name).write_bytes(data)
    return rows.read([(tmp_path / name, name)])


# -- rows -----------------------------------------------------------------------------------


def test_columns_that_are_known(tmp_path: Path) -> None:
    shared = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}, CHAT[1]]
    found = read(tmp_path, lines(
        {"messages": CHAT, "prompt": "Hi"}, {"conversations": shared}, {"conversation": parts},
        {"prompt": CHAT[:1], "completion": CHAT[1:]}, {"prompt": "1+1=", "completion": "2"}, {"text": "Plain.", "id": 3},
        {"text": "  "}, {"text": None}, {"messages": []},
    ))  # fmt: skip
    assert [list(row.messages) for row in found.rows[:4]] == [CHAT] * 4
    assert [row.parts for row in found.rows[4:]] == [("1+1=", "2"), ("Plain.",)]
    assert found.columns == ("messages", "conversations", "conversation", "prompt", "completion", "text")
    assert found.whole
    assert found.rows[4].chat() == [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]


def test_forms_of_files(tmp_path: Path) -> None:
    values = [{"text": "One."}, {"text": "Two."}]
    forms = {
        "a.jsonl": lines(*values), "b.json": json.dumps(values, indent=1).encode(), "c.json": b"\xef\xbb\xbf" + lines(*values),
        "d.jsonl.gz": gzip.compress(lines(*values)), "e.json": gzip.compress(json.dumps(values).encode()),
        "f.ndjson": b"\n\n" + lines(*values), "g.txt": b"One.\nTwo.",
    }  # fmt: skip
    for name, data in forms.items():
        assert [row.parts[0].strip() for row in read(tmp_path, data, name).rows] == ["One.", "Two."], name


@pytest.mark.parametrize("half", ["\\ud83d", "\\uDE00", "\\udbff\\ud83d", "\\ude00\\ud83d"])
def test_halves_of_surrogate_pairs_are_replaced(tmp_path: Path, half: str) -> None:
    """JSON may escape them, and no tokenizer takes them; a pair (U+1F600) and an escaped backslash stay what they are."""
    count = half.count("\\u")
    text = f"a{half}b\\ud83d\\ude00 \\\\ud800"
    wanted = "a" + "\ufffd" * count + "b\U0001f600 \\ud800"
    forms = {
        "text": f'"{text}"', "messages": f'[{{"role": "user", "content": "{text}"}}]',
        "conversations": f'[{{"from": "human", "value": "{text}"}}]',
    }  # fmt: skip
    data = "\n".join(f'{{"{name}": {value}}}' for name, value in forms.items())
    data += f'\n{{"prompt": "{text}", "completion": "{text}"}}'
    array = "[" + data.replace("\n", ",") + "]"
    for name, content in (("a.jsonl", data), ("b.json", array), ("c.jsonl.gz", data)):
        packed = content.encode() if not name.endswith("gz") else gzip.compress(content.encode())
        found = read(tmp_path, packed, name).rows
        assert found[0].parts == (wanted,)
        assert [row.messages[0]["content"] for row in found[1:3]] == [wanted] * 2
        assert found[3].parts == (wanted, wanted)


def test_calls_of_tools(tmp_path: Path) -> None:
    """OpenAI's form: no content, and arguments that are JSON in a string, which templates take as an object."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "\\ud800"}'}}
    chat = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "3"},
            {"role": "assistant", "content": "Three", "tool_calls": None}]  # fmt: skip
    (row,) = read(tmp_path, lines({"messages": chat})).rows
    object_ = call | {"function": {"name": "add", "arguments": {"a": 1, "b": "\ufffd"}}}
    assert list(row.messages) == [
        CHAT[0], {"role": "assistant", "content": "", "tool_calls": [object_]},
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"}, {"role": "assistant", "content": "Three"},
    ]  # fmt: skip
    for odd in ("x", [3], [{"function": {"arguments": "{"}}]):
        (row,) = read(tmp_path, lines({"messages": [{"role": "assistant", "tool_calls": odd}]})).rows
        assert row.messages[0]["tool_calls"] == odd


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"id": 1, "messages": CHAT}, {"id": 2, "messages": CHAT}]), path)
    found = rows.read([(path, "rows.parquet")])
    assert [list(row.messages) for row in found.rows] == [CHAT, CHAT]
    parquet.write_table(pyarrow.Table.from_pylist([{"question": "?", "answer": "!"}]), path)
    with pytest.raises(UsageError, match="no column that is known; it has question, answer"):
        rows.read([(path, "rows.parquet")])
    path.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(SourceError, match="is no Parquet file, or damaged"):
        rows.read([(path, "rows.parquet")])
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(KvctlError, match="pyarrow is not installed") as caught:
        rows.read([(path, "rows.parquet")])
    assert "kvctl[parquet]" in str(caught.value.hint)


@pytest.mark.parametrize(("name", "data", "said"), [
    ("a.jsonl", b"", "a.jsonl is empty"),
    ("a.jsonl", b"\n \n", "no row with anything in it"),
    ("a.jsonl", b"\x00\xff\xfe binary", "is not UTF-8 text"),
    ("a.jsonl", lines({"text": "x"}) + b"{'text': 1}", "a.jsonl, line 2 is not JSON"),
    ("a.jsonl", lines({"text": "x"}, [1, 2]), "is a list, not an object"),
    ("a.jsonl", lines("text"), "line 1 is 'text', not an object"),
    ("a.json", b'[{"text": "x"}, 7]', "a.json, row 2 is 7, not an object"),
    ("a.jsonl", lines({"question": "?", "answer": "!"}), "no column that is known; it has question, answer"),
    ("a.jsonl", lines({}), "it has none"),
    ("a.jsonl", lines({"text": 7}), "line 1: text is 7, not text"),
    ("a.jsonl", lines({"messages": "Hi"}), "messages is 'Hi', not a list of messages"),
    ("a.jsonl", lines({"messages": [{"role": "user"}]}), "a message without a role or a text"),
    ("a.jsonl", lines({"messages": [{"content": "x", "role": 3}]}), "a message without a role or a text"),
    ("a.jsonl", lines({"text": ""}), "no row with anything in it"),
    ("a.jsonl", b'{"text": ' + b"[" * 100_000, "nested too deep"),
    ("a.jsonl", b'{"text": ' + b"1" * 5000 + b"}", "thousands of digits"),
    ("a.jsonl.gz", gzip.compress(b"x" * 100_000)[:60], "is a gzip file that is damaged"),
    ("a.jsonl.gz", gzip.compress(b"1" * 20_000_000), "line 1 has more than 10 MB"),
    ("a.json.gz", gzip.compress(b"[" + b" " * 200_000_000), "has more than 100 MB"),
    ("a.jsonl.gz", gzip.compress(b"\n" * 200_000_000), "nothing but empty lines"),
    ("a.jsonl.zst", b"\x28\xb5\x2f\xfd....", "is packed with zstd"),
], ids=lambda value: str(value)[:30])  # fmt: skip
def test_files_that_nobody_has_vouched_for(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    with pytest.raises(KvctlError) as caught:
        read(tmp_path, data, name.removesuffix(".zst"))
    assert said in caught.value.message
    assert caught.value.message.isprintable()


def test_no_more_rows_are_read_than_samples_are_drawn_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MOST", 3)
    found = read(tmp_path, lines(*[{"text": "x"}] * 3) + b"this is not read")
    assert (len(found.rows), found.whole) == (3, False)


# -- data sets ------------------------------------------------------------------------------

HEAD = """---
license: cc-by-4.0
configs:
- config_name: raw
  data_files:
  - split: train
    path: raw/train-*
  - split: test
    path: "raw/test*.jsonl"
- config_name: small
  default: true
  data_files:
    train: ["small/**/a.jsonl"]
- config_name: other
  data_dir: other
---
# A data set
"""
FILES = {
    "README.md": HEAD.encode(),
    "raw/train-00.jsonl": lines({"text": "raw train"}), "raw/train-01.jsonl": lines({"text": "more"}),
    "raw/test.jsonl": lines({"text": "raw test"}), "small/x/y/a.jsonl": lines({"text": "small train"}),
    "other/validation.jsonl": lines({"text": "other validation"}), "other/test.jsonl": lines({"text": "other test"}),
    "dataset_infos.json": b"{}",
}  # fmt: skip


@pytest.fixture
def hub(surroundings: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        server.add("datasets/org/set", files=FILES)
        yield server


def drawn(name: str) -> tuple[list[str], dict[str, Any]]:
    """Texts of what a name asks for, and what is said of it."""
    corpus = calibration.gather(Wanted(name))
    return ["".join(row.parts) for row in corpus.rows], dict(corpus.facts)


torch_only = pytest.mark.engine


@pytest.mark.parametrize(("name", "texts"), [
    ("org/set", ["small train"]), ("org/set:small", ["small train"]), ("org/set:train", ["small train"]),
    ("org/set:raw", ["raw train", "more"]), ("org/set:raw:test", ["raw test"]), ("org/set:other:test", ["other test"]),
    ("hf://datasets/org/set:raw:test", ["raw test"]), ("org/set@main:raw:test", ["raw test"]),
])  # fmt: skip
def test_parts_of_a_data_set(hub: FakeHub, name: str, texts: list[str]) -> None:
    pytest.importorskip("transformers")
    found, facts = drawn(name)
    assert found == texts
    assert facts["revision"] == hub.repositories["datasets/org/set"].commit
    assert (facts["name"], facts["licence"], facts["columns"]) == ("org/set", "cc-by-4.0", ["text"])
    assert all(file.startswith("org/set/") for file in facts["files"])


def test_splits_by_names_of_files() -> None:
    """As the Hub tells them where no card does (hub/datasets-file-names-and-splits)."""
    by = hub_datasets.parts_of
    assert by(["data/train_sft-00000-of-00003-a1.parquet", "data/test_sft-00000-of-00001.parquet", "x.md"], {}) == {
        "default": {"train_sft": ["data/train_sft-00000-of-00003-a1.parquet"], "test_sft": ["data/test_sft-00000-of-00001.parquet"]}
    }  # fmt: skip
    assert by(["my-train.jsonl", "valid/a.json.gz", "testing_1.json", "README.md", "state.json"], {}) == {
        "default": {"train": ["my-train.jsonl"], "validation": ["valid/a.json.gz"], "test": ["testing_1.json"]}
    }
    assert by(["latest.jsonl"], {}) == {"default": {"train": ["latest.jsonl"]}}
    assert by(["script.py", "requirements.txt", "val.jsonl.zst"], {}) == {}
    # allenai/c4's card
    head = {"configs": [{"config_name": "en", "data_files": [{"split": "train", "path": "en/c4-train.*.json.gz"}]}]}
    assert by(["en/c4-train.00000-of-01024.json.gz", "en/c4-validation.json.gz"], head) == {
        "en": {"train": ["en/c4-train.00000-of-01024.json.gz"]}
    }


@pytest.mark.parametrize(("name", "said", "hint"), [
    ("org/set:nope", "org/set on the Hub has no configuration or split 'nope'", "configurations: raw, small, other; splits: train, test"),
    ("org/set:raw:dev", "org/set on the Hub has no split 'dev'", "it has: train, test"),
    ("org/set:none:train", "org/set on the Hub has no configuration 'none'", "it has: raw, small, other"),
    ("org/set:other", "org/set on the Hub has 2 splits, and none is named", "they are: test, validation"),
    ("org/nothing", "org/nothing: not found on the Hub, or private", "hf auth login"),
    ("org/set@v2", "org/set has no revision v2", "tree/main"),
    ("org/script", "org/script on the Hub has no data in JSON, Parquet or text files (its files: .py, .zst)", "make a file"),
    ("org/gated", "org/gated is gated, and its owner has not granted you access", "hf auth login"),
    ("org/huge", "train.jsonl of org/huge has 10.0 GB, and 2 GB are downloaded at most", "give some of its rows"),
    ("org/broken", "not JSON", "JSON Lines"),
])  # fmt: skip
def test_what_a_data_set_has_not(hub: FakeHub, name: str, said: str, hint: str) -> None:
    pytest.importorskip("transformers")
    hub.add("datasets/org/script", files={"script.py": b"", "val.jsonl.zst": b""})
    hub.add("datasets/org/gated", files={"train.jsonl": lines({"text": "x"})}, gated=True)
    hub.add("datasets/org/huge", files={"train.jsonl": 10**10})
    hub.add("datasets/org/broken", files={"README.md": b"---\n: [\n---\n", "train.jsonl": b"<html>"})
    with pytest.raises(KvctlError) as caught:
        calibration.gather(Wanted(name))
    assert said in caught.value.message
    assert hint in str(caught.value.hint)


def test_the_token_is_sent_and_not_shown(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(SourceError, match="the Hub refused the token") as caught:
        calibration.gather(Wanted("org/set"))
    assert "hf_secret" not in f"{caught.value.message} {caught.value.hint}"
    hub.tokens.add("hf_secret")
    assert drawn("org/set")[0] == ["small train"]
    assert {request.token for request in hub.requests} == {"hf_secret"}


def test_without_a_connection_the_cache_answers(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    before = drawn("org/set:raw:test")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for name in [name for name in __import__("sys").modules if name.partition(".")[0] == "huggingface_hub"]:
        monkeypatch.delitem(__import__("sys").modules, name)
    assert drawn("org/set:raw:test") == before
    with pytest.raises(UsageError, match="org/set in the Hub cache has no configuration or split 'nope'"):
        calibration.gather(Wanted("org/set:nope"))
    with pytest.raises(SourceError, match="org/other is not in the Hub cache, and the Hub cannot be reached"):
        calibration.gather(Wanted("org/other"))


# -- samples --------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer: a token a character, "?" and those from the space on."""
    pytest.importorskip("transformers")
    import awq_models

    folder = tmp_path / "model"
    awq_models.tokenizer(120).save_pretrained(folder)
    return folder


def ids(text: str) -> list[int]:
    """By hand: token 0 is "?", 1 the space, and others follow in Unicode's order; lines' ends together are unknown, which is 0."""
    codes = [ord(letter) for letter in text.replace("\n\n", "?")]
    return [0 if code == ord("?") else code - 31 - (code > ord("?")) for code in codes]


def sample(
    model: Path, tmp_path: Path, data: bytes, count: int, length: int, *, chat: bool = False, seed: int = 0
) -> calibration.Samples:
    (tmp_path / "rows.jsonl").write_bytes(data)
    return calibration.draw(model, Wanted(str(tmp_path / "rows.jsonl"), chat), count, length, seed)


def test_rows_are_joined_and_cut(model: Path, tmp_path: Path) -> None:
    """Two rows of six characters, an empty line (a token) after each: 14 tokens, in the seed's order."""
    found = sample(model, tmp_path, lines({"text": "abcdef"}, {"text": "ghijkl"}), 2, 7)
    assert found.ids.tolist() in ([ids("abcdef\n\n"), ids("ghijkl\n\n")], [ids("ghijkl\n\n"), ids("abcdef\n\n")])
    assert {name: found.facts[name] for name in ("rows", "rows_read", "rows_left_out", "chat_template", "tokens")} == {
        "rows": 2, "rows_read": 2, "rows_left_out": 0, "chat_template": False, "tokens": 14
    }  # fmt: skip
    with pytest.raises(UsageError, match="has 14 tokens: 2 of 3 samples of 7"):
        sample(model, tmp_path, lines({"text": "abcdef"}, {"text": "ghijkl"}), 3, 7)


def test_the_seed_decides(model: Path, tmp_path: Path) -> None:
    data = lines(*({"text": chr(65 + at) * 6} for at in range(20)))
    first = sample(model, tmp_path, data, 5, 8).ids.tolist()
    assert sample(model, tmp_path, data, 5, 8).ids.tolist() == first
    assert sample(model, tmp_path, data, 5, 8, seed=1).ids.tolist() != first


def test_chats_go_through_the_template(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no chat template, and calibration data are chats"):
        sample(model, tmp_path, lines({"messages": CHAT}), 1, 20)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    text = "<user>Hi;<assistant>Yes;"
    found = sample(model, tmp_path, lines({"messages": CHAT}), 1, len(text))
    assert found.ids.tolist() == [ids(text)]
    assert found.facts["chat_template"] is True
    found = sample(model, tmp_path, lines({"text": "Hello"}), 1, 12, chat=True)
    assert found.ids.tolist() == [ids("<user>Hello;")]


def test_texts_become_turns_where_that_is_asked_for(model: Path, tmp_path: Path) -> None:
    (model / "chat_template.jinja").write_text(TEMPLATE)
    found = sample(model, tmp_path, lines({"prompt": "a", "completion": "b"}), 1, 21, chat=True)
    assert found.ids.tolist() == [ids("<user>a;<assistant>b;")[:21]]
    (tmp_path / "text.txt").write_text("One.\n\nTwo.")
    found = calibration.draw(model, Wanted(str(tmp_path / "text.txt"), True), 2, 11, 0)
    assert sorted(found.ids.tolist()) == sorted([ids("<user>One.;"), ids("<user>Two.;")])


def test_chats_that_a_template_refuses_are_counted(model: Path, tmp_path: Path) -> None:
    (model / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    )
    odd = {"messages": [{"role": "system", "content": "Be."}]}
    found = sample(model, tmp_path, lines(odd, {"messages": CHAT}, odd), 1, 20)
    assert (found.facts["rows"], found.facts["rows_left_out"]) == (1, 2)
    with pytest.raises(ConfigError, match="refuses all rows: no system"):
        sample(model, tmp_path, lines(odd, odd), 1, 20)


def test_templates_have_calls_of_tools_or_leave_them_out(model: Path, tmp_path: Path) -> None:
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    odd = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
    knows = "{% for m in messages %}{{ m.tool_calls[0].function.arguments.a }}={{ m.content }};{% endfor %}"
    (model / "chat_template.jinja").write_text(knows)
    found = sample(model, tmp_path, lines(odd), 1, 3)
    assert found.ids.tolist() == [ids("1=;")]
    refuses = "{% if messages[0].tool_calls %}{{ raise_exception('no tools') }}{% endif %}" + TEMPLATE
    (model / "chat_template.jinja").write_text(refuses)
    found = sample(model, tmp_path, lines(odd, {"messages": CHAT}), 1, 20)
    assert (found.facts["rows"], found.facts["rows_left_out"]) == (1, 1)


def test_a_packed_text_is_unpacked(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.txt.gz"
    path.write_bytes(gzip.compress(b"abcdef"))
    assert calibration.draw(model, Wanted(str(path)), 1, 6, 0).ids.tolist() == [ids("abcdef")]
    path.write_bytes(gzip.compress(b"a" * 1000)[:20])
    with pytest.raises(SourceError, match=r"text\.txt\.gz is a gzip file that is damaged"):
        calibration.read(path)
    monkeypatch.setattr(rows, "LONGEST", 999)
    path.write_bytes(gzip.compress(b"a" * 1000))
    with pytest.raises(UsageError, match="has more than 0 MB"):
        calibration.read(path)


def test_a_first_token_stands_at_the_head_of_samples_alone(model: Path, tmp_path: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.bos_token = "!"
    adding = pytest.importorskip("tokenizers").processors.TemplateProcessing(single="! $A", special_tokens=[("!", 2)])
    tokenizer.backend_tokenizer.post_processor = adding
    tokenizer.save_pretrained(model)
    (model / "chat_template.jinja").write_text("!" + TEMPLATE)
    text = "<user>Hi;<assistant>Yes;"
    found = sample(model, tmp_path, lines({"messages": CHAT}, {"messages": CHAT}), 2, 25)
    assert found.ids.tolist() == [ids("!" + text), ids("!" + text)]


def test_kvctls_own_text_is_named_with_its_licence(model: Path) -> None:
    facts = calibration.draw(model, Wanted(), 2, 8, 0).facts
    assert facts["name"] == "kvctl's own text"
    assert "Apache-2.0" in facts["licence"]


@pytest.mark.parametrize(
    "name",
    ["nowhere.txt", "./nowhere", "/", "a/b/c", "org/name:a:b:c", "org name", "a\nb", "x--y", "..", "nowhere.jsonl"],
)
def test_neither_a_file_nor_a_data_set(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        Wanted(name).check()
    assert caught.value.message.isprintable()
