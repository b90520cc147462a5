"""`kvctl size`.

Annotations are real objects here: Typer would have to compile them from text at every start.
"""

from typing import Annotated, Optional

import typer

from kvctl.completing import (
    complete_cache_formats,
    complete_dtypes,
    complete_engines,
    complete_gpus,
    complete_models,
    complete_solves,
    complete_structures,
    complete_techniques,
    complete_workloads,
)
from kvctl.options_shared import Format, Json, KDtype, Quiet, Revision, Set, Source, VDtype
from kvctl.units import MAX_TOKENS


def size(
    context: typer.Context,
    models: Annotated[
        Optional[list[str]],
        typer.Argument(
            metavar="[MODEL]...",
            help="A catalogue or Hub name (Qwen/Qwen3-32B, Qwen3-32B; org/name:Q4_K_M for GGUF files), a folder, a config.json, a .gguf file, or - for stdin.",
            autocompletion=complete_models,
            show_default=False,
        ),
    ] = None,
    ctx: Annotated[
        Optional[str],
        typer.Option(
            "--ctx",
            "-c",
            "--max-model-len",
            "--ctx-size",
            "--context-length",
            metavar="TOKENS",
            help="Tokens in each sequence, one or more: 4096, 4k,32k,128k (k is 1,024). Default: a ladder up to the model's maximum.",
            show_default=False,
        ),
    ] = None,
    sequences: Annotated[
        int, typer.Option("--sequences", "-n", metavar="N", help="Sequences held at the same time.")
    ] = 1,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="The model's dtype: auto (the config's), fp32, bf16, fp16.",
            autocompletion=complete_dtypes,
        ),
    ] = "auto",
    kv_dtype: Annotated[
        str,
        typer.Option(
            "--kv-dtype",
            "--kv-cache-dtype",
            metavar="NAME",
            help="Format of keys, values and latents: auto (the model's dtype), fp32, bf16, fp16, fp8, int8, int4, int2, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl, nvfp4, mxfp8, mxfp4, …; an engine's own names with one.",
            autocompletion=complete_cache_formats,
        ),
    ] = "auto",
    k_dtype: KDtype = "auto",
    v_dtype: VDtype = "auto",
    engine: Annotated[
        Optional[str],
        typer.Option(
            "--engine",
            metavar="NAME",
            help="Whose rules: ideal (the architecture's own need), transformers, vllm, sglang, llama.cpp, tensorrt-llm, ollama; with a version after @ (vllm@0.22); all compares them. Default: ideal.",
            show_default=False,
            autocompletion=complete_engines,
        ),
    ] = None,
    engine_args: Annotated[
        Optional[str],
        typer.Option(
            "--engine-args",
            metavar="TEXT",
            help="An engine's own command line, pasted: vllm serve …, llama-server …, python -m sglang.launch_server …, docker run …, or the args of a Kubernetes container. Its engine, model and flags are taken.",
            show_default=False,
        ),
    ] = None,
    from_log: Annotated[
        Optional[str],
        typer.Option(
            "--from-log",
            metavar="FILE",
            help="Explain an engine's start-up log: what it says of memory, what kvctl expects of the same start, and what accounts for a difference. - is stdin.",
            show_default=False,
        ),
    ] = None,
    weights_dtype: Annotated[
        Optional[str],
        typer.Option(
            "--weights-dtype",
            metavar="NAME",
            help="What if the weights were stored as bf16, fp16, fp32, fp8, fp8-block, fp8-channel, w8a8, int8, nf4, nf4-dq, fp4, awq, gptq, w4a16, mxfp4 or nvfp4.",
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        Optional[str],
        typer.Option(
            "--gpu",
            metavar="NAME",
            help="Does it fit? H100, 2xRTX4090, A100:40GiB, 2xL4,T4, local (this machine's), local:0,1, cpu. --list-gpus shows the names.",
            show_default=False,
            autocompletion=complete_gpus,
        ),
    ] = None,
    solve: Annotated[
        Optional[str],
        typer.Option(
            "--solve",
            metavar="NAME",
            help="With --gpu, size the largest that fits: ctx (tokens of each request), concurrency (requests at once); or the fewest gpus, or tensor-parallel ranks (tp).",
            show_default=False,
            autocompletion=complete_solves,
        ),
    ] = None,
    measured_overhead: Annotated[
        Optional[str],
        typer.Option(
            "--measured-overhead",
            metavar="SIZE",
            help="What an engine was seen to take on each GPU beside weights and cache: 3.1GiB. Takes the place of estimates.",
            show_default=False,
        ),
    ] = None,
    fail_unless_fits: Annotated[
        bool, typer.Option("--fail-unless-fits", help="Exit with status 3 where something does not fit (with --gpu).")
    ] = False,
    workload: Annotated[
        Optional[str],
        typer.Option(
            "--workload",
            metavar="NAME",
            help="Replay made-up traffic in the memory for the cache: chat, rag, agent or code. What contiguous, paged and prefix-sharing allocation make of it.",
            show_default=False,
            autocompletion=complete_workloads,
        ),
    ] = None,
    trace: Annotated[
        Optional[str],
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Replay your own: JSON lines of timestamp (ms), input_length, output_length and hash_ids, or of messages with usage or a --tokenizer. - is stdin.",
            show_default=False,
        ),
    ] = None,
    tokenizer: Annotated[
        Optional[str],
        typer.Option(
            "--tokenizer", metavar="FILE", help="A tokenizer.json, for a --trace of messages.", show_default=False
        ),
    ] = None,
    requests: Annotated[
        Optional[int],
        typer.Option("--requests", metavar="N", help="Requests of a --workload. Default: 10000.", show_default=False),
    ] = None,
    rate: Annotated[
        Optional[float],
        typer.Option("--rate", metavar="X", help="Requests a second of a --workload. Default: 2.", show_default=False),
    ] = None,
    in_flight: Annotated[
        Optional[int],
        typer.Option(
            "--in-flight",
            metavar="N",
            help="Replay with so many requests at a time, whenever they came.",
            show_default=False,
        ),
    ] = None,
    tpot: Annotated[
        Optional[float],
        typer.Option(
            "--tpot",
            metavar="MS",
            help="Milliseconds between tokens in a replay. Default: 25, assumed.",
            show_default=False,
        ),
    ] = None,
    prefill_rate: Annotated[
        Optional[int],
        typer.Option(
            "--prefill-rate",
            metavar="N",
            help="Prompt tokens a second in a replay. Default: 10000, assumed.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Optional[str],
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Draw memory against context, with the limit of --gpu: FILE.svg, .png or .html; - draws in the terminal. Several models, or --kv-dtype auto,fp8, give a curve each.",
            show_default=False,
        ),
    ] = None,
    encoder_tokens: Annotated[
        Optional[int],
        typer.Option(
            "--encoder-tokens",
            metavar="N",
            min=0,
            max=MAX_TOKENS,
            help="Positions that cross attention holds. Default: the encoder's full input where the config names it, else as many as --ctx.",
            show_default=False,
        ),
    ] = None,
    image_tokens: Annotated[
        Optional[int],
        typer.Option(
            "--image-tokens",
            metavar="N",
            min=0,
            max=MAX_TOKENS,
            help="Image positions in each sequence, beside --ctx. Default: 0.",
            show_default=False,
        ),
    ] = None,
    audio_tokens: Annotated[
        Optional[int],
        typer.Option(
            "--audio-tokens",
            metavar="N",
            min=0,
            max=MAX_TOKENS,
            help="Audio positions in each sequence, beside --ctx. Default: 0; a full input for audio encoder-decoders.",
            show_default=False,
        ),
    ] = None,
    beams: Annotated[
        int, typer.Option("--beams", metavar="N", help="Beams of a beam search: each holds a cache of its own.")
    ] = 1,
    technique: Annotated[
        Optional[list[str]],
        typer.Option(
            "--technique",
            metavar="NAME",
            help="What if the cache were quantized or evicted from: int4, int4:group=0 (a scale for each head), kivi2:residual=32, streaming-llm:0.25; + composes, commas compare. Repeatable.",
            autocompletion=complete_techniques,
            show_default=False,
        ),
    ] = None,
    what_if: Annotated[
        Optional[list[str]],
        typer.Option(
            "--what-if",
            metavar="NAME",
            help="What if its attention were multi-head (mha), multi-query (mqa), of N KV heads (gqa:N), or kept a latent of L and a rotary key of R a layer (mla:512+64); beside the model's own. Commas compare. Repeatable.",
            autocompletion=complete_structures,
            show_default=False,
        ),
    ] = None,
    set_: Set = None,
    layers: Annotated[
        Optional[int],
        typer.Option(
            "--layers",
            metavar="N",
            help="Size a bare shape without a model: layers, with --kv-heads and --head-dim.",
            show_default=False,
        ),
    ] = None,
    kv_heads: Annotated[
        Optional[int], typer.Option("--kv-heads", metavar="N", help="KV heads of a bare shape.", show_default=False)
    ] = None,
    head_dim: Annotated[
        Optional[int], typer.Option("--head-dim", metavar="N", help="Head width of a bare shape.", show_default=False)
    ] = None,
    source: Source = None,
    revision: Revision = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", "-e", help="Print the formula of every kind of layer with this model's numbers."),
    ] = False,
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="List every layer (JSON and CSV: in layer order).")
    ] = False,
    format_: Format = "table",
    json_: Json = False,
    quiet: Quiet = False,
    list_gpus: Annotated[
        bool, typer.Option("--list-gpus", help="List the GPUs that --gpu knows; MODEL is then a pattern.")
    ] = False,
    list_models: Annotated[
        bool,
        typer.Option(
            "--list-models", help="List the catalogue; MODEL is then a pattern (part of a name, or with * and ?)."
        ),
    ] = False,
) -> None:
    """How many bytes a model's KV cache takes, and where they go.

    \b
    Examples:
      kvctl size Qwen3-72B --ctx 128k
      kvctl size Qwen3-32B DeepSeek-V3 gemma-3-27b-it --ctx 4k,32k,128k
      kvctl size ./my-model --ctx 32k --sequences 16 --kv-dtype fp8 --json
      kvctl size gemma-3-27b-it --ctx 128k --engine vllm --kv-budget 20GiB
      kvctl size Llama-3.3-70B-Instruct --ctx 32k --sequences 8 --engine vllm --gpu 4xH100
      kvctl size gpt-oss-120b --engine vllm --gpu H100 --solve ctx
      kvctl size Qwen3-8B --engine vllm --gpu L4 --ctx 8k --trace requests.jsonl
      kvctl size Qwen3-32B --kv-dtype auto,fp8 --gpu 2xL40S --engine vllm --plot memory.svg
      kvctl size --from-log server.log --gpu A100
      kvctl size --engine-args "vllm serve Qwen3-32B -tp 4 --max-model-len 32768"
      kvctl size DeepSeek-V3 Qwen3-32B --ctx 32k --what-if mha,mqa
      kvctl size Mistral-7B-v0.1 --set sliding_window=null --explain
      kvctl size --layers 80 --kv-heads 8 --head-dim 128 --ctx 128k
    """
    from kvctl import options, output
    from kvctl.errors import ExitCode, UsageError

    form = options.read_output_format(format_, json_)
    if list_models:
        from kvctl.sources import catalogue

        output.emit_listing(catalogue.matching(models or [""]), form)
        return
    if list_gpus:
        from kvctl.hardware import listing

        output.emit_gpus(listing(models or [""]), form)
        return

    from kvctl.ask import ask
    from kvctl.size import SizePlan

    beside = {"--explain": explain, "--per-layer": per_layer, "--trace": trace, "--workload": workload, "--solve": solve,
              "--engine-args": engine_args, "--plot": plot, "--what-if": what_if}  # fmt: skip
    log = options.read_log(from_log, models or [], engine, beside)
    if (
        log is not None
        and engine is not None
        and engine.partition("@")[0].lower() not in (log.engine, log.rules.partition("@")[0])
    ):
        raise UsageError(f"the log is one of {log.engine}, and --engine says {engine}", hint="leave --engine out")
    # What is wrong whatever the engine is said once, before any is asked.
    asked = options.read_asked(
        engine=engine or (log.rules if log is not None else None),
        engine_args=log.engine_args if engine_args is None and log is not None else engine_args,
        models=models or ([options.model_of_log(log, source)] if log is not None else None),
        revision=revision,
        ctx=ctx,
        dtype=dtype,
        kv_dtypes=(kv_dtype, k_dtype, v_dtype),
        overrides=set_ or [],
        flags=context.obj or (),
    )
    if asked.engine.lower() == "all" and (explain or per_layer):
        raise UsageError("--explain and --per-layer are about one engine", hint="name it with --engine")
    traffic = options.read_traffic(
        trace,
        tokenizer,
        workload,
        requests=requests,
        rate=rate,
        in_flight=in_flight,
        tpot=tpot,
        prefill_rate=prefill_rate,
    )
    options.check_plot(plot, form)
    hardware = options.read_hardware(gpu, measured_overhead, solve, started=asked.pasted, needed=fail_unless_fits)
    specs = asked.specs((layers, kv_heads, head_dim), source)
    common = SizePlan(
        contexts=asked.contexts,
        own_maximum=asked.own_maximum or (traffic is not None and asked.contexts is None),
        sequences=options.at_least_one(sequences, "--sequences"),
        beams=options.at_least_one(beams, "--beams"),
        dtype=asked.dtype,
        encoder_tokens=encoder_tokens,
        image_tokens=image_tokens,
        audio_tokens=audio_tokens,
        per_layer=per_layer,
        explain=explain,
        notes=asked.notes,
        weights_dtype=weights_dtype
        or asked.weights_format(
            specs,
            needed=hardware is not None
            and (asked.weights_named or not any(item.flag.field == "kv_budget" for item in asked.flags)),
        ),
        hardware=hardware,
    )
    if what_if and traffic is not None:
        raise UsageError("a replay is about one cache, and --what-if compares several", hint="without --what-if")
    plans = options.with_structures(options.with_techniques(asked.plans(common), technique or []), what_if or [])
    if log is not None:
        from kvctl.ask import ask_log

        report = ask_log(log, specs[0], plans.each[0])
    else:
        report = ask(specs, plans)
    if traffic is not None:
        from kvctl.traffic import replayed

        with output.progress("requests replayed", quiet=quiet or form == "json") as advance:
            report = replayed(report, plans, traffic, advance)
    if plot is not None:
        from kvctl.plot.build import chart_of

        output.emit_chart(chart_of(specs, plans), plot)
    if plot != "-":
        output.emit_size(report, form, quiet=quiet)
    if fail_unless_fits and not all(result.holds for result in report.results):
        raise typer.Exit(ExitCode.ANSWER_IS_NO)
