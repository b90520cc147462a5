"""Techniques that make a KV cache smaller: one table, in the order in which they are shown.

Adding one: a file with `build(options)`, a row here, and its lines in docs/techniques.md; the tests go over the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from kvctl.errors import UsageError
from kvctl.record import Record
from kvctl.techniques.convert import Convert
from kvctl.techniques.foreign import Foreign
from kvctl.techniques.keep import Keep
from kvctl.techniques.options import Options
from kvctl.techniques.paging import Paging
from kvctl.techniques.store import Store


class Kind(Record):
    """A row of the table."""

    name: str
    module: str
    what: str
    """In one line."""
    paper: str
    """Where it comes from: an arXiv number, or the engine whose format it is."""
    in_all: bool = True
    """Whether "all" means it too."""


_STORES = ".stores"
TABLE: tuple[Kind, ...] = (
    Kind(
        "int8",
        _STORES,
        "8-bit integers in groups of 64 of a token's channels, with scale and minimum",
        "round to nearest",
    ),
    Kind(
        "int4",
        _STORES,
        "4-bit integers in groups of 64 of a token's channels, with scale and minimum",
        "round to nearest",
    ),
    Kind(
        "int2",
        _STORES,
        "2-bit integers in groups of 64 of a token's channels, with scale and minimum",
        "round to nearest",
    ),
    Kind(
        "kivi8",
        _STORES,
        "8-bit integers: keys by channel over 32 tokens, values by token, the newest 128 as they are",
        "arXiv 2402.02750",
    ),
    Kind(
        "kivi4",
        _STORES,
        "4-bit integers: keys by channel over 32 tokens, values by token, the newest 128 as they are",
        "arXiv 2402.02750",
    ),
    Kind(
        "kivi2",
        _STORES,
        "2-bit integers: keys by channel over 32 tokens, values by token, the newest 128 as they are",
        "arXiv 2402.02750",
    ),
    Kind("fp8", _STORES, "8-bit floats (e4m3), scale 1", "vLLM --kv-cache-dtype fp8"),
    Kind("fp8_e5m2", _STORES, "8-bit floats (e5m2), scale 1", "vLLM --kv-cache-dtype fp8_e5m2"),
    Kind("fp8_per_token_head", _STORES, "8-bit floats with a scale for each token and head", "vLLM"),
    Kind("int8_per_token_head", _STORES, "8-bit integers with a scale for each token and head", "vLLM"),
    Kind("int4_per_token_head", _STORES, "4-bit integers with scale and zero for each token and head", "vLLM"),
    Kind("mxfp8", _STORES, "8-bit floats with a power of two for every 32", "OCP Microscaling 1.0"),
    Kind("mxfp4", _STORES, "4-bit floats with a power of two for every 32", "OCP Microscaling 1.0"),
    Kind("nvfp4", _STORES, "4-bit floats with an 8-bit scale for every 16", "NVIDIA NVFP4"),
    Kind("q8_0", _STORES, "8-bit integers with a scale for every 32", "llama.cpp -ctk q8_0"),
    Kind("q5_1", _STORES, "5-bit integers with scale and minimum for every 32", "llama.cpp -ctk q5_1"),
    Kind("q5_0", _STORES, "5-bit integers with a scale for every 32", "llama.cpp -ctk q5_0"),
    Kind("q4_1", _STORES, "4-bit integers with scale and minimum for every 32", "llama.cpp -ctk q4_1"),
    Kind("q4_0", _STORES, "4-bit integers with a scale for every 32", "llama.cpp -ctk q4_0"),
    Kind("iq4_nl", _STORES, "4-bit code book with a scale for every 32", "llama.cpp -ctk iq4_nl"),
    Kind(
        "paged",
        ".paging",
        "blocks of 16 tokens, each taken when it is needed, and a table of them",
        "arXiv 2309.06180",
    ),
    Kind("streaming-llm", ".keeps.streaming_llm", "the first tokens and the newest", "arXiv 2309.17453"),
    Kind("h2o", ".keeps.h2o", "tokens that got most attention so far, and the newest", "arXiv 2306.14048"),
    Kind(
        "scissorhands",
        ".keeps.scissorhands",
        "tokens that mattered to recent queries, and the newest; half go at once",
        "arXiv 2305.17118",
    ),
    Kind("tova", ".keeps.tova", "tokens that the newest query attends to most", "arXiv 2401.06104"),
    Kind(
        "snapkv",
        ".keeps.snapkv",
        "of the prompt, tokens that its last queries attend to; all generated ones",
        "arXiv 2404.14469",
    ),
    Kind(
        "pyramidkv",
        ".keeps.pyramidkv",
        "as snapkv, more of them in the first layers and fewer in the last",
        "arXiv 2406.02069",
    ),
    Kind(
        "expected-attention",
        ".keeps.expected",
        "of the prompt, tokens that queries to come are expected to attend to; all generated ones",
        "arXiv 2510.00636",
    ),
    Kind("knorm", ".keeps.knorm", "tokens whose keys have the smallest norms", "arXiv 2406.11430"),
    Kind(
        "gqa",
        ".convert",
        "fewer KV heads: projections of every group averaged, without the training that goes with it",
        "arXiv 2305.13245",
        in_all=False,
    ),
    Kind("window", ".keeps.window", "the newest tokens", "for comparison"),
    Kind("random", ".keeps.random_tokens", "tokens drawn by lot", "for comparison"),
)
_FOREIGN = ".foreign"
OTHERS: tuple[Kind, ...] = (
    Kind("hf", _FOREIGN, "transformers' own quantized caches, by quanto, HQQ or in fp8", "transformers QuantizedCache"),
    Kind("kvpress", _FOREIGN, "a press of kvpress, on the prompt alone", "github.com/NVIDIA/kvpress"),
)
"""Caches of other people, for comparison: they need packages of their own, and "all" is without them."""
_BY_NAME = {kind.name: kind for kind in (*TABLE, *OTHERS)}


class Technique(Record):
    """What is asked for with --technique, composed."""

    name: str
    """As it was written."""
    store: Store = Store()
    keep: Keep | None = None
    convert: Convert | None = None
    """What is done to the model first."""
    paging: Paging | None = None
    kinds: tuple[Kind, ...] = ()
    foreign: Foreign | None = None
    """Somebody else's cache, instead of both."""
    of_all: bool = False
    """Whether nobody asked for it by name."""
    stores: tuple[Store, ...] = ()
    """For every layer of the cache its own, of as many bytes as `store`: static scales differ by layer. Empty: `store` for all."""

    def store_at(self, index: int) -> Store:
        """How the layer of the cache at `index` is stored."""
        return self.stores[index] if self.stores else self.store

    @property
    def by_layer(self) -> bool:
        """Whether layers are treated differently."""
        return self.keep is not None and self.keep.by_layer

    @property
    def scheme(self) -> str:
        """How tokens are stored, in words."""
        words = "; ".join(kind.what for kind in self.kinds if kind.module in (_STORES, _FOREIGN))
        codec = self.store.keys.codec
        scaled = codec is not None and codec.name.endswith("-scaled")
        return words.replace("scale 1", "one measured scale a layer") if scaled else words

    @property
    def papers(self) -> tuple[str, ...]:
        """A line for each part: what it does, and where it comes from."""
        return tuple(
            f"{kind.name}: {self.scheme if kind.module == _STORES else kind.what} ({kind.paper})" for kind in self.kinds
        )

    @property
    def predicted(self) -> bool:
        """Whether its bytes are known without running it."""
        return self.foreign is None or self.foreign.predicted

    @property
    def plain(self) -> bool:
        """Whether nothing is packed, nothing is let go and the model is as it was."""
        return self.like_plain and self.convert is None

    @property
    def like_plain(self) -> bool:
        """Whether nothing is packed, nothing is let go, and all lies in one piece."""
        return self.store == Store() and self.keep is None and self.paging is None and self.foreign is None


