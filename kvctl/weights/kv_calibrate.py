"""Scales of an FP8 cache from a text: for every layer those that change its attention least.

The largest |k| (after RoPE, as it is stored) and |v| over 448 is where the search starts. Scales around it are tried on the
keys, values and queries of the text itself, by how far the attention's output moves. What was best on most of the text is
taken where it is better than the start on the rest too. Texts pass twice, and nothing of them is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError, UsageError
from kvctl.measure.faults import NotFinite
from kvctl.record import Record
from kvctl.techniques.codecs.floats import Fp8
from kvctl.weights.kv_scales import HEAD, LARGEST, TENSOR, LayerScales, Scales, layers_of

if TYPE_CHECKING:
    from torch import Tensor

    from kvctl.measure.loaded import Loaded

NAME = "kvctl-scales"
STEPS = tuple(range(-8, 9))
"""Scales that are tried, in eighths of a power of two around the start: from half of it, which cuts the largest values off,
to twice as much. A power of two more rounds the same way again, but for what becomes zero."""
_QUERIES = 64
"""Of a text of so many tokens or more, spread evenly."""
_CHECK_EVERY = 4
"""One text of so many says whether what was best on the others is better on it too."""
_TINY = 2.0**-100
"""A scale of tensors that are all zeros, or smaller than any engine's arithmetic can divide by, is 1."""

Watcher = Callable[[int, "Tensor", "Tensor", "Tensor", "Tensor | None", float], None]
"""Told of every layer's query, key, value, mask and scaling."""


class Half(Record):
    """Keys, or values, of a layer."""

    largest: float
    """Absolute value."""
    factor: tuple[float, ...]
    """Chosen scales over the largest value's (of the tensor, or of each head)."""
    error: float
    """Of the attention's output with the chosen scale, as a share of it (squares)."""
    plain_error: float
    """With the largest value over 448."""
    unscaled_error: float
    """With 1.0, which engines take where there are no scales."""
    cut: float
    """Share of elements that 1.0 cuts off, being larger than 448."""
    vanishing: float
    """Share of elements that are not zero, and are with 1.0."""


class LayerReport(Record):
    """What was found of a layer."""

    layer: int
    keys: Half
    values: Half


class Calibrated(Record):
    """What came of a calibration."""

    scales: Scales
    plain: Scales
    """The largest value over 448."""
    layers: tuple[LayerReport, ...]
    tokens: int


def calibrate(
    loaded: Loaded, ids: Tensor, *, strategy: str = TENSOR, told: Callable[[int, int], None] = lambda done, of: None
) -> Calibrated:
    """Scales for a model of texts [samples, tokens], two samples at least; `told` of each pass over a sample.

    Raises:
        ConfigError: the model keeps something else than keys and values, or does not run with sdpa.
        UsageError: too few samples.
        KvctlError: keys or values are not finite.

    """
    import torch

    if len(ids) < 2:
        raise UsageError("calibrating scales takes two samples of text or more: one of them checks what the others say")
    layers = layers_of(loaded.spec)
    ids = ids.to(loaded.device)
    found = {index: _Layer(index, strategy == HEAD) for index in layers}
    checks = range(_CHECK_EVERY - 1, len(ids), _CHECK_EVERY) or (len(ids) - 1,)
    with torch.inference_mode():
        for step, look in enumerate((_Layer.measure, _Layer.compare)):
            for number, sample in enumerate(ids):
                _read(loaded, found, sample, look, number in checks)
                told(step * len(ids) + number + 1, 2 * len(ids))
    chosen = [found[index].chosen() for index in layers]
    plain = [found[index].plain() for index in layers]
    reports = tuple(found[index].report() for index in layers)
    return Calibrated(Scales(tuple(chosen), strategy), Scales(tuple(plain), strategy), reports, ids.numel())


