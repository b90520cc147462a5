"""The one pure function of `kvctl size`: a model, a workload and rules in, a result out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvctl.allocation import MOST_SLOTS, Allocation, Serving
from kvctl.engines import IDEAL, Engine
from kvctl.errors import ConfigError, UsageError
from kvctl.formats import BF16, FP32, CacheFormat, DType, plain
from kvctl.kept import kept
from kvctl.record import Record
from kvctl.reports import Formula, LayerRow, ModelInfo, SizeResult, StateRow, WeightsInfo
from kvctl.spec import Attention, Formats, Layer, ModelSpec, Workload

if TYPE_CHECKING:
    from kvctl.ranks import Hardware
    from kvctl.room import Held, Room
    from kvctl.spec import Rational
    from kvctl.structure import Structure
    from kvctl.techniques import Technique

DEFAULT_CONTEXTS = (4 * 1024, 32 * 1024, 128 * 1024)


class SizePlan(Record):
    """What to size a model for; None stands for "as the model says"."""

    engine: Engine = IDEAL
    contexts: tuple[int, ...] | None = None
    own_maximum: bool = False
    """Without contexts: the model's own maximum, and no ladder up to it."""
    sequences: int = 1
    beams: int = 1
    generated: int = 0
    """Tokens of the context that came one by one after the prompt, for techniques to which that makes a difference."""
    dtype: DType | None = None
    key: CacheFormat | None = None
    value: CacheFormat | None = None
    encoder_tokens: int | None = None
    image_tokens: int | None = None
    audio_tokens: int | None = None
    per_layer: bool = False
    explain: bool = False
    serving: Serving = Serving()
    notes: tuple[str, ...] = ()
    """What to say beside the answer."""
    weights_dtype: str | None = None
    """What if the weights were stored in this format (a name of kvctl.weight_formats)."""
    hardware: Hardware | None = None
    """What it is to run on."""
    technique: Technique | None = None
    """What makes its keys and values smaller."""
    what_if: Structure | None = None
    """Another structure of its attention."""


def contexts_for(spec: ModelSpec, plan: SizePlan) -> tuple[int, ...]:
    """The contexts asked for, else a ladder up to the model's own maximum."""
    if plan.contexts is not None:
        return plan.contexts
    limit = spec.max_context
    if plan.own_maximum:
        if limit is None:
            raise ConfigError(f"{spec.id} names no maximum length", hint="name one with --ctx")
        return (limit,)
    if limit is None:
        return DEFAULT_CONTEXTS
    return (*(ctx for ctx in DEFAULT_CONTEXTS if ctx < limit), limit)


def needs_tensors(plan: SizePlan) -> bool:
    """Whether an answer rests on single tensors, and `kvctl.sources.tensors.attach` should read their headers first."""
    if plan.hardware is not None and plan.engine.splits:
        return True
    tensor, pipeline, spread, data, _ = _split(plan)
    return plan.weights_dtype is not None or tensor * pipeline > 1 or (spread and data > 1)


def _split(plan: SizePlan) -> tuple[int, int, bool, int, tuple[int, ...]]:
    """Tensor and pipeline parallelism, whether experts are spread, data parallelism, and layers of the stages."""
    serving = plan.serving
    tensor, data = serving.tensor_parallel or 1, serving.data_parallel or 1
    if plan.engine.splits and serving.attention_dp and tensor > 1 and data in (1, tensor) and plan.hardware is not None:
        # Every rank attends for requests of its own with all heads; experts are spread over them all the same.
        return 1, serving.pipeline_parallel or 1, True, tensor, serving.stage_layers or ()
    if not plan.engine.splits or (plan.engine.name != "vllm" and plan.hardware is None):
        return 1, 1, False, 1, ()  # how others cut weights is not known; beside hardware that is said
    return (
        serving.tensor_parallel or 1, serving.pipeline_parallel or 1, serving.expert_parallel,
        serving.data_parallel or 1, serving.stage_layers or (),
    )  # fmt: skip


class Question(Record):
    """A model and a plan, with what holds at every context."""

    spec: ModelSpec
    plan: SizePlan
    """Its serving has the ranks that the hardware gives it."""
    dtype: DType
    fmt: Formats
    weights: WeightsInfo | None
    room: Room | None
    """The memory for the cache, where hardware is named."""
    warnings: tuple[str, ...]
    late_warnings: tuple[str, ...]
    """Those that come after what a context brings."""


