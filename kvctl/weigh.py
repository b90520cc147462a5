"""The weights of one model as asked: stored as they are or in another format, in all and on each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.errors import ConfigError, KvctlError
from kvctl.formats import DType
from kvctl.kept import kept
from kvctl.reports import WeightsInfo
from kvctl.spec import ModelSpec
from kvctl.tensors import Tensor, without_drafts
from kvctl.weight_formats import GGUF_BITS

if TYPE_CHECKING:
    from kvctl.rank_weights import Split

RULES = "vllm 0.32"
_FP8_BLOCK = 1006
"""Bytes of 1,000 parameters so stored: DeepSeek-V3's 684,531,386,000 take 688,586,727,753 on the Hub, scales included."""
_DRAFTING = frozenset(("deepseek_v3", "deepseek_v32"))
"""Types whose checkpoints have a layer that drafts tokens."""
# Names of unquantised dtypes in safetensors headers.
_HEADER_NAMES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_FLOATS = frozenset(_HEADER_NAMES.values())


def weigh(
    spec: ModelSpec,
    split: tuple[int, int, bool, int, tuple[int, ...]],
    dtype: DType,
    what_if: str | None,
    warnings: list[str],
    *,
    by_rank: bool = False,
    assume: bool = False,
) -> WeightsInfo | None:
    """The weights of `spec` in `what_if` (None: as they are), and on each rank of `split`.

    `split` is tensor and pipeline parallelism, whether experts are spread, data parallelism and the layers
    of each stage (empty: even); `dtype` is what the engine computes in; `by_rank` asks for what one rank loads where
    there is only one, too; `assume` takes a model's usual format where no source says how it is stored. What cannot be told of ranks becomes a warning.

    Raises:
        ConfigError: another format is asked for, and the parameters are not known.

    """
    info, said = _weighed(spec, split, dtype, what_if, by_rank, assume)
    warnings += said
    return info


@kept
def _weighed(
    spec: ModelSpec, split: tuple[int, int, bool, int, tuple[int, ...]], dtype: DType, what_if: str | None, by_rank: bool,
    assume: bool,
) -> tuple[WeightsInfo | None, tuple[str, ...]]:  # fmt: skip
    """The same, with what it warns of."""
    warnings: list[str] = []
    return _weigh(spec, split, dtype, what_if, warnings, by_rank, assume), tuple(warnings)


def _weigh(
    spec: ModelSpec, split: tuple[int, int, bool, int, tuple[int, ...]], dtype: DType, what_if: str | None,
    warnings: list[str], by_rank: bool, assume: bool,
) -> WeightsInfo | None:  # fmt: skip
    from kvctl.quantization import facts_of
    from kvctl.rank_weights import Split

    ranks = Split(*split)
    info: WeightsInfo | None
    tensors: tuple[Tensor, ...] | None
    if what_if is not None and what_if.lower() in GGUF_BITS:
        return _in_gguf(spec, dtype, what_if.lower())
    if what_if is not None:
        try:
            info, tensors, said = _in_format(spec, dtype, what_if)
            warnings += said
        except ConfigError as error:
            info, tensors = _by_number(spec, dtype, what_if, ranks, error), None
    else:
        info, tensors, said = _as_they_are(spec, dtype, ranks.cuts or by_rank)
        warnings += said
        if info is None or info.bytes is None:
            try:
                if assume or facts_of(spec.config) is not None:
                    info, tensors = _as_usual(spec, dtype, ranks)
            except ConfigError as error:
                if assume:
                    raise ConfigError(f"{spec.id}: how much its weights take is not known: {error.message}",
                                      hint="--weights-dtype (fp8-block, awq, …) may say it, and a folder with the weights does; --kv-budget asks about the cache alone") from None  # fmt: skip
    if tensors is None or info is None or not (ranks.cuts or by_rank):
        return info
    try:
        return info.replace(per_rank=_per_rank(spec, tensors, ranks, dtype, warnings), rules=RULES)
    except KvctlError as error:
        warnings.append(f"weights on each rank unknown: {error.message}")
        return info


