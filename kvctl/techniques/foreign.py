"""Caches of other people, for comparison in one run: transformers' quantized caches and NVIDIA's kvpress.

`hf:quanto-int4` is what `QuantizedCache` puts into each layer (transformers 5.24 cache_utils.py). The first pass goes in whole and
is attended to as it was; newer tokens wait unpacked until there are `residual` of them, then everything is unpacked and
packed anew. `kvpress:SnapKVPress:0.5` is a press of kvpress around the prompt's pass: it lets tokens go after
that pass, and none later. What runs them is `kvctl.measure.foreign`.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar

from kvctl.allocation import Serving
from kvctl.engines.transformers.quantized import Packing, packing
from kvctl.errors import ConfigError, UsageError
from kvctl.record import Record
from kvctl.spec import Formats, FullAttention, LayerState, Retention, Workload
from kvctl.techniques.options import Options

if TYPE_CHECKING:
    from kvctl.spec import Rational

_BACKENDS = {"quanto": (4, 2), "hqq": (8, 4, 3, 2, 1)}
_CACHES = ("fp8", *(f"{backend}-int{bits}" for backend, widths in _BACKENDS.items() for bits in widths))
_EXACT = (
    "CURPress", "CompactorPress", "ExpectedAttentionPress", "KeyDiffPress", "KnormPress", "LagKVPress", "LeverageScorePress",
    "NonCausalAttnPress", "ObservedAttentionPress", "RandomPress", "SnapKVPress", "StreamingLLMPress", "TOVAPress",
)  # fmt: skip
"""Presses that keep what ScorerPress.compress of kvpress keeps: int(tokens * (1 - compression_ratio)) of every head."""


class Foreign(Record):
    """Somebody else's cache, in place of one of kvctl's."""

    name: str
    """As errors name it."""
    shortens: ClassVar[bool] = False
    """Whether its cache does not tell positions: they have to be given."""

    @property
    def stored(self) -> str | None:
        """The format of what it packs."""
        return None

    @property
    def predicted(self) -> bool:
        """Whether kvctl knows its bytes without running it."""
        return True

    def state(self, state: FullAttention) -> LayerState:
        """What it leaves of a layer's keys and values."""
        raise NotImplementedError


def build(options: Options) -> Foreign:
    """`hf:quanto-int4:group=64:residual=128:axis=0`, `kvpress:SnapKVPress:0.5:window_size=32`."""
    return _quantized(options) if options.name == "hf" else _press(options)


# -- transformers' quantized caches ---------------------------------------------------------------


class Quantized(Foreign):
    """A backend of transformers' QuantizedCache."""

    packing: Packing

    @property
    def stored(self) -> str | None:
        return "fp8" if self.packing.backend == "fp8" else f"int{self.packing.nbits}"

    def state(self, state: FullAttention) -> LayerState:
        return Packed(state.kv_heads, state.key_dim, state.value_dim, self.packing)


class Packed(LayerState):
    """Keys and values in a layer of QuantizedCache."""

    kv_heads: int
    key_dim: int
    value_dim: int
    packing: Packing
    kind: ClassVar[str] = "full_attention"

    def tokens(self, work: Workload, keep: Retention) -> int:
        return work.context

    def size(self, work: Workload, fmt: Formats, keep: Retention) -> int:
        if not work.context:
            return 0
        copies = work.sequences * work.beams
        rows = (self.kv_heads, self.key_dim), (self.kv_heads, self.value_dim)
        packed = self.packing.replace(generated=work.generated)
        packed.check(rows, work.context, copies)
        total = packed.size(rows, work.context, copies, fmt)
        if total % copies:
            raise UsageError(f"{copies} sequences share bytes of {packed.backend}'s cache", hint="one sequence")
        return total // copies

    def growth(self, work: Workload, fmt: Formats, keep: Retention) -> Rational:
        """Of a longer prompt."""
        row = self.kv_heads * (self.key_dim + self.value_dim)
        if self.packing.backend == "fp8":
            return row
        codes = Fraction(4, 10) if self.packing.nbits == 3 else Fraction(self.packing.nbits, 8)
        return row * (codes + Fraction(2 * fmt.model.bytes, self.packing.q_group_size))