def _read(loaded: Loaded, found: Mapping[int, _Layer], sample: Tensor, look: Callable[..., None], check: bool) -> None:
    """Let every layer look at what it makes of a text."""
    seen: set[int] = set()

    def watch(index: int, *given: Any) -> None:
        if index in seen or index not in found:
            raise _astray(loaded, f"layer {index}")
        seen.add(index)
        look(found[index], *given, check=check)

    with watching(loaded.model, watch):
        loaded.model(input_ids=sample[None], use_cache=False)
    if seen != found.keys():
        raise _astray(loaded, f"layer {min(found.keys() - seen)}")


def _astray(loaded: Loaded, layer: str) -> ConfigError:
    return ConfigError(f"{loaded.spec.id}: {layer} of {type(loaded.model).__name__} does not pass once through transformers' attention functions",
                       hint="its scales cannot be calibrated")  # fmt: skip


class _Layer:
    """One layer's sums."""

    def __init__(self, index: int, per_head: bool) -> None:
        self.index, self.per_head = index, per_head
        self.keys, self.values = _Sums(), _Sums()
        self.whole: Tensor | None = None
        """Squares of the attention's output, by head."""

    def measure(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, check: bool
    ) -> None:
        for half, rows in ((self.keys, key), (self.values, value)):
            half.see(rows, self.index)

    def compare(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, check: bool
    ) -> None:
        asked = _Asked(query, key, mask, scaling)
        weights = asked.weights(key)
        out = weights @ value.float()
        whole = _by_head(out)
        self.whole = whole if self.whole is None else self.whole + whole
        for number, scale in enumerate(self._tried(self.keys)):
            far = asked.weights(_stored(key, scale)) @ value.float() - out
            self.keys.add(number, _by_head(far), check)
        for number, scale in enumerate(self._tried(self.values)):
            far = weights @ (_stored(value, scale).float() - value.float())
            self.values.add(number, _by_head(far), check)

    def _tried(self, half: _Sums) -> list[tuple[float, ...]]:
        start = half.start(self.per_head)
        return [tuple(_float32(2 ** (step / 8) * one) for one in start) for step in STEPS] + [(1.0,)]

    def _best(self, half: _Sums) -> list[int]:
        """Of each scale, which of those that were tried."""
        return half.best(self.per_head)

    def chosen(self) -> LayerScales:
        return LayerScales(self.index, *(
            tuple(self._tried(half)[step][at] for at, step in enumerate(self._best(half)))
            for half in (self.keys, self.values)
        ))  # fmt: skip

    def plain(self) -> LayerScales:
        return LayerScales(self.index, *(self._tried(half)[STEPS.index(0)] for half in (self.keys, self.values)))

    def report(self) -> LayerReport:
        return LayerReport(self.index, *(self._half(half) for half in (self.keys, self.values)))

    def _half(self, half: _Sums) -> Half:
        assert self.whole is not None
        whole = float(self.whole.sum()) or 1.0
        best, errors = self._best(half), half.errors()
        rows = [errors[step] for step in best]
        error = sum(float(row[at]) for at, row in enumerate(rows)) if self.per_head else float(rows[0].sum())
        return Half(
            float(half.top().max()), tuple(2 ** (STEPS[step] / 8) for step in best), error / whole,
            float(errors[STEPS.index(0)].sum()) / whole, float(errors[-1].sum()) / whole,
            half.cut / half.count, half.vanishing / half.count,
        )  # fmt: skip