def _by_number(spec: ModelSpec, dtype: DType, name: str, ranks: Split, error: ConfigError) -> WeightsInfo:
    """The same where not all tensors are known and their number is; else the error that says what is missing."""
    from kvctl.weight_estimates import estimated
    from kvctl.weight_formats import weight_format

    if spec.weights is None or spec.weights.parameters is None:
        raise error
    try:
        return estimated(spec, dtype, weight_format(name), ranks=ranks)
    except ConfigError:
        raise error from None


@kept
def _in_format(spec: ModelSpec, dtype: DType, name: str) -> tuple[WeightsInfo, tuple[Tensor, ...], tuple[str, ...]]:
    from kvctl.weight_formats import convert, weight_format

    fmt = weight_format(name)
    plain = spec.tensors is not None and all(tensor.dtype in _FLOATS for tensor in spec.tensors)
    base = spec.tensors if plain and spec.tensors is not None else _from_config(spec, dtype)
    base, _ = without_drafts(base, len(spec.layers))  # a converted model has no drafting layers
    tensors, notes = convert(base, fmt)
    parameters = sum(tensor.elements * tensor.count for tensor in base)
    where = "its tensors" if plain else "its configuration"
    info = WeightsInfo(
        sum(tensor.total for tensor in tensors),
        parameters,
        f"what if, from {where}",
        fmt.name,
        f"{fmt.name}: {fmt.title}",
    )
    return info, tensors, tuple(f"--weights-dtype {fmt.name}: {note}" for note in notes)


def _in_gguf(spec: ModelSpec, dtype: DType, name: str) -> WeightsInfo:
    count = spec.weights.parameters if spec.weights is not None else None
    if count is None:
        from kvctl.parameters import parameters

        count = sum(t.elements * t.count for t in parameters(spec.config, _HEADER_NAMES[dtype.name], whole=spec.whole))
    bits = GGUF_BITS[name]
    source = f"estimated: {count:,} parameters of {bits:.2f} bits, as Llama-3.1-8B has them in {name.upper()}"
    return WeightsInfo(round(count * bits / 8), count, source, name, f"{name}: {bits:.2f} bits a parameter")


@kept
def _as_they_are(
    spec: ModelSpec, dtype: DType, by_rank: bool
) -> tuple[WeightsInfo | None, tuple[Tensor, ...] | None, tuple[str, ...]]:
    from kvctl.quantization import named_scheme, scheme

    warnings: list[str] = []
    stored: str | None = spec.dtype.name if isinstance(spec.dtype, DType) else None
    words, found, problem, named = None, None, None, ""
    try:
        found = scheme(spec.config)
        if (
            found is None
            and spec.whole
            and spec.tensors is None
            and (spec.weights is None or spec.weights.bytes is None)
        ):
            found = named_scheme(spec.id)
            named = f", in {found.method} as its name says" if found is not None else ""
        if found is not None:
            stored, words = found.method, found.words
    except ConfigError as error:
        stored, problem = None, error
    weights = spec.weights
    info = None if weights is None else WeightsInfo(weights.bytes, weights.parameters, weights.source, stored, words)
    tensors = spec.tensors
    if tensors is None and (by_rank or (info is not None and info.bytes is None)):
        try:
            if problem is not None:
                raise problem
            if not spec.whole and (info is None or info.bytes is None):
                raise ConfigError("how the weights are stored is not in the source of this configuration")
            tensors = _from_config(spec, dtype)
            if found is not None:
                from kvctl.weight_formats import convert

                tensors, _ = convert(tensors, found.format, found.keeps())
        except ConfigError as error:
            if by_rank:
                warnings.append(f"weights on each rank unknown: {error.message}")
            return info, None, tuple(warnings)
    if tensors is not None and spec.tensors is None and (info is None or info.bytes is None):
        total = sum(tensor.total for tensor in tensors)
        parameters = weights.parameters if weights else None
        how = f"estimated: what its configuration implies{named}"
        warnings.append("the weights are estimated from the configuration: no file of them was read")
        info = WeightsInfo(total, parameters, how, stored, words)
    return info, tensors, tuple(warnings)