def _quantized(options: Options) -> Quantized:
    which = options.first("").lower()
    if which not in _CACHES:
        fault = (
            f":{which[:40]} is no quantized cache of transformers"
            if which
            else ": which quantized cache of transformers is not said"
        )
        raise UsageError(f"hf{fault}", hint="hf:quanto-int4; there are " + ", ".join(_CACHES))
    options.name = f"hf:{which}"
    backend, _, bits = which.partition("-int")
    if backend == "fp8":
        return Quantized(options.name, packing(Serving(cache_backend=backend), 1))
    group, residual = options.number("group", 64, least=1), options.number("residual", 128)
    other = -1 if backend == "quanto" else 1
    axis = 0 if options.choice("axis", ("0", "1")) == "0" else other
    serving = Serving(cache_backend=backend, nbits=int(bits), q_group_size=group, residual_length=residual,
                      axis_key=axis, axis_value=axis)  # fmt: skip
    return Quantized(options.name, packing(serving, 1))


# -- kvpress --------------------------------------------------------------------------------------


class Press(Foreign):
    """A press of kvpress around the prompt's pass."""

    press: str
    ratio: str | None = None
    """What it takes out, as it was written; None is the press's own default."""
    given: tuple[tuple[str, str], ...] = ()
    """What else it is made with."""
    shortens: ClassVar[bool] = True

    @property
    def predicted(self) -> bool:
        return self.press in _EXACT and self.ratio is not None

    def kept(self, prompt: int) -> int:
        """Tokens of a prompt that every head keeps, by the arithmetic of kvpress itself."""
        assert self.ratio is not None
        return int(prompt * (1 - float(self.ratio)))

    def state(self, state: FullAttention) -> LayerState:
        if not self.predicted:
            raise ConfigError(f"{self.name}: kvctl does not know how many tokens it keeps",
                              hint="it knows, with a ratio, of " + ", ".join(_EXACT))  # fmt: skip
        return Pressed(state.kv_heads, state.key_dim, state.value_dim, self)


class Pressed(LayerState):
    """What a press leaves of a prompt, and all tokens after it."""

    kv_heads: int
    key_dim: int
    value_dim: int
    press: Press
    kind: ClassVar[str] = "full_attention"

    def tokens(self, work: Workload, keep: Retention) -> int:
        return self.press.kept(work.context - work.generated) + work.generated

    def size(self, work: Workload, fmt: Formats, keep: Retention) -> int:
        return self.tokens(work, keep) * self.kv_heads * (self.key_dim + self.value_dim) * fmt.model.bytes

    def growth(self, work: Workload, fmt: Formats, keep: Retention) -> Rational:
        """Of a longer prompt."""
        assert self.press.ratio is not None
        return (1 - Fraction(self.press.ratio)) * self.kv_heads * (self.key_dim + self.value_dim) * fmt.model.bytes


def _press(options: Options) -> Press:
    which, ratio = options.first(""), options.first("")
    if not which:
        raise UsageError(
            "kvpress: which of its presses is not said", hint="kvpress:SnapKVPress:0.5 takes out half of a prompt"
        )
    if not which.isidentifier():
        raise UsageError(f"kvpress:{which[:40]} is no press", hint="kvpress:SnapKVPress:0.5")
    options.name = f"kvpress:{which}"
    if ratio:
        try:
            share = Fraction(ratio)
        except (ValueError, ZeroDivisionError):
            share = Fraction(-1)
        if not 0 <= share < 1 or "/" in ratio:
            raise UsageError(
                f"{options.name}: {ratio[:40]!r} is no compression ratio", hint="from 0, below 1: what goes"
            )
    return Press(options.name, which, ratio or None, options.rest())