class _Sums:
    """Of keys, or of values: largest values, and errors of every scale that was tried."""

    def __init__(self) -> None:
        self._top: Tensor | None = None
        self._errors: dict[bool, dict[int, Tensor]] = {False: {}, True: {}}
        self.count = self.cut = self.vanishing = 0

    def see(self, rows: Tensor, layer: int) -> None:
        """Rows [1, heads, tokens, dim] as they are stored."""
        sizes = rows.abs().float()
        top = sizes.amax((0, 2, 3))
        if not bool(top.isfinite().all()):
            raise NotFinite(f"layer {layer} makes keys or values that are not finite of the calibration text",
                             hint="another --dtype (fp32, bf16) has more range")  # fmt: skip
        self._top = top if self._top is None else self._top.maximum(top)
        self.count += sizes.numel()
        self.cut += int((sizes > LARGEST).sum())
        # Half of the smallest subnormal, 2^-9, is rounded to zero, ties to even.
        self.vanishing += int(((sizes <= 2.0**-10) & (sizes > 0)).sum())

    def top(self) -> Tensor:
        """Largest absolute values, by head."""
        assert self._top is not None
        return self._top

    def start(self, per_head: bool) -> tuple[float, ...]:
        """The largest value over 448: one, or one a head."""
        tops = self.top().tolist() if per_head else [float(self.top().max())]
        return tuple(one / LARGEST if one / LARGEST > _TINY else 1.0 for one in tops)

    def add(self, number: int, error: Tensor, check: bool) -> None:
        sums = self._errors[check]
        sums[number] = error if number not in sums else sums[number] + error

    def errors(self) -> list[Tensor]:
        """Of all texts, by what was tried and by head."""
        rest, check = self._errors[False], self._errors[True]
        return [rest[number] + check[number] for number in rest]

    def best(self, per_head: bool) -> list[int]:
        """What was tried that is best: for all heads, or for each; the start where the text that checks disagrees."""
        import torch

        start = STEPS.index(0)
        rest, check = (torch.stack([sums[number] for number in range(len(STEPS))]) for sums in self._errors.values())
        if not per_head:
            rest, check = rest.sum(1, keepdim=True), check.sum(1, keepdim=True)
        found = rest.argmin(0).tolist()
        return [at if check[at, head] < check[start, head] else start for head, at in enumerate(found)]


def _by_head(rows: Tensor) -> Tensor:
    """Squares of [1, heads, rows, dim], summed."""
    return rows.square().sum((0, 2, 3)).cpu().double()


def _stored(rows: Tensor, scales: tuple[float, ...]) -> Tensor:
    """As they come out of a cache with these scales."""
    kernel = Fp8("fp8", scales=scales).kernel()
    out: Tensor = kernel.decode(kernel.encode(rows), rows.dtype, rows.shape[-1])
    return out


def _float32(value: float) -> float:
    """The nearest number that fits what engines keep a scale in."""
    import struct

    found: float = struct.unpack("f", struct.pack("f", value))[0]
    return found


class _Asked:
    """Some of the queries, and what each may see."""

    def __init__(self, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> None:
        import torch

        tokens, self._heads = key.shape[2], key.shape[1]
        at = torch.linspace(0, tokens - 1, min(_QUERIES, tokens), device=query.device).round().long()
        groups = query.shape[1] // self._heads
        self._query = query[:, :, at].float().unflatten(1, (self._heads, groups)) * scaling
        if mask is None:
            self._mask = at[:, None] >= torch.arange(tokens, device=query.device)
        else:
            self._mask = (
                mask[..., at, :tokens].unsqueeze(2)
                if mask.shape[1] == 1
                else mask[..., at, :tokens].unflatten(1, (self._heads, groups))
            )

    def weights(self, key: Tensor) -> Tensor:
        """Attention [1, heads, queries of its group, tokens]."""
        scores = self._query @ key.float().unsqueeze(2).transpose(-1, -2)
        seen = self._mask
        import torch

        scores = scores.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else scores + seen.float()
        return scores.softmax(-1).flatten(2, 3)


@contextmanager
def watching(model: Any, watch: Watcher) -> Iterator[None]:
    """While it lasts `watch` is told of every attention of the model, which computes what it does without.

    Raises:
        ConfigError: the model does not run with torch's scaled_dot_product_attention.

    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    from kvctl.techniques import attention

    now = getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None)
    if now != "sdpa":
        raise ConfigError(f"scales are calibrated of a model that runs with sdpa, and {type(model).__name__} runs with {now}")  # fmt: skip

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        scaling = query.shape[-1] ** -0.5 if kwargs.get("scaling") is None else kwargs["scaling"]
        watch(getattr(module, "layer_idx", -1), query, key, value, mask, scaling)
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    attention.change(model, "sdpa", NAME)
    try:
        yield
    finally:
        attention.change(model, NAME, "sdpa")