PLAIN = Technique("plain")
"""Nothing: what others are compared with."""


def parse(text: str, option: str = "--technique") -> Technique:
    """ "int4:group=32+streaming-llm:0.25": parts joined by +, each a name and its options behind colons; `option` is what errors call it.

    Raises:
        UsageError: an unknown name or option, or parts that do not go together.

    """
    if text.strip().lower() == PLAIN.name:
        return PLAIN
    store, keep, convert, paging, kinds = Store(), None, None, None, []
    for part in text.split("+"):
        name, *words = part.strip().split(":")
        kind = _BY_NAME.get(name.lower())
        if kind is None:
            raise _unknown(name, option)
        options = Options(kind.name, words)
        made = import_module(kind.module, __name__).build(options)
        options.end()
        kinds.append(kind)
        if isinstance(made, Foreign):
            if "+" in text:
                raise UsageError(f"{text[:80]}: {options.name} is a whole cache by itself", hint="without +")
            return Technique(text.strip(), kinds=(kind,), foreign=made)
        if isinstance(made, Paging):
            if paging is not None:
                raise UsageError(f"{text[:80]}: two parts cut it in whole blocks", hint="one of them")
            paging = made
        elif isinstance(made, Keep):
            if keep is not None:
                raise UsageError(
                    f"{text[:80]}: {keep.name} and {made.name} both say which tokens stay", hint="one of them"
                )
            keep = made
        elif isinstance(made, Convert):
            if convert is not None:
                raise UsageError(f"{text[:80]}: {convert.name} and {made.name} both join KV heads", hint="one of them")
            convert = made
        else:
            if store != Store():
                raise UsageError(f"{text[:80]}: two parts say how tokens are stored", hint="one of them")
            store = made
    if paging is not None and (store != Store() or keep is not None):
        raise UsageError(f"{text[:80]}: paged keeps all tokens as they are, in whole blocks", hint="paged by itself")
    if keep is not None:
        keep = _together(text, store, keep)
    return Technique(text.strip(), store, keep, convert, paging, tuple(kinds))


