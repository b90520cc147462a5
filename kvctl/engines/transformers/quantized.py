"""What transformers' QuantizedCache takes: packed tokens, their scales, and a residual.

Source: transformers 5.24 cache_utils.py; optimum-quanto 0.2.7 tensor/{grouped,packed}.py and
optimizers/; hqq 0.2.8 core/{quantize,bitpack}.py. Measured with both (tests/data).

The first call packs the prompt whole. Tokens generated after it stay in the model's dtype until
there are `residual_length` of them; then everything is unpacked and packed anew. fp8 packs
each token as it comes.
"""

from __future__ import annotations

from kvctl.allocation import Serving
from kvctl.errors import UsageError
from kvctl.record import Record
from kvctl.spec import Formats

Shape = tuple[int, int]
"""Heads and width of a cached tensor."""

_BITS = {"quanto": (2, 4), "hqq": (1, 2, 3, 4, 8)}
_AXES = {"quanto": (0, -1), "hqq": (0, 1)}


def packing(serving: Serving, context: int) -> Packing:
    """Settings with transformers' defaults filled in.

    Raises:
        UsageError: what the backend refuses.

    """
    backend = serving.cache_backend or "quanto"
    generated = serving.generated or 0
    if not 0 <= generated < context:
        raise UsageError(f"{generated:,} generated tokens of {context:,} leave no prompt",
                         hint="the context counts prompt and generated tokens")  # fmt: skip
    given = {
        name: getattr(serving, name) for name in ("nbits", "q_group_size", "residual_length", "axis_key", "axis_value")
    }
    if backend == "fp8":
        named = [name for name, value in given.items() if value is not None]
        if named:
            raise UsageError(f"the fp8 backend of transformers takes no {', '.join(named)}",
                             hint="quanto and hqq quantise in groups")  # fmt: skip
        return Packing("fp8", 8, 0, 0, 0, 0, generated)
    if backend not in _BITS:
        raise UsageError(
            f"{backend[:40]!r} is no backend of transformers' quantized cache", hint="one of quanto, hqq, fp8"
        )
    defaults = {"nbits": 4, "q_group_size": 64, "residual_length": 128, "axis_key": 0, "axis_value": 0}
    chosen = {name: defaults[name] if value is None else value for name, value in given.items()}
    if chosen["nbits"] not in _BITS[backend]:
        raise UsageError(f"{backend} has no {chosen['nbits']} bits for a cache",
                         hint="one of " + ", ".join(map(str, _BITS[backend])))  # fmt: skip
    for name in ("axis_key", "axis_value"):
        if chosen[name] not in _AXES[backend]:
            raise UsageError(f"{backend}: {name} {chosen[name]}", hint=f"{_AXES[backend][0]} or {_AXES[backend][1]}")
    if chosen["q_group_size"] < 1 or chosen["residual_length"] < 0:
        raise UsageError("q_group_size is at least 1 and residual_length at least 0")
    return Packing(backend, generated=generated, **chosen)


class Packing(Record):
    """How a backend packs."""

    backend: str
    nbits: int
    q_group_size: int
    residual_length: int
    axis_key: int
    axis_value: int
    generated: int
    """Tokens of the context that came one by one after the prompt."""

    @property
    def residual(self) -> int:
        """Newest tokens that are not packed yet."""
        return self.generated % self.residual_length if self.residual_length else 0

    def size(self, tensors: tuple[Shape, Shape], context: int, sequences: int, fmt: Formats) -> int:
        """Bytes of one layer's keys and values for the whole batch."""
        total = 0
        for (heads, width), axis in zip(tensors, (self.axis_key, self.axis_value), strict=True):
            row = sequences * heads * width
            residual = min(self.residual, context)
            total += self._packed(row * (context - residual), axis, fmt) + residual * row * fmt.model.bytes
        return total

    def check(self, tensors: tuple[Shape, Shape], context: int, sequences: int) -> None:
        """Refuses tokens that the backend cannot group: those of the prompt, or when all is packed anew."""
        prompt = context - self.generated
        lengths = [prompt]
        if self.residual_length <= 1:
            lengths.append(context)
        elif self.generated >= self.residual_length:
            # The first and the last time; in between it comes out even if at these two it does.
            lengths += [prompt + self.residual_length, context - self.residual]
        for (heads, width), axis in zip(tensors, (self.axis_key, self.axis_value), strict=True):
            for tokens in lengths:
                self._check(sequences * heads * width * tokens, width, sequences, axis, tokens)

    def _packed(self, elements: int, axis: int, fmt: Formats) -> int:
        """Bytes of one packed tensor with its scales."""
        if self.backend == "fp8":
            # One float32 scale a tensor.
            return elements + 4
        group, bits = self.q_group_size, self.nbits
        groups = -(-elements // group)
        rows, columns = (groups, group) if (axis == 0) == (self.backend == "quanto") else (group, groups)
        # Elements are packed down the rows; 3 bits go by ten into an int32.
        packed = -(-rows // 10) * 4 * columns if bits == 3 else -(-rows * bits // 8) * columns
        # quanto scales each element by itself where there is one group and it is a row.
        scales = group if groups == 1 and self.backend == "quanto" and axis == 0 else groups
        # A scale and a shift (quanto) or zero (HQQ), both in the model's dtype.
        return packed + 2 * scales * fmt.model.bytes

    def _check(self, elements: int, width: int, sequences: int, axis: int, tokens: int) -> None:
        """Refuses a number of tokens that the backend cannot group or pack."""
        group, bits = self.q_group_size, self.nbits
        if self.backend == "fp8":
            return
        grouped = elements
        if self.backend == "quanto":
            grouped //= sequences if axis == 0 else width
        if grouped % group or not grouped:
            raise UsageError(
                f"{self.backend} cannot quantise {tokens:,} tokens: {grouped:,} elements are no multiple of groups of {group}",
                hint="a context or q_group_size that comes out even",
            )
        if self.backend == "quanto" or bits == 8:
            return
        if bits == 3 and axis == 1:
            raise UsageError("HQQ cannot unpack a cache of 3 bits along axis 1", hint="axis 0")
        rows = group if axis == 0 else grouped // group
        if bits != 3 and rows % (8 // bits):
            raise UsageError(
                f"HQQ cannot pack {tokens:,} tokens: {rows:,} rows at {8 // bits} a byte",
                hint="a context or q_group_size that comes out even",
            )

    def reasons(self, context: int, row: int, fmt: Formats) -> list[str]:
        """Why it takes what it takes, and what a step takes beside it; `row`: elements of a token in a layer."""
        residual = self.residual
        how = (
            "in fp8, one scale a tensor" if self.backend == "fp8"
            else f"in {self.nbits} bits, a scale and a zero in {fmt.model.name} for every {self.q_group_size} elements"
        )  # fmt: skip
        out = [f"{self.backend} packs {context - residual:,} tokens {how}"]
        if residual:
            out.append(f"the newest {residual} wait in {fmt.model.name} until there are {self.residual_length}")
        # quanto and HQQ hold what they unpacked and, joined with the new token, once more; fp8 holds
        # both anew in fp8, and has keys in the model's dtype when values go through float32, twice.
        size = fmt.model.bytes
        more = (
            context * row * (2 + size + 4 + 4) // 2 if self.backend == "fp8" else (2 * context - residual) * row * size
        )
        out.append(f"a step unpacks layer after layer: about {more:,} bytes more while it runs")
        return out
