"""vLLM's offline engine, measured from inside. A script of its own, without kvctl, for any Python that has vLLM:

python vllm_child.py ASK.json ANSWERS.jsonl

ASK has `words` (vLLM's own command line after `vllm serve`), `points` ({context, batch, steps}), `repeats`, `seed` and
`prompt`. Every line of ANSWERS is an object with `kind`: state, ready, pass, point_error, error or done. Times are seconds
from handing the prompts to the engine, on time.perf_counter.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

MADE_UP = "made-up"
"""A file that marks a folder of kvctl's own."""
Say = Callable[..., None]
Make = Callable[[int], "list[int]"]


def main(ask_path: str, answers_path: str) -> None:
    """Start the engine, run every point, say what happened."""
    with open(ask_path, encoding="utf-8") as source:
        ask = json.load(source)
    with open(answers_path, "a", encoding="utf-8") as out:

        def say(**answer: object) -> None:
            out.write(json.dumps(answer) + "\n")
            out.flush()

        try:
            engine = start(ask["words"], say)
            make = prompts(engine, ask)
            for point in ask["points"]:
                try:
                    run(engine, point, ask["repeats"], make, say)
                except (ValueError, AssertionError) as error:
                    # A request that the engine does not take leaves it as it was; what breaks it breaks the next point too.
                    traceback.print_exc()
                    say(kind="point_error", context=point["context"], batch=point["batch"], error=line(error))
                    abort(engine)
            say(kind="done")
        except Exception as error:
            traceback.print_exc()
            say(kind="error", error=line(error))
            out.flush()
            os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing of what teardown does is measured, and it may hang


def line(error: BaseException) -> str:
    """An exception on one line; of one without words where it comes from."""
    if not str(error):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {os.path.basename(frame.filename)}, line {frame.lineno}: {frame.line}"[:600]
    return " ".join(f"{type(error).__name__}: {error}".split())[:600]


def start(words: list[str], say: Say) -> Any:
    """The engine as `vllm serve` would make it of these words."""
    say(kind="state", text="importing vLLM")
    from vllm import LLM, __version__
    from vllm.engine.arg_utils import EngineArgs

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:  # before 0.12
        from vllm.utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    name_class(words[0])
    # The model is a positional argument of `vllm serve` alone.
    told, usual = vars(parser.parse_args(["--model", *words])), vars(parser.parse_args([]))
    changed = {
        field.name: told[field.name]
        for field in dataclasses.fields(EngineArgs)
        if field.name in told and (field.name == "model" or repr(told[field.name]) != repr(usual[field.name]))
    }
    say(kind="state", text="vLLM is loading the model")
    engine = LLM(**changed).llm_engine
    cache, scheduler = engine.vllm_config.cache_config, engine.vllm_config.scheduler_config
    say(
        kind="ready",
        version=str(__version__),
        blocks=cache.num_gpu_blocks,
        block_size=cache.block_size,
        cache_dtype=str(cache.cache_dtype),
        prefix_caching=cache.enable_prefix_caching,
        batch_tokens=scheduler.max_num_batched_tokens,
        sequences=scheduler.max_num_seqs,
        length=engine.vllm_config.model_config.max_model_len,
        vocabulary=engine.vllm_config.model_config.get_vocab_size(),
    )
    return engine


def name_class(model: str) -> None:
    """Write the class that transformers has for the model's type into a configuration that names none, as those of a catalogue."""
    path = os.path.join(model, "config.json")
    if not os.path.isfile(os.path.join(model, MADE_UP)):
        return
    with open(path, encoding="utf-8") as source:
        config = json.load(source)
    if not config.get("architectures"):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]
        with open(path, "w", encoding="utf-8") as out:
            json.dump(config, out)


def prompts(engine: Any, ask: dict[str, Any]) -> Make:
    """Makes prompts of any length: random tokens, or those of the text over and over."""
    if ask["prompt"] is not None:
        from transformers import AutoTokenizer

        config = engine.vllm_config.model_config
        tokens = AutoTokenizer.from_pretrained(config.tokenizer).encode(ask["prompt"])
        starts = itertools.count()  # sequences of a batch that began alike would share their blocks

        def turned(length: int) -> list[int]:
            begin = next(starts)
            return [tokens[(begin + at) % len(tokens)] for at in range(length)]

        return turned
    rng, size = random.Random(ask["seed"]), engine.vllm_config.model_config.get_vocab_size()
    return lambda length: rng.choices(range(size), k=length)


def run(engine: Any, point: dict[str, int], repeats: int, make: Make, say: Say) -> None:
    """One point: a warm-up, then its passes."""
    context, batch = point["context"], point["batch"]
    for repeat in range(-1, repeats):
        engine.reset_prefix_cache()  # nothing of one pass is found by the next
        doing = f"run {repeat + 1} of {repeats}" if repeat >= 0 else "warm-up"
        say(kind="state", text=f"{context:,} tokens × {batch:,}: {doing}")
        steps = point["steps"] if repeat >= 0 else 1
        sequences, cached = one_pass(engine, [make(context) for _ in range(batch)], steps, repeat)
        if repeat >= 0:
            say(kind="pass", context=context, batch=batch, repeat=repeat, sequences=sequences, cached=cached)


def one_pass(
    engine: Any, tokens: list[list[int]], steps: int, repeat: int
) -> tuple[list[list[tuple[int, float]]], int]:
    """[[tokens so far, seconds] …] for every sequence, and how many prompt tokens were found in the cache."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True, detokenize=False)
    events: list[list[tuple[int, float]]] = [[] for _ in tokens]
    places: dict[str, int] = {}
    cached = 0
    for index, ids in enumerate(tokens):
        name = f"{repeat}-{index}"
        # 0.13 and later may give it another name.
        places[engine.add_request(name, {"prompt_token_ids": ids}, params) or name] = index
        places[name] = index
    begun = time.perf_counter()
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - begun
        for output in outputs:
            got, count = events[places[output.request_id]], len(output.outputs[0].token_ids)
            if not got or count > got[-1][0]:
                got.append((count, now))
            if output.finished:
                cached += getattr(output, "num_cached_tokens", None) or 0
    return events, cached


def abort(engine: Any) -> None:
    """End what is left of a point."""
    names = list(getattr(getattr(engine, "output_processor", None), "request_states", {}))
    if names:
        engine.abort_request(names)


if __name__ == "__main__":
    # The folder of this file has modules of kvctl's; none of them is meant.
    sys.path[:] = [
        place for place in sys.path if os.path.abspath(place or ".") != os.path.dirname(os.path.abspath(__file__))
    ]
    main(sys.argv[1], sys.argv[2])