def _together(text: str, store: Store, keep: Keep) -> Keep:
    """The eviction, with what is not packed among what always stays.

    Raises:
        UsageError: a token would go out of the middle of a group, or one that is not packed.

    """
    for half in (store.keys, store.values):
        if half.codec is None:
            continue
        if half.codec.tokens > 1:
            raise UsageError(f"{text[:80]}: {half.codec.name} packs {half.codec.tokens} tokens together, and {keep.name} lets go of single ones",
                             hint="a format that packs each token by itself: int8, int4, fp8")  # fmt: skip
        if half.sinks > keep.sinks:
            raise UsageError(f"{text[:80]}: the first {half.sinks} tokens are not packed, and {keep.name} may let go of them",
                             hint=f"it keeps the first {keep.sinks}: sinks={keep.sinks}, or more of them there")  # fmt: skip
        keep = keep.holding(half.residual, half.sinks)
    if store.unrotated:
        raise UsageError(f"{text[:80]}: keys that are packed before their rotary embedding need every position",
                         hint="without rope=before")  # fmt: skip
    return keep


def parse_list(texts: Sequence[str], option: str = "--technique") -> list[Technique]:
    """Each of several --technique, with commas between some: a list to compare, without repeats; "all" is the table, of which
    a model may leave out what does not work with it."""
    found: dict[str, Technique] = {}
    for part in (part.strip() for text in texts for part in text.split(",")):
        if part.lower() == "all":
            names = [kind.name for kind in TABLE if kind.in_all]
            found = {name: parse(name).replace(of_all=True) for name in names} | found
        elif part:
            found[part] = parse(part, option)
    return list(found.values())


def _unknown(name: str, option: str) -> UsageError:
    import difflib

    near = difflib.get_close_matches(name[:40].lower(), _BY_NAME, 3)
    return UsageError(f"{option}: unknown {name[:40]!r}",
                      hint=(f"nearest: {', '.join(near)}; " if near else "") + "one of " + ", ".join(kind.name for kind in TABLE)
                      + ", hf:…, kvpress:…; all is those of kvctl")  # fmt: skip
