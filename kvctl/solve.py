"""What would fit: the longest context, the most requests, the fewest GPUs; and what to change where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from kvctl.errors import ExitCode, KvctlError, UsageError
from kvctl.reports import Fit, SizeResult
from kvctl.size import SizePlan, answer, answers, contexts_for, prepare
from kvctl.spec import ModelSpec

_MOST_GPUS = 64
_SHARES = {"vllm": ("--gpu-memory-utilization", 0.95), "sglang": ("--mem-fraction-static", 0.88)}
"""More of the memory than engines take without being told; what is left is tight for what they do not count."""
_SMALLER_WEIGHTS = {"llama.cpp": ("q8_0", "q4_k_m"), "ollama": ("q4_k_m",), "transformers": ("nf4", "awq")}
"""Formats of weights to try, where they are not fp8 and awq."""
_LEAST_BITS = {"fp8": 8, "awq": 4, "nf4": 4, "q8_0": 8, "q4_k_m": 4}
"""Bits of a weight in those: what is more than the devices have even so need not be tried."""
_REQUESTS = 256
"""Requests at once on GPUs of less than 70 GiB; larger ones take 1,024."""
_FEW_TOKENS, _FEW_REQUESTS = 2048, 64
"""A batch that takes less for activations and graphs."""


class NoAnswer(KvctlError):
    """Nothing of what was asked for fits."""

    exit_code = ExitCode.ANSWER_IS_NO


def answers_on(spec: ModelSpec, plan: SizePlan) -> list[SizeResult]:
    """A result for every context, or for the one that is solved for; with advice where the longest does not fit."""
    length = None
    if (
        plan.hardware is not None
        and plan.contexts is None
        and (
            length := plan.engine.memory.default_context(
                [device.cuda_bytes for device in plan.hardware.devices], spec.max_context
            )
        )
    ):
        note = f"{plan.engine.name} takes {length:,} tokens on so much memory without being told; --ctx names others"
        plan = plan.replace(contexts=(length,), notes=(*plan.notes, note))
    if plan.hardware is not None and plan.hardware.solve is not None:
        plan = solve(spec, plan, plan.hardware.solve)
    results = answers(spec, plan)
    last = results[-1]
    if last.fit is not None and not last.fit.fits:
        ways = advice(spec, plan, last)
        if length:  # more memory would change the length that the engine takes
            ways = tuple(f"{words} --ctx {length}" if words.startswith("--gpu ") else words for words in ways)
        results[-1] = last.replace(fit=last.fit.replace(advice=ways))
    return results


def solve(spec: ModelSpec, plan: SizePlan, what: str) -> SizePlan:
    """The plan with the largest context or number of requests, or the fewest GPUs or tensor-parallel ranks, that fits.

    Raises:
        NoAnswer: none does.
        UsageError: several contexts, or a number that the engine's own options set.

    """
    if what == "ctx":
        if plan.contexts is not None and len(plan.contexts) > 1:
            raise UsageError("--solve ctx finds the length", hint="leave --ctx out, or --solve concurrency")
        return _longest(spec, plan)
    if what == "concurrency" and plan.sequences > 1:
        raise UsageError("--solve concurrency finds the number of requests", hint="leave --sequences out")
    if plan.contexts is not None and len(plan.contexts) > 1:
        raise UsageError(f"--solve {what} is for one context", hint="--ctx 32k")
    context = plan.contexts[0] if plan.contexts is not None else contexts_for(spec, plan)[-1]
    plan = plan.replace(contexts=(context,))
    if what == "concurrency":
        result = answer(prepare(spec, plan), context)
        assert result.fit is not None
        if not result.fit.max_concurrency:
            raise NoAnswer(
                f"not one request of {context:,} tokens fits: {_why(result)}", hint=_hint(spec, plan, result)
            )
        most = result.fit.max_concurrency
        return _on_device(spec, plan.replace(sequences=most), context)
    return _fewest(spec, plan, context, what)


def _longest(spec: ModelSpec, plan: SizePlan) -> SizePlan:
    asked = prepare(spec, plan)
    result = answer(asked, contexts_for(spec, plan)[0])
    assert result.fit is not None
    longest = result.fit.max_context
    if longest == 0:
        raise NoAnswer(f"no context fits: {_why(answer(asked, 1))}", hint=_hint(spec, plan, result))
    if longest is None:  # nothing of the cache grows
        longest = spec.max_context or contexts_for(spec, plan)[-1]
    return _on_device(spec, plan.replace(contexts=(longest,)), longest)


def _on_device(spec: ModelSpec, plan: SizePlan, context: int) -> SizePlan:
    """The plan; a budget that is told may hold it and be more than the device has.

    Raises:
        NoAnswer: it is.

    """
    if plan.serving.kv_budget is not None:
        result = answer(prepare(spec, plan), context)
        if result.fit is not None and not result.fit.fits:
            raise NoAnswer(f"nothing fits: {_why(result)}", hint=_hint(spec, plan, result))
    return plan


def _fewest(spec: ModelSpec, plan: SizePlan, context: int, what: str) -> SizePlan:
    """The fewest GPUs, of several that are named the largest: all of them used, or (`tp`) tensor parallelism alone."""
    if what == "tp" and not plan.engine.splits:
        raise UsageError(f"{plan.engine.name} has no tensor parallelism", hint="--engine vllm, or --solve gpus")
    last: KvctlError | SizeResult | None = None
    assert plan.hardware is not None
    if plan.hardware.devices[0].kind == "cpu" or plan.hardware.devices[0].unified:
        raise UsageError(f"--solve {what}: {plan.hardware.devices[0].name} is one memory, and no second one plugs in",
                         hint="--solve ctx or concurrency")  # fmt: skip
    most = len(plan.hardware.devices) if len(plan.hardware.devices) > 1 else _MOST_GPUS
    for count in range(1, most + 1):
        tried = _on(plan, count, tensor=what == "tp")
        if tried is None:
            continue
        try:
            result = answer(prepare(spec, tried), context)
        except KvctlError as error:  # a number that the engine does not take
            last = error if last is None else last
            continue
        if result.fit is not None and result.fit.fits:
            return tried
        last = result
    if isinstance(last, KvctlError):
        raise last  # no number was taken at all
    why = _why(last) if last is not None else "no number was tried"
    raise NoAnswer(f"no number of GPUs up to {most} fits: {why}", hint="a shorter --ctx, a smaller --kv-dtype or --weights-dtype")  # fmt: skip


def _on(plan: SizePlan, count: int, *, tensor: bool = False) -> SizePlan | None:
    """The plan on so many GPUs; None where its own options need another number."""
    hardware, serving = plan.hardware, plan.serving
    assert hardware is not None
    other = (serving.pipeline_parallel or 1) * (serving.data_parallel or 1)
    if tensor:
        if count % other:
            return None
        serving = serving.replace(tensor_parallel=count // other)
    elif plan.engine.splits and serving.tensor_parallel is not None:
        raise UsageError(
            "--solve gpus chooses the split itself", hint="leave --tensor-parallel-size out, or --solve tp"
        )
    devices = hardware.devices
    if count <= len(devices):  # of those that are named, the largest
        by_size = sorted(devices, key=lambda device: -device.available_bytes)
        devices = tuple(sorted(by_size[:count], key=devices.index))
    else:
        devices = (devices[0].replace(index=None, uuid=None, notes=()),) * count
    return plan.replace(serving=serving, hardware=hardware.replace(devices=devices, started=False))


def advice(spec: ModelSpec, plan: SizePlan, result: SizeResult) -> tuple[str, ...]:
    """Changes to the command line with which it fits, each of them tried; the smallest change first."""
    fit = result.fit
    if fit is None or fit.fits:
        return ()
    out: list[str] = []
    tries = []
    if fit.max_context:
        tries.append((f"--ctx {fit.max_context}", plan, fit.max_context))
    if fit.max_concurrency and fit.max_concurrency < plan.sequences:
        changed = plan.replace(sequences=fit.max_concurrency)
        tries.append((f"--sequences {fit.max_concurrency}", changed, result.context))
    for words, changed, context in chain(
        tries, ((*change, result.context) for change in _changes(plan, fit, result.weights_parameters))
    ):
        if any(words.startswith(one) or words.endswith(one) for one in out):
            continue  # half of it is enough
        if _fits(spec, changed, context):
            out.append(words)
            if words.startswith("--gpu "):
                break  # the fewest are enough
    return tuple(out)


def _fits(spec: ModelSpec, plan: SizePlan, context: int) -> bool:
    try:
        room = prepare(spec, plan).room
        return room is not None and room.load(context, plan.sequences).fits
    except KvctlError:
        return False


def _changes(plan: SizePlan, fit: Fit, parameters: int | None) -> Iterator[tuple[str, SizePlan]]:
    """Ways to need less or to have more, in words and as plans."""
    cache = None
    if fit.weights_bytes < fit.device_bytes:  # else nothing that leaves weights alone can help
        for words, changed in _beside_weights(plan, fit):
            cache = (words, changed) if words.startswith("--kv-dtype") else cache
            yield words, changed
    if plan.weights_dtype is None:
        smaller = tuple(
            name
            for name in _SMALLER_WEIGHTS.get(plan.engine.name, ("fp8", "awq"))
            if _LEAST_BITS[name] * (parameters or 0) < 8 * fit.device_bytes * len(fit.ranks)
        )
        for name in smaller:
            yield f"--weights-dtype {name}", plan.replace(weights_dtype=name)
        if cache is not None and smaller:
            yield f"{cache[0]} --weights-dtype {smaller[-1]}", cache[1].replace(weights_dtype=smaller[-1])
    yield from _more_gpus(plan, fit)


def _beside_weights(plan: SizePlan, fit: Fit) -> Iterator[tuple[str, SizePlan]]:
    """A smaller cache, a larger share of the memory, a smaller batch."""
    name, serving = plan.engine.name, plan.serving
    smaller = plan.engine.smaller_cache
    if smaller and plan.key is None and plan.value is None:
        kind = plan.engine.kv_dtype(smaller, "--kv-dtype")
        yield f"--kv-dtype {smaller}", plan.replace(key=kind, value=kind.values or kind)
    if serving.kv_budget is not None:
        there = (fit.kv_budget_bytes + fit.headroom_bytes) >> 20
        if 0 < there << 20 < serving.kv_budget:
            yield f"--kv-budget {there}MiB", plan.replace(serving=serving.replace(kv_budget=there << 20))
        return
    if (most := _most_that_is_free(plan)) is not None:
        yield f"--gpu-memory-utilization {most:g}", plan.replace(serving=serving.replace(utilization=most))
    elif name in _SHARES and serving.utilization is None:
        option, share = _SHARES[name]
        yield f"{option} {share:g}", plan.replace(serving=serving.replace(utilization=share))
    if name == "tensorrt-llm" and serving.max_sequences is None:
        yield f"--max_batch_size {_FEW_REQUESTS}", plan.replace(serving=serving.replace(max_sequences=_FEW_REQUESTS))
    if name == "vllm" and serving.max_sequences is None:
        yield f"--max-num-seqs {_REQUESTS}", plan.replace(serving=serving.replace(max_sequences=_REQUESTS))
    if name == "vllm" and serving.max_batched is None and serving.max_sequences is None:
        small = serving.replace(max_batched=_FEW_TOKENS, max_sequences=_FEW_REQUESTS)
        yield f"--max-num-batched-tokens {_FEW_TOKENS} --max-num-seqs {_FEW_REQUESTS}", plan.replace(serving=small)


def _most_that_is_free(plan: SizePlan) -> float | None:
    """The largest share of vLLM that the free memory of every device covers; None for devices that nobody measured."""
    assert plan.hardware is not None
    devices = plan.hardware.devices
    if plan.engine.name != "vllm" or any(device.free_bytes is None for device in devices):
        return None
    from kvctl.engines.vllm.start import highest_utilization

    return min(highest_utilization(device.free_bytes or 0, device.cuda_bytes) for device in devices)


def _more_gpus(plan: SizePlan, fit: Fit) -> Iterator[tuple[str, SizePlan]]:
    """The GPUs that are there and stay idle, or more of them."""
    hardware, serving = plan.hardware, plan.serving
    assert hardware is not None
    there, device = len(hardware.devices), hardware.devices[0]
    if device.kind == "cpu" or device.unified:
        return  # one memory: there is no second of it to plug in
    if plan.engine.splits and serving.tensor_parallel is not None:
        ranks = there // (serving.pipeline_parallel or 1)
        if ranks > serving.tensor_parallel:
            yield f"--tensor-parallel-size {ranks}", plan.replace(serving=serving.replace(tensor_parallel=ranks))
        return
    whole = sum(rank.weights_bytes for rank in fit.ranks)
    for more in (2, 4, 8, 16):
        if (
            more > there
            and hardware.name
            and whole < more * fit.device_bytes
            and (tried := _on(plan, more)) is not None
        ):
            yield f"--gpu {more}x{hardware.name.strip().replace(' ', '-')}", tried


def _why(result: SizeResult) -> str:
    return result.fit.why if result.fit is not None else ""


def _hint(spec: ModelSpec, plan: SizePlan, result: SizeResult) -> str | None:
    ways = advice(spec, plan, result)
    return "it fits with " + ", or ".join(ways[:3]) if ways else "fewer tokens, smaller formats or more GPUs"