def prepare(spec: ModelSpec, plan: SizePlan) -> Question:
    """What of an answer does not depend on the context."""
    if plan.hardware is not None:
        spec = completed(spec)
    if plan.what_if is not None:
        from kvctl.structure import restructured

        spec = restructured(spec, plan.what_if, plan.engine.name)
    if plan.technique is not None:
        spec = _with_technique(spec, plan, plan.technique)
    warnings = list(plan.notes)
    by_request = plan.engine.by_request(plan.serving)
    if by_request and plan.beams > 1:
        raise UsageError(f"{plan.engine.name} reserves by request, not by beam", hint="--sequences, without --beams")
    if by_request and (plan.image_tokens or plan.audio_tokens or (plan.encoder_tokens and spec.cross_input == "image")):
        raise UsageError(f"positions of images and audio are part of --ctx in {plan.engine.name}",
                         hint="name the whole length with --ctx")  # fmt: skip
    if (
        plan.value is not None
        and plan.value != plan.key
        and not any(
            isinstance(state, Attention) and state.value_dim for layer, _ in spec.groups for state in layer.states
        )
    ):
        warnings.append("--v-dtype has no effect: this model keeps no values of their own")
    dtype = plan.dtype or spec.dtype
    if isinstance(dtype, str):
        raise ConfigError(
            f"{dtype}, which is no model dtype that kvctl knows", hint="name one with --dtype bf16, fp16 or fp32"
        )
    if dtype is None:
        dtype = BF16
        if spec.provenance.source != "shape":
            warnings.append("the configuration names no dtype: bf16 is assumed; --dtype sets it")
    elif dtype is FP32 and plan.dtype is None and not plan.engine.auto_fp32:
        dtype = BF16
        warnings.append(f"the configuration says fp32 and {plan.engine.name} runs that in bf16; --dtype fp32 keeps it")
    usual = plan.engine.cache_format or plain(dtype)
    if spec.kv_format is not None and plan.engine.follows_checkpoint and plan.key is None and plan.value is None:
        usual = plan.engine.kv_dtype(spec.kv_format, "--kv-cache-dtype")
        warnings.append(
            f"the checkpoint names {spec.kv_format} for the cache and {plan.engine.name} follows; --kv-cache-dtype sets another"
        )
    fmt = Formats(dtype, plan.key or usual, plan.value or usual)
    if not plan.engine.quantizes and {fmt.key, fmt.value} != {plain(dtype)}:
        raise UsageError(
            f"--engine {plan.engine.name} keeps keys and values in the model's dtype, {dtype.name}",
            hint="--dtype sets that; other formats of the cache: --engine ideal",
        )
    late: list[str] = []
    room = None
    if plan.hardware is not None:
        from kvctl.fit import room_for

        def weights_of(serving: Serving) -> WeightsInfo | None:
            return _weights(spec, plan.replace(serving=serving), dtype, late)

        weights, room = room_for(spec, plan.engine, plan.serving, plan.hardware, dtype,
                                 contexts_for(spec, plan)[0], weights_of, _held(spec, plan, fmt))  # fmt: skip
        plan = plan.replace(serving=room.laid.serving)
    else:
        weights = _weights(spec, plan, dtype, late)
    return Question(spec, plan, dtype, fmt, weights, room, tuple(warnings), tuple(late))


def _with_technique(spec: ModelSpec, plan: SizePlan, technique: Technique) -> ModelSpec:
    """The model as a technique holds it."""
    from kvctl.techniques.states import applied

    engine = plan.engine
    own = engine.rows and plan.serving.cache_implementation in (None, "dynamic")
    if engine is not IDEAL and not own:
        raise UsageError(f"--technique {technique.name}: a cache of kvctl's own, which {engine.name} does not have",
                         hint="--kv-dtype is what engines store; techniques: --engine ideal or transformers")  # fmt: skip
    if plan.key is not None or plan.value is not None:
        raise UsageError(f"--technique {technique.name} says how keys and values are stored", hint="without --kv-dtype")
    if plan.explain:
        raise UsageError("--explain writes down formulas of plain caches", hint="without --technique")
    return spec if technique.plain else applied(spec, technique, engine.name)


