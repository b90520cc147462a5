"""`kvctl profile`.

Annotations are real objects here: Typer would have to compile them from text at every start.
"""

from typing import Annotated, Optional

import typer

from kvctl.completing import (
    complete_attentions,
    complete_cache_formats,
    complete_device_maps,
    complete_devices,
    complete_dtypes,
    complete_models,
    complete_profile_engines,
    complete_techniques,
    complete_until,
    complete_weights,
)
from kvctl.options_shared import Format, Json, KDtype, Quiet, Revision, Set, Source, TextFile, VDtype


def profile(
    context: typer.Context,
    model: Annotated[
        Optional[str],
        typer.Argument(
            metavar="[MODEL]",
            help="A folder with weights, a .gguf file, a Hub or catalogue name. Without one: this machine, and a model of 135M parameters with random weights.",
            autocompletion=complete_models,
            show_default=False,
        ),
    ] = None,
    ctx: Annotated[
        Optional[str],
        typer.Option(
            "--ctx",
            "-c",
            metavar="TOKENS",
            help="Prompt tokens of each sequence, one or more: 512,2k,8k, or '64 128' (k is 1,024). Default: 512,2k.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        str, typer.Option("--batch", "-b", metavar="N", help="Sequences at a time, one or more: 1,8.")
    ] = "1",
    decode: Annotated[int, typer.Option("--decode", metavar="N", help="Tokens generated after the first one.")] = 64,
    repeat: Annotated[
        int, typer.Option("--repeat", metavar="N", help="Timed runs of each point, after one that warms up.")
    ] = 3,
    prefill_chunk: Annotated[
        Optional[int],
        typer.Option(
            "--prefill-chunk", metavar="N", help="Feed the prompt in chunks of so many tokens.", show_default=False
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="auto, cpu, cuda:N or mps.", autocompletion=complete_devices)
    ] = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", metavar="NAME", help="auto (the model's own), fp32, bf16, fp16.", autocompletion=complete_dtypes
        ),
    ] = "auto",
    attention: Annotated[
        Optional[str],
        typer.Option(
            "--attn",
            metavar="NAME",
            help="sdpa, eager, or flash_attention_2 where that is installed. Default: the model's own choice.",
            autocompletion=complete_attentions,
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            "--weights",
            metavar="NAME",
            help="auto (the model's own), or random: built from the configuration alone, nothing is downloaded.",
            autocompletion=complete_weights,
        ),
    ] = "auto",
    layers: Annotated[
        Optional[int],
        typer.Option(
            "--layers",
            metavar="N",
            help="With --weights random, run N layers of each distinct kind and scale up: a 671B model on a laptop.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            metavar="NAME",
            help="What runs the model: transformers, llama.cpp (its llama-server), or vllm.",
            autocompletion=complete_profile_engines,
        ),
    ] = "transformers",
    engine_path: Annotated[
        Optional[str],
        typer.Option(
            "--engine-path",
            metavar="PATH",
            help="llama-server, or its folder; the Python that has vLLM. Default: looked for.",
            show_default=False,
        ),
    ] = None,
    engine_flags: Annotated[
        Optional[str],
        typer.Option(
            "--engine-flags",
            metavar="TEXT",
            help="More words of the engine's own command line, handed on.",
            show_default=False,
        ),
    ] = None,
    kv_dtype: Annotated[
        str,
        typer.Option(
            "--kv-dtype",
            "--kv-cache-dtype",
            metavar="NAME",
            help="Format of the cache in the engine's own names, for llama.cpp and vllm.",
            autocompletion=complete_cache_formats,
        ),
    ] = "auto",
    k_dtype: KDtype = "auto",
    v_dtype: VDtype = "auto",
    until_oom: Annotated[
        Optional[str],
        typer.Option(
            "--until-oom",
            metavar="NAME",
            help="Find the largest ctx or batch that really runs, each try in a process of its own.",
            autocompletion=complete_until,
            show_default=False,
        ),
    ] = None,
    memory_limit: Annotated[
        Optional[str],
        typer.Option(
            "--memory-limit",
            metavar="SIZE",
            help="Memory that --until-oom may take: 4GiB. Default: the device's.",
            show_default=False,
        ),
    ] = None,
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="Tensor-parallel ranks, each a process.")] = 1,
    nnodes: Annotated[int, typer.Option("--nnodes", metavar="N", help="Machines that the ranks are spread over.")] = 1,
    node_rank: Annotated[int, typer.Option("--node-rank", metavar="N", help="Which of them this one is.")] = 0,
    rdzv_endpoint: Annotated[
        Optional[str],
        typer.Option(
            "--rdzv-endpoint", metavar="HOST:PORT", help="Where they meet, as torchrun has it.", show_default=False
        ),
    ] = None,
    device_map: Annotated[
        Optional[str],
        typer.Option(
            "--device-map",
            metavar="NAME",
            help="auto: spread the layers over all GPUs, in one process.",
            autocompletion=complete_device_maps,
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        Optional[str],
        typer.Option(
            "--prompt",
            metavar="FILE",
            help="A text whose tokens fill the prompt. Default: one that kvctl brings.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of random weights and tokens.")] = 0,
    encoder_tokens: Annotated[
        Optional[int],
        typer.Option(
            "--encoder-tokens",
            metavar="N",
            min=0,
            help="Positions that cross attention holds, of models with an encoder. Default: as kvctl size has it.",
            show_default=False,
        ),
    ] = None,
    set_: Set = None,
    source: Source = None,
    revision: Revision = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="Run the Python code that a model repository brings. Never done unasked."
        ),
    ] = False,
    technique: Annotated[
        Optional[list[str]],
        typer.Option(
            "--technique",
            metavar="NAME",
            help="Measure caches that are quantized or evicted from beside the plain one: int8,int4:group=0 (a scale for each head),h2o:0.25, or all; + composes.",
            autocompletion=complete_techniques,
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        Optional[int],
        typer.Option(
            "--tokens",
            metavar="N",
            help="Tokens of text that each technique is scored on. Default: 1,536, in six pieces.",
            show_default=False,
        ),
    ] = None,
    text: TextFile = None,
    max_ppl_increase: Annotated[
        Optional[str],
        typer.Option(
            "--max-ppl-increase",
            metavar="PERCENT",
            help="Exit with status 3 where a technique raises the perplexity by more.",
            show_default=False,
        ),
    ] = None,
    min_top1: Annotated[
        Optional[str],
        typer.Option(
            "--min-top1",
            metavar="PERCENT",
            help="Exit with status 3 where a technique finds the same likeliest token less often.",
            show_default=False,
        ),
    ] = None,
    best: Annotated[
        bool,
        typer.Option(
            "--best", help="Name the smallest technique that keeps the bounds; status 3 only where none does."
        ),
    ] = False,
    shared_prefix: Annotated[
        Optional[str],
        typer.Option(
            "--shared-prefix",
            metavar="SHARE",
            help="Run requests whose prompts have this part in common (50%) through a paged cache, without and with an index of prefixes.",
            show_default=False,
        ),
    ] = None,
    requests: Annotated[
        Optional[int],
        typer.Option("--requests", metavar="N", help="How many requests. Default: 8.", show_default=False),
    ] = None,
    block: Annotated[
        Optional[int],
        typer.Option(
            "--block", metavar="N", help="Tokens of a block of the paged cache. Default: 16.", show_default=False
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with status 1 where a prediction is not right to the byte.")
    ] = False,
    save: Annotated[
        Optional[str], typer.Option("--save", metavar="FILE", help="Keep the result, as JSON.", show_default=False)
    ] = None,
    compare: Annotated[
        Optional[list[str]],
        typer.Option(
            "--compare",
            metavar="FILE",
            help="Put a saved result beside this one, with ratios and noise. Repeatable.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Optional[str],
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Draw memory and TPOT against context, measured points on the predicted line, or with --technique quality against bytes: FILE.svg, .png or .html; - draws in the terminal.",
            show_default=False,
        ),
    ] = None,
    format_: Format = "table",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure cache, memory and speed beside what is predicted.

    \b
    Examples:
      kvctl profile
      kvctl profile ./SmolLM2-135M --ctx 512,2k,8k --batch 1,8 --check
      kvctl profile model-Q4_1.gguf --ctx 2k --plot -
      kvctl profile Qwen3-72B --weights random --layers 2
      kvctl profile Qwen/Qwen3-8B --device cuda:0 --until-oom ctx
      kvctl profile ./model --weights random --tp 2
      kvctl profile model-Q4_1.gguf --engine llama.cpp --ctx 4k -ctk q8_0
      kvctl profile ./model --save today.json --compare yesterday.json
    """
    from kvctl import options, options_techniques, output_profile, signals
    from kvctl import options_profile as own
    from kvctl.errors import ExitCode, UsageError
    from kvctl.options_sharing import read_sharing

    form = options.read_output_format(format_, json_)
    weights = own.weights_of(weights, model)
    own.check_engine(
        engine,
        of_transformers={"--layers": layers, "--tp": tp > 1, "--until-oom": until_oom, "--device-map": device_map, "--attn": attention,
                         "--prefill-chunk": prefill_chunk, "--trust-remote-code": trust_remote_code, "--device": device != "auto",
                         "--encoder-tokens": encoder_tokens, "--technique": bool(technique), "--shared-prefix": shared_prefix, "--requests": requests, "--block": block,
                         "--source": source, "--revision": revision},
        of_others={"--kv-dtype": kv_dtype != "auto", "--k-dtype": k_dtype != "auto", "--v-dtype": v_dtype != "auto",
                   "--engine-path": engine_path, "--engine-flags": engine_flags, **{item.spelling: True for item in context.obj or ()}},
        not_of_llama_cpp={"--weights random": weights == "random", "--dtype": dtype != "auto"},
        not_of_weights={"--set": set_},
        random=weights == "random",
    )  # fmt: skip
    if model is None:
        own.check_without_model({
            f"--engine {engine}": engine != "transformers", "--source": source, "--revision": revision, "--prompt": prompt,
            "--trust-remote-code": trust_remote_code,
        })  # fmt: skip
    until, limit = own.read_until(until_oom, memory_limit)
    ranks = own.many(tp, nnodes, node_rank, rdzv_endpoint)
    own.check_values(
        weights=weights, layers=layers, dtype=dtype, device=device, device_map=device_map, attention=attention, ctx=ctx, batch=batch,
        decode=decode, prefill_chunk=prefill_chunk, repeat=repeat, prompt=prompt, seed=seed, ranks=ranks, until=until,
        overrides=set_ or [],
    )  # fmt: skip
    compared = options_techniques.read_techniques(
        technique, max_ppl_increase, min_top1, best=best, tokens=tokens, text=text,
        alone=tp == 1 and until is None and layers is None and batch == "1",
    )  # fmt: skip
    techniques = compared.techniques
    sharing = read_sharing(
        shared_prefix, requests, block, ctx=ctx, decode=decode, repeat=repeat,
        alone=tp == 1 and until is None and layers is None and batch == "1" and prefill_chunk is None and plot is None
        and not techniques,
    )  # fmt: skip
    if compare and (techniques or sharing is not None):
        raise UsageError(
            "--compare puts points beside each other, and there are none here", hint="--technique compares in one run"
        )
    if techniques and len(own.asked_contexts(ctx) or (1,)) > 1:
        raise UsageError("--technique takes one --ctx: the longest")
    own.check_files(save, plot, form)
    earlier = own.read_earlier(compare or [])
    missing = own.missing_packages(context, model) if engine == "transformers" else None
    spec = own.read_model(model, set_ or [], source, revision)
    signals.heed()
    machine = None
    if model is None:
        with output_profile.live(quiet=quiet) as progress:
            machine = own.look_around(progress)
        output_profile.emit_machine(machine, form)
    with output_profile.live(quiet=quiet) as progress:
        if missing is not None:
            report = own.no_run(missing)
        elif engine == "transformers" or model is None:
            plan = own.read_plan(
                spec, weights=weights, layers=layers, dtype=dtype, device=device, device_map=device_map,
                attention=attention, ctx=ctx, batch=batch, decode=decode, prefill_chunk=prefill_chunk, repeat=repeat, prompt=prompt,
                seed=seed, encoder_tokens=encoder_tokens, trust_remote_code=trust_remote_code, ranks=ranks, revision=revision,
                default_model=model is None,
            )  # fmt: skip
            if sharing is not None:
                from kvctl.measure.run import profile_sharing

                report = profile_sharing(plan, sharing.replace(context=min(plan.asked.contexts)), progress)
            elif techniques:
                from kvctl.measure.run import profile_techniques

                asked = options_techniques.assess_asked(plan, compared, drawn=plot is not None)
                report = profile_techniques(plan, techniques, asked, text, progress)
            else:
                report = own.run(plan, ranks, until, limit, progress)
        else:
            report = own.run_other(
                engine, model, spec, context.obj or (), ctx=ctx, batch=batch, decode=decode, repeat=repeat, dtype=dtype,
                kv_dtypes=(kv_dtype, k_dtype, v_dtype), prompt=prompt, seed=seed, random=weights == "random", program=engine_path,
                engine_flags=engine_flags, progress=progress,
            )  # fmt: skip
    report = report.replace(machine=machine)
    unsaved = own.saved(report, save) if save is not None and (report.found or not report.interrupted) else None
    output_profile.emit_profile(report, form, earlier, quiet=quiet)
    if unsaved is not None:  # what took long to measure was printed all the same
        raise unsaved
    if plot is not None and (report.points or (report.techniques is not None and report.techniques.rows)):
        output_profile.emit_plot(report, plot)
    if report.interrupted:
        raise KeyboardInterrupt
    if report.failed or (check and not report.agrees):
        raise SystemExit(ExitCode.FAILED)
    broken = report.techniques.broken(best=best) if report.techniques is not None else []
    if broken:
        output_profile.say_broken(broken)
        raise SystemExit(ExitCode.ANSWER_IS_NO)