@kept
def _as_usual(spec: ModelSpec, dtype: DType, ranks: Split) -> tuple[WeightsInfo | None, tuple[Tensor, ...] | None]:
    """The weights as such models are published, where nothing says how these are stored.

    Raises:
        ConfigError: that is not to be guessed, or not even their number is known.

    """
    from kvctl.quantization import scheme, usual_storage
    from kvctl.weight_formats import convert, weight_format

    if (found := scheme(spec.config)) is not None:
        from kvctl.weight_estimates import estimated

        return estimated(spec, dtype, found.format, found.keeps(), ranks), None
    published = spec.weights.parameters if spec.weights is not None else None
    name = usual_storage(spec.model_type, spec.id, dtype.name)
    if name is not None and published is None:
        return _uncounted(spec, dtype, name)
    if name is None or published is None:
        raise ConfigError("how they are stored is not in the source")
    source = f"estimated: {published:,} parameters as if stored in {name}; no source says how they are"
    try:
        tensors, _ = convert(_from_config(spec, dtype), weight_format(name))
    except ConfigError:
        if name not in (dtype.name, "fp8-block"):
            raise
        size = published * dtype.bytes if name == dtype.name else published * _FP8_BLOCK // 1000
        return WeightsInfo(size, published, source, name), None
    return WeightsInfo(sum(tensor.total for tensor in tensors), published, source, name), tensors


def _uncounted(spec: ModelSpec, dtype: DType, name: str) -> tuple[WeightsInfo, tuple[Tensor, ...]]:
    """The weights that a configuration implies where nobody published their number."""
    from kvctl.parameters import parameters
    from kvctl.weight_formats import convert, weight_format

    plain = parameters(spec.config, _HEADER_NAMES[dtype.name], whole=False)
    count = sum(tensor.elements * tensor.count for tensor in plain)
    tensors, _ = convert(plain, weight_format(name))
    source = f"estimated: {count:,} parameters by its configuration, as if stored in {name}; no source says either"
    return WeightsInfo(sum(tensor.total for tensor in tensors), count, source, name), tensors


def _from_config(spec: ModelSpec, dtype: DType) -> tuple[Tensor, ...]:
    """The parameters that the configuration implies, checked against a published count where it is no whole file."""
    from kvctl.parameters import parameters

    from_gguf = spec.weights is not None and "GGUF" in spec.weights.source
    whole = spec.whole and not from_gguf
    tensors = parameters(spec.config, _HEADER_NAMES[dtype.name], whole=whole)
    published = spec.weights.parameters if spec.weights else None
    if whole:
        return tensors
    counted = sum(tensor.elements * tensor.count for tensor in tensors)
    corrections = sum(t.elements * t.count for t in tensors if t.name.endswith("e_score_correction_bias"))
    # A published count may have layers that draft tokens, which no engine loads without being told.
    drafts = spec.model_type in _DRAFTING and published is not None and counted < published < 1.03 * counted
    if published not in (counted, counted - corrections) and not drafts:
        known = "no parameter count is known" if published is None else f"the published count is {published:,}"
        raise ConfigError(
            f"the configuration is not the model's whole file: {counted:,} parameters follow from it, {known}"
        )
    return tensors


def _per_rank(
    spec: ModelSpec, tensors: tuple[Tensor, ...], split: Split, dtype: DType, warnings: list[str]
) -> tuple[int, ...]:
    from kvctl.rank_weights import left_in_file, per_rank
    from kvctl.weight_formats import convert, weight_format

    if all(tensor.dtype in _FLOATS for tensor in tensors):
        # An engine loads weights in the dtype that it computes in.
        tensors, _ = convert(tensors, weight_format(dtype.name))
    sizes = per_rank(tensors, spec.config, split)
    left = left_in_file(tensors, spec.config)
    if left:
        warnings.append(
            f"{left:,} bytes of the checkpoint are not loaded: layers that draft tokens ahead, or a tied head"
        )
    dequantised = sum(
        2 * tensor.elements * len(tensor.layers) // split.tensor for tensor in tensors
        if tensor.name.endswith("kv_b_proj.weight") and tensor.dtype == "F8_E4M3"
    )  # fmt: skip
    if dequantised:
        warnings.append(
            f"weights on each rank are those of the checkpoint; vLLM keeps kv_b_proj once more, dequantised to 16 bits:"
            f" {dequantised // split.pipeline:,} bytes a rank"
        )
    if any(tensor.name.endswith(("_blocks", "_scales")) for tensor in tensors):
        warnings.append("weights on each rank are for Triton's MXFP4 kernels; others pad the experts' width further")
    return sizes