@kept
def completed(spec: ModelSpec) -> ModelSpec:
    """The model with a width that its configuration lacks, where the published number of parameters tells it."""
    if spec.whole or spec.weights is None or spec.weights.parameters is None:
        return spec
    from kvctl.parameters import infer

    found = infer.completed(spec.config, spec.weights.parameters)
    if found is None:
        return spec
    config, what = found
    note = f"{what} follows from the published {spec.weights.parameters:,} parameters"
    return spec.replace(config=config, notes=(*spec.notes, note))


def answers(spec: ModelSpec, plan: SizePlan) -> list[SizeResult]:
    """A result for every context of the plan."""
    asked = prepare(spec, plan)
    return [answer(asked, context) for context in contexts_for(spec, plan)]


def size(spec: ModelSpec, context: int, plan: SizePlan) -> SizeResult:
    """Bytes that `spec` keeps at `context`, in total, a token, and by kind of state."""
    return answer(prepare(spec, plan), context)


def answer(asked: Question, context: int) -> SizeResult:
    """The result for one context."""
    spec, plan, dtype, fmt = asked.spec, asked.plan, asked.dtype, asked.fmt
    if asked.room is not None and plan.engine.slots == "own" and spec.max_context is not None:
        context = min(context, spec.max_context)  # Ollama lowers what is longer
    warnings = list(asked.warnings)
    work = _workload(spec, context, plan, warnings)
    engine, keep = plan.engine, plan.engine.retention
    copies = plan.sequences * plan.beams
    fitted = None
    if asked.room is not None:
        from kvctl.fit import fit

        fitted, allocation = fit(asked.room, context, plan.sequences)
    else:
        allocation = engine.plan(spec, work.context, copies, fmt, plan.serving.replace(encoder=work.encoder))
    longest = allocation.longest_sequence if allocation is not None else work.context
    if spec.max_context is not None and longest > spec.max_context:
        warnings.append(f"{work.context:,} tokens is beyond the model's own maximum of {spec.max_context:,}")
    if allocation is not None:
        if plan.serving.utilization is not None and allocation.kv_budget_bytes is None and asked.room is None:
            warnings.append(f"a share of {plan.serving.utilization:g} of a GPU's memory leaves the cache what weights and "
                            "activations do not take; --kv-budget says how much that is")  # fmt: skip
        if asked.room is not None and plan.serving.kv_budget is None:
            # What a budget is short of is the fit's to say.
            warnings += asked.room.plain_warnings(context, plan.sequences)
        else:
            warnings += allocation.warnings
    warnings += asked.late_warnings
    shared_copies = plan.sequences if engine.beams_share_cross else copies
    totals: dict[tuple[str, int], list[int]] = {}
    growth: Rational = 0
    growing, total = 0, 0
    rows_of: dict[int, tuple[StateRow, ...]] = {}
    for layer, count in spec.groups:
        rows: dict[tuple[str, int], int] = {}
        for state in layer.states_in(engine.name):
            bytes_ = state.total(work, fmt, keep, copies if state.per_beam else shared_copies)
            slot = (state.kind, state.tokens(work, keep))
            rows[slot] = rows.get(slot, 0) + bytes_
            rate = state.growth(work, fmt, keep)
            growth += rate * count * (plan.beams if state.per_beam else 1)
            if rate:
                growing += bytes_ * count
        rows_of[id(layer)] = tuple(StateRow(kind, 1, tokens, b) for (kind, tokens), b in rows.items())
        for slot, bytes_ in rows.items():
            entry = totals.setdefault(slot, [0, 0])
            entry[0] += count
            entry[1] += bytes_ * count
            total += bytes_ * count

    naive = spec.naive.size(work, fmt) * plan.beams if spec.naive is not None else None
    formulas: Sequence[Formula] = ()
    if plan.explain:
        from kvctl import explain

        formulas = explain.formulas(spec, work, fmt, plan.engine, copies, shared_copies)
    whole = growth.denominator == 1
    return SizeResult(
        model=ModelInfo(
            spec.id, spec.model_type, spec.provenance.source, spec.provenance.location, spec.provenance.revision,
            spec.overrides, tuple(spec.notes) + _layer_notes(spec, engine), spec.max_context,
        ),
        engine=engine.name,
        engine_version=engine.version,
        context=context,
        sequences=plan.sequences,
        beams=plan.beams,
        encoder_tokens=work.encoder,
        image_tokens=plan.image_tokens or 0,
        audio_tokens=plan.audio_tokens or 0,
        dtype=dtype.name,
        k_dtype=_stored(plan, "keys") or fmt.key.name,
        v_dtype=_stored(plan, "values") or fmt.value.name,
        k_scheme=_scheme(plan, "keys") or fmt.key.scheme,
        v_scheme=_scheme(plan, "values") or fmt.value.scheme,
        kv_bytes=total,
        # Rounded up where a token adds a fraction of an entry: never promise less than it takes.
        kv_bytes_per_token=-(-growth.numerator // growth.denominator),
        kv_bytes_per_token_exact=None if whole else f"{growth.numerator}/{growth.denominator}",
        kv_bytes_fixed=total - growing,
        layers=tuple(StateRow(kind, n, tokens, b) for (kind, tokens), (n, b) in totals.items()),
        per_layer=_per_layer(spec.layers, rows_of) if plan.per_layer else None,
        weights=asked.weights,
        naive_bytes=naive,
        formulas=tuple(formulas),
        warnings=tuple(warnings),
        allocation=allocation,
        fit=fitted,
        technique=plan.technique.name if plan.technique is not None else None,
        what_if=plan.what_if.name if plan.what_if is not None else None,
    )  # fmt: skip


def _stored(plan: SizePlan, half: str) -> str | None:
    """The format in which a technique packs keys or values."""
    if plan.technique is not None and plan.technique.foreign is not None:
        return plan.technique.foreign.stored
    codec = getattr(plan.technique.store, half).codec if plan.technique is not None else None
    return None if codec is None else codec.name


def _scheme(plan: SizePlan, half: str) -> str | None:
    """And how, in words."""
    return plan.technique.scheme if plan.technique is not None and _stored(plan, half) is not None else None


def _weights(spec: ModelSpec, plan: SizePlan, dtype: DType, warnings: list[str]) -> WeightsInfo | None:
    """The weights as they are stored; by rank and in another format where that is asked."""
    if plan.engine.name == "vllm":
        warnings += _loaded_by_vllm(spec, plan)
    estimate = plan.hardware is not None and (spec.weights is None or spec.weights.bytes is None)
    if not needs_tensors(plan) and not (estimate and spec.provenance.source != "shape"):
        if spec.weights is None:
            return None
        return WeightsInfo(spec.weights.bytes, spec.weights.parameters, spec.weights.source, _stored_in(spec))
    from kvctl import weigh

    _check_weights_dtype(plan)
    if plan.serving.speculative is not None:
        warnings.append("weights on each rank are without those that draft")
    on_hardware = plan.hardware is not None and plan.engine.splits
    assume = plan.hardware is not None and plan.serving.kv_budget is None and spec.provenance.source != "shape"
    return weigh.weigh(spec, _split(plan), dtype, plan.weights_dtype, warnings, by_rank=on_hardware, assume=assume)


def _loaded_by_vllm(spec: ModelSpec, plan: SizePlan) -> list[str]:
    """What a version needs for bitsandbytes' formats, which it took out in 0.28 (kvctl.weights.ways has the source)."""
    from kvctl.engines.versions import dotted
    from kvctl.engines.vllm.rules import minor_of

    name = plan.weights_dtype
    packed = _stored_in(spec) if name is None else name.lower()
    if packed not in ("bitsandbytes", "int8", "nf4", "nf4-dq", "fp4"):
        return []
    version = minor_of(plan.engine.version)
    if version < (0, 28):
        return []
    tensor, pipeline, *_ = _split(plan)
    count = tensor * pipeline
    one = "on one rank" if count == 1 else f"on one rank, not on {count}"
    return [f"vLLM {dotted(version)} loads bitsandbytes weights through vllm-bnb-plugin alone, {one}"]


def _check_weights_dtype(plan: SizePlan) -> None:
    """Refuses formats of weights that the engine does not load."""
    from kvctl.weight_formats import GGUF_BITS, weight_format

    name, engine = plan.weights_dtype, plan.engine
    if name is None or (name.lower() in GGUF_BITS and (engine.slots or not engine.plans)):
        return
    if engine.slots and weight_format(name).pack is not None:
        raise UsageError(f"--weights-dtype {name}: {engine.name} loads GGUF files",
                         hint="one of " + ", ".join(GGUF_BITS) + ", fp16, bf16")  # fmt: skip
    if name.lower() in GGUF_BITS:
        raise UsageError(f"--weights-dtype {name}: a format of GGUF files, which {engine.name} does not keep",
                         hint="--engine llama.cpp or ollama")  # fmt: skip


def _held(spec: ModelSpec, plan: SizePlan, fmt: Formats) -> Held:
    """What a rank holds of other workloads than the plan's, for `kvctl.room`."""
    engine = plan.engine

    def held(tokens: int, sequences: int, serving: Serving) -> tuple[int, Allocation | None]:
        work = _workload(spec, tokens, plan, [])
        copies, context = sequences * plan.beams, work.context
        if engine.slots and copies > 1:
            # Requests are slots: one context for all, or one each.
            serving = serving.replace(slots=copies * (serving.slots or 1))
            if serving.slots is not None and serving.slots > MOST_SLOTS:
                raise UsageError(f"{engine.name} has at most {MOST_SLOTS} slots: {serving.slots:,} are too many",
                                 hint="fewer --sequences, or several servers")  # fmt: skip
            context, copies = context * (copies if engine.slots == "shared" else 1), 1
        allocation = engine.plan(spec, context, copies, fmt, serving.replace(encoder=work.encoder))
        if allocation is not None:
            return 0 if serving.kv_on_host else allocation.reserved_bytes, allocation
        shared = sequences if engine.beams_share_cross else copies
        return sum(
            count * state.total(work, fmt, engine.retention, copies if state.per_beam else shared)
            for layer, count in spec.groups
            for state in layer.states_in(engine.name)
        ), None

    return held


def _stored_in(spec: ModelSpec) -> str | None:
    """What the weights are stored in: the quantiser's name for it, else the dtype."""
    if spec.weights is not None and "GGUF" in spec.weights.source:
        return None  # every tensor of such a file has a type of its own
    facts = spec.config.get("quantization_config")
    if isinstance(facts, Mapping):
        method = facts.get("quant_method")
        return method if isinstance(method, str) else None
    return spec.dtype.name if isinstance(spec.dtype, DType) else None


def _per_layer(layers: Sequence[Layer], rows_of: dict[int, tuple[StateRow, ...]]) -> tuple[LayerRow, ...]:
    return tuple(LayerRow(index, rows_of[id(layer)]) for index, layer in enumerate(layers))


def _layer_notes(spec: ModelSpec, engine: Engine) -> tuple[str, ...]:
    """What an engine does otherwise than the architecture, once each."""
    return tuple(dict.fromkeys(layer.note for layer, _ in spec.groups if layer.note and (
        engine.name in layer.stored or not layer.stored)))  # fmt: skip


def _workload(spec: ModelSpec, context: int, plan: SizePlan, warnings: list[str]) -> Workload:
    """Positions of self and of cross attention: images and audio go where the model puts them."""
    image, audio = plan.image_tokens or 0, plan.audio_tokens or 0
    if (image or audio) and not spec.takes_media and not spec.cross_input:
        warnings.append("counted as asked, but nothing in this configuration takes images or audio")
    if plan.encoder_tokens is not None and spec.cross_input in ("image", "audio") and (image or audio):
        warnings.append(
            "--encoder-tokens says what cross attention holds; --image-tokens and --audio-tokens add nothing"
        )
    if not spec.cross_input:
        if plan.encoder_tokens:
            warnings.append("--encoder-tokens has no effect: this model has no cross attention")
        return Workload(context + image + audio, plan.sequences, 0, plan.beams, plan.generated)
    encoder = plan.encoder_tokens
    extra = 0
    if spec.cross_input == "image":
        extra = audio
        encoder = image if encoder is None else encoder
        if plan.encoder_tokens is None and plan.image_tokens is None:
            warnings.append("text only: cross attention holds no image; --image-tokens N adds one")
    elif spec.cross_input == "audio":
        extra = image
        if encoder is None:
            encoder = plan.audio_tokens if plan.audio_tokens is not None else spec.default_encoder
            if encoder is None:
                encoder = 0
                warnings.append("cross attention holds no audio; --audio-tokens N adds some")
            elif plan.audio_tokens is None:
                warnings.append(f"cross attention holds a full input of {encoder:,} positions; --audio-tokens sets it")
    else:
        extra = image + audio
        if encoder is None and spec.cross_input == "external":
            encoder = 0
            warnings.append("cross attention holds nothing: no encoder in this model; --encoder-tokens N adds one")
        elif encoder is None:
            encoder = context if spec.default_encoder is None else spec.default_encoder
            warnings.append(f"cross attention holds {encoder:,} encoder positions; --encoder-tokens sets it")
    return Workload(context + extra, plan.sequences, encoder, plan.beams, plan.generated)
