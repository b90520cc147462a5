"""kvctl's INT4 caches beside those of transformers, in one run: bytes, quality and decoding speed on a real model.

    OMP_NUM_THREADS=1 python scripts/bench_caches.py MODEL [--dtype bfloat16] [--batch 4]

MODEL is a folder, a GGUF file or a Hub name. Caches decode in turn, token by token, so that what disturbs one disturbs all: a ratio
of times is the median over steps. A flush of transformers' caches, once in `residual` steps, hardly shows in a median: the
ratio of sums stands beside it.
"""

from __future__ import annotations

import argparse
import statistics
from time import perf_counter
from typing import Any

from kvctl.engines import TRANSFORMERS
from kvctl.formats import model_dtype
from kvctl.measure.assess import assess
from kvctl.measure.assessed import AssessAsked, Assessed
from kvctl.measure.foreign import need
from kvctl.measure.hush import quiet
from kvctl.measure.loaded import Wanted
from kvctl.measure.passes import Passes
from kvctl.measure.points import Asked
from kvctl.measure.run import Now, ProfilePlan, read_text, reading, ready
from kvctl.model import build_spec
from kvctl.size import SizePlan, size
from kvctl.sources import resolve
from kvctl.techniques import PLAIN, Technique, parse_list
from kvctl.techniques.states import applied

OURS = "int4:residual=64,int4:group=32:residual=48,kivi4:residual=32,kivi4:group=64:residual=32"
THEIRS = "hf:quanto-int4,hf:quanto-int4:axis=1,hf:hqq-int4,hf:hqq-int4:axis=1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ours", default=OURS)
    parser.add_argument("--theirs", default=THEIRS)
    parser.add_argument("--ctx", type=int, default=2048, help="prompt tokens of the runs that are timed")
    parser.add_argument("--batch", type=int, default=1, help="sequences at once")
    parser.add_argument("--dtype", default="float32", help="of the model, and of what is not packed")
    parser.add_argument("--decode", type=int, default=128, help="tokens that are decoded by the clock")
    parser.add_argument("--windows", type=int, default=6, help="pieces of text; 0: no quality")
    parser.add_argument("--prompt", type=int, default=1792, help="tokens of a piece before those that count")
    parser.add_argument("--scored", type=int, default=256)
    parser.add_argument("--text", help="a file; else the English prose that kvctl brings")
    asked = parser.parse_args()
    ours, theirs = parse_list([asked.ours]), parse_list([asked.theirs])
    techniques = [PLAIN, *ours, *theirs]
    with quiet():
        for one in theirs:
            if one.foreign is not None:
                need(one.foreign)
    say, dtype = Now(), model_dtype(asked.dtype)
    if dtype is None:
        parser.error(f"--dtype {asked.dtype}: unknown")
    plan = ProfilePlan(
        build_spec(resolve(asked.model)), Wanted(dtype=dtype), Asked(contexts=(asked.ctx,)), limits=False
    )
    model = ready(plan, say)
    with quiet():
        times = timed(model, techniques, asked.ctx, asked.decode, asked.batch)
        rows: dict[str, Assessed] = {}
        if asked.windows:
            text = reading("text", model.loaded, plan, read_text(asked.text))
            settings = AssessAsked(
                context=64,
                decode=0,
                repeat=1,
                greedy=0,
                depths=(),
                windows=asked.windows,
                prompt=asked.prompt,
                scored=asked.scored,
            )
            found = assess(model.loaded, techniques, settings, model.dtype, model.tokens, text, say, lambda row: None)
            rows = {row.name: row for row in found.rows}
    show(model, techniques, theirs, asked, times, rows)


def timed(model: Any, techniques: list[Technique], context: int, steps: int, batch: int) -> dict[str, list[float]]:
    """Seconds of every step with every cache, in turn."""
    import torch

    from kvctl.techniques import attention

    passes, tokens = [], []
    with torch.inference_mode():
        ids = model.tokens(batch, context).to(model.loaded.device)
        for one in techniques:
            attention.remove(model.loaded.model)
            each = Passes(model.loaded.model, model.loaded.device, layers=len(model.loaded.spec.layers))
            each.technique, each.indexes = one, tuple(range(len(model.loaded.spec.layers)))
            each.begin(batch)
            tokens.append(each.prefill(ids).argmax(-1, keepdim=True))
            passes.append(each)
        out: dict[str, list[float]] = {one.name: [] for one in techniques}
        for _ in range(steps):
            for index, one in enumerate(techniques):
                # As a pass of each alone would have it.
                attention.remove(passes[index].model)
                if one.foreign is None and not one.plain:
                    attention.install(passes[index].model, one)
                start = perf_counter()
                tokens[index] = passes[index].feed(tokens[index]).argmax(-1, keepdim=True)
                out[one.name].append(perf_counter() - start)
    return out


def held(model: Any, technique: Technique, prompt: int, generated: int) -> int:
    """Bytes as kvctl predicts them; tests measure that they are so."""
    spec = model.loaded.spec
    spec = spec if technique.plain else applied(spec, technique, TRANSFORMERS.name)
    plan = SizePlan(TRANSFORMERS, dtype=model.dtype, generated=generated)
    return size(spec, prompt + generated, plan).kv_bytes


def faster(own: list[float], other: list[float]) -> str:
    """How many times as long the other takes: the median over steps, and of the sums."""
    return f"{statistics.median(b / a for a, b in zip(own, other, strict=True)):.2f}/{sum(other) / sum(own):.2f}"


def show(model: Any, techniques: list[Technique], theirs: list[Technique], asked: Any, times: dict[str, list[float]],
         rows: dict[str, Assessed]) -> None:  # fmt: skip
    print(f"{asked.batch} x {asked.ctx} tokens and {asked.decode} more, {asked.dtype}; ms: median of a step")
    print(f"{'cache':30} {'mean bytes':>12} {'ms':>7}   perplexity %   ± SE       KL    top-1")
    for one in techniques:
        mean = statistics.fmean(asked.batch * held(model, one, asked.ctx, more) for more in range(asked.decode))
        line = f"{one.name:30} {mean:12,.0f} {1e3 * statistics.median(times[one.name]):7.1f}"
        row = rows.get(one.name)
        if row is not None and row.quality is not None:
            found = row.quality
            change = found.perplexity_change
            line += f" {change.value:+12.3f} {change.error or 0:8.3f} {found.kl.value:9.5f} {found.top1.value:7.2%}"
        print(line)
    print("\ntimes as long as ours: median over steps / of sums")
    print(" " * 30 + "".join(f"{one.name:>26}" for one in theirs))
    for one in techniques:
        if one not in theirs:
            ratios = (faster(times[one.name], times[other.name]) for other in theirs)
            print(f"{one.name:30}" + "".join(f"{ratio:>26}" for ratio in ratios))


if __name__ == "__main__":
    main()
