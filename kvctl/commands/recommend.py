"""`kvctl recommend`.

Annotations are real objects here: Typer would have to compile them from text at every start.
"""

from typing import Annotated, Optional

import typer

from kvctl.completing import (
    complete_cache_formats,
    complete_emit_kinds,
    complete_goals,
    complete_gpus,
    complete_models,
    complete_servers,
    complete_workloads,
)
from kvctl.options_shared import Format, Json, Quiet, Revision, Set, Source


def recommend(
    models: Annotated[
        Optional[list[str]],
        typer.Argument(
            metavar="[MODEL]...",
            help="A catalogue or Hub name, a folder, a config.json or a .gguf file. Several make a matrix.",
            autocompletion=complete_models,
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        Optional[list[str]],
        typer.Option(
            "--gpu",
            metavar="NAME",
            help="What there is in one node: H100, 8xH200, A100:40GiB, local (this machine's), cpu. Several, with commas, make a matrix. Default: local.",
            show_default=False,
            autocompletion=complete_gpus,
        ),
    ] = None,
    host_memory: Annotated[
        Optional[str],
        typer.Option(
            "--host-memory",
            metavar="SIZE",
            help="Of each node's memory, what weights that GPUs do not hold may stay in: 64GiB. Default: none; with --gpu local, what is free.",
            show_default=False,
        ),
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", help="Such nodes.")] = 1,
    ctx: Annotated[
        Optional[str],
        typer.Option(
            "--ctx",
            "-c",
            "--max-model-len",
            metavar="TOKENS",
            help="Tokens of the longest request, prompt and answer: 8192, 32k (k is 1,024). Default: 32k, or the model's maximum.",
            show_default=False,
        ),
    ] = None,
    input_tokens: Annotated[
        Optional[str],
        typer.Option(
            "--input-tokens",
            metavar="TOKENS",
            help="Of a usual prompt. Default: seven eighths of --ctx.",
            show_default=False,
        ),
    ] = None,
    output_tokens: Annotated[
        Optional[str],
        typer.Option(
            "--output-tokens",
            metavar="TOKENS",
            help="Of a usual answer. Default: an eighth of --ctx.",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[
        Optional[int],
        typer.Option("--concurrency", metavar="N", help="Requests at once. Default: 1.", show_default=False),
    ] = None,
    rate: Annotated[
        Optional[float],
        typer.Option("--rate", metavar="X", help="Requests a second, in place of --concurrency.", show_default=False),
    ] = None,
    workload: Annotated[
        Optional[str],
        typer.Option(
            "--workload",
            metavar="NAME",
            help="Lengths, prefixes and 2 requests a second of chat, rag, agent or code, in place of --input-tokens and --output-tokens.",
            show_default=False,
            autocompletion=complete_workloads,
        ),
    ] = None,
    trace: Annotated[
        Optional[str],
        typer.Option(
            "--trace",
            metavar="FILE",
            help="The same of your own requests: JSON lines of timestamp (ms), input_length, output_length and hash_ids, or of messages with usage or a --tokenizer. - is stdin.",
            show_default=False,
        ),
    ] = None,
    tokenizer: Annotated[
        Optional[str],
        typer.Option(
            "--tokenizer", metavar="FILE", help="A tokenizer.json, for a --trace of messages.", show_default=False
        ),
    ] = None,
    shared_prefix: Annotated[
        Optional[str],
        typer.Option(
            "--shared-prefix",
            metavar="TOKENS",
            help="Tokens that every prompt begins with, as a system prompt: found in the cache from the second request on.",
            show_default=False,
        ),
    ] = None,
    slo: Annotated[
        Optional[str],
        typer.Option("--slo", metavar="TEXT", help="Times to keep: ttft=500ms,tpot=50ms.", show_default=False),
    ] = None,
    goal: Annotated[
        str,
        typer.Option(
            "--goal",
            metavar="NAME",
            help="What to have most of: throughput, latency, cost, context or quality.",
            autocompletion=complete_goals,
        ),
    ] = "throughput",
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            metavar="NAME",
            help="any, or some of vllm, sglang, tensorrt-llm, llama.cpp, ollama; with a version after @.",
            autocompletion=complete_servers,
        ),
    ] = "any",
    weights_dtype: Annotated[
        Optional[str],
        typer.Option(
            "--weights-dtype",
            metavar="NAME",
            help="These weights and no others: bf16, fp8, w8a8, awq, gptq, w4a16, mxfp4, nvfp4, or a GGUF type (q4_k_m).",
            show_default=False,
        ),
    ] = None,
    kv_dtype: Annotated[
        Optional[str],
        typer.Option(
            "--kv-dtype",
            "--kv-cache-dtype",
            metavar="NAME",
            help="This cache and no other: auto (16 bits), fp8, q8_0, … in any engine's words.",
            show_default=False,
            autocompletion=complete_cache_formats,
        ),
    ] = None,
    tensor_parallel: Annotated[
        Optional[int],
        typer.Option(
            "-tp", "--tensor-parallel-size", metavar="N", help="So many tensor-parallel ranks.", show_default=False
        ),
    ] = None,
    pipeline_parallel: Annotated[
        Optional[int],
        typer.Option(
            "-pp", "--pipeline-parallel-size", metavar="N", help="So many pipeline stages.", show_default=False
        ),
    ] = None,
    replicas: Annotated[
        Optional[int],
        typer.Option("--replicas", metavar="N", help="So many servers side by side.", show_default=False),
    ] = None,
    max_quality_loss: Annotated[
        Optional[str],
        typer.Option(
            "--max-quality-loss",
            metavar="PERCENT",
            help="What formats of weights and cache may lose. Default: 1.",
            show_default=False,
        ),
    ] = None,
    quality: Annotated[
        Optional[list[str]],
        typer.Option(
            "--quality",
            metavar="FILE",
            help="Losses measured on this model: what kvctl quantize --json or kvctl profile --save wrote. Repeatable.",
            show_default=False,
        ),
    ] = None,
    calibrate: Annotated[
        Optional[list[str]],
        typer.Option(
            "--calibrate",
            metavar="FILE",
            help="Speeds measured on such hardware: what kvctl serve-test --save or kvctl profile --save wrote; FILE@H100, FILE@2xH100 or FILE@cpu says on what, where the file does not. Repeatable.",
            show_default=False,
        ),
    ] = None,
    price: Annotated[
        Optional[list[str]],
        typer.Option(
            "--price",
            metavar="X|NAME=X|FILE",
            help="Of a GPU for an hour, as --gpu names it (a card with two dies is paid for once): 2.5, H100=2.5,L40S=0.9, or a TOML file with such lines. Repeatable.",
            show_default=False,
        ),
    ] = None,
    emit: Annotated[
        Optional[list[str]],
        typer.Option(
            "--emit",
            metavar="KINDS",
            help="Write what can be run: command, compose, kubernetes, lws, systemd, config, alerts, runbook, json; all writes every one that makes sense. To stdout, or with -o into a folder.",
            show_default=False,
            autocompletion=complete_emit_kinds,
        ),
    ] = None,
    output: Annotated[
        Optional[str],
        typer.Option("--output", "-o", metavar="DIR", help="Where --emit writes.", show_default=False),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="With -o, replace files of these names that hold something else.")
    ] = False,
    answer: Annotated[
        int, typer.Option("--answer", metavar="N", help="Which answer --emit and --verify are about: 1 is the best.")
    ] = 1,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Start the answer on this machine (llama.cpp, vLLM), put the load on it, and hold what comes beside what is promised.",
        ),
    ] = False,
    verify_args: Annotated[
        Optional[str],
        typer.Option(
            "--verify-args",
            metavar="OPTIONS",
            help="More options of the engine for that, which leave memory and requests as they are: '-t 4', '--enforce-eager'.",
            show_default=False,
        ),
    ] = None,
    server_log: Annotated[
        Optional[str],
        typer.Option(
            "--server-log", metavar="FILE", help="Where --verify writes the server's log.", show_default=False
        ),
    ] = None,
    start_timeout: Annotated[
        Optional[str],
        typer.Option(
            "--start-timeout",
            metavar="TIME",
            help="It may take so long to be ready. Default: 15m.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        Optional[str],
        typer.Option("--name", metavar="NAME", help="Of the service that is emitted.", show_default=False),
    ] = None,
    served_name: Annotated[
        Optional[str],
        typer.Option(
            "--served-name",
            metavar="NAME",
            help="What requests call the model. Default: its own name.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        Optional[int], typer.Option("--port", metavar="N", help="Of the server. Default: 8000.", show_default=False)
    ] = None,
    host: Annotated[
        Optional[str],
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Where a server outside of a container listens. Default: 127.0.0.1.",
            show_default=False,
        ),
    ] = None,
    image: Annotated[
        Optional[str],
        typer.Option(
            "--image",
            metavar="NAME",
            help="Container image. Default: the engine's own, of the version.",
            show_default=False,
        ),
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Join several nodes of vLLM through Ray.")] = False,
    what_if: Annotated[
        Optional[list[str]],
        typer.Option(
            "--what-if",
            metavar="PLAN",
            help="Compare with a plan that --json or --emit json wrote (FILE, or FILE#2 for its second answer); two, without a MODEL, with each other. Repeatable.",
            show_default=False,
        ),
    ] = None,
    set_: Set = None,
    source: Source = None,
    revision: Revision = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", "-e", help="Say what was rejected and why, and where every technique stands."),
    ] = False,
    format_: Format = "table",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """From a model, hardware and a workload to a configuration that runs.

    \b
    Examples:
      kvctl recommend Qwen3-32B --gpu 2xH100 --ctx 16k --concurrency 32
      kvctl recommend Llama-3.3-70B-Instruct --gpu 8xH100 --rate 5 --input-tokens 2k --output-tokens 500 --slo ttft=1s,tpot=50ms
      kvctl recommend DeepSeek-V3 --gpu 8xH200 --concurrency 64 --goal latency --explain
      kvctl recommend Qwen3-32B --gpu 2xH100 --workload agent --rate 1
      kvctl recommend Qwen3-8B --gpu RTX4090 --engine vllm --emit command
      kvctl recommend Qwen3-32B --gpu 4xL40S --concurrency 16 --emit all -o ./serve
      kvctl recommend model-Q4_K_M.gguf --gpu cpu:8GiB --ctx 4k --concurrency 4 --verify
      kvctl recommend Qwen3-32B gpt-oss-120b --gpu H100,H200,4xL40S --price prices.toml --format md
      kvctl recommend --what-if before.json --what-if after.json
    """
    from kvctl import options, options_recommend, output_recommend
    from kvctl import options_profile as own
    from kvctl.errors import ConfigError, ExitCode, UsageError

    form = options.read_output_format(format_, json_)
    kinds = options_recommend.read_kinds(emit or [])
    others = options_recommend.read_plans(what_if or [], alone=not models)
    if not models:
        if not others:
            raise UsageError("no model is named", hint="kvctl recommend MODEL --gpu H100")
        output_recommend.emit_what_if(others[0], others[1], form)
        return
    options_recommend.check_together(kinds, output, answer, form, force=force)
    proof = options_recommend.read_proof(
        verify, verify_args, server_log, start_timeout, alone=not kinds and not others, model=models[0]
    )
    hardware = options_recommend.read_hardware(gpu or ["local"])
    engines = options_recommend.read_engines(engine)
    heard = options_recommend.read_heard(workload, trace, tokenizer, rate, quiet=quiet)
    specs = [own.read_model(model, set_ or [], source, revision) for model in models]
    known = options_recommend.read_known(price or [], quality or [], calibrate or [], specs, hardware)
    asks = options_recommend.asks(
        specs, hardware, nodes=nodes, ctx=ctx, prompt=input_tokens, answer=output_tokens, concurrency=concurrency, rate=rate,
        engines=engines, slo=slo, goal=goal, max_loss=max_quality_loss, host=host_memory, heard=heard, shared=shared_prefix,
        pins=options_recommend.read_pins(weights_dtype, kv_dtype, tensor_parallel, pipeline_parallel, replicas),
    )  # fmt: skip
    if len(asks) > 1 and (kinds or others or proof is not None):
        raise UsageError(
            "--emit, --verify and --what-if are about one model on one kind of hardware", hint="one MODEL, one --gpu"
        )
    from kvctl.recommend.answers import recommend as answer_to
    from kvctl.recommend.report import RecommendReport

    site = options_recommend.read_site(
        specs[0].id, name=name, served=served_name, port=port, host=host, image=image, ray=ray
    )
    each = tuple(answer_to(ask, known, advise=len(asks) == 1 or explain) for ask in asks)
    if len(each) == 1 and each[0].unknown:
        raise ConfigError(
            f"{specs[0].id}: what serves it cannot be judged: {each[0].unknown}",
            hint="a folder with the weights, or the model's own config.json, may say it"
            + ("" if engine == "any" else "; --engine any asks the others"),
        )
    if proof is not None:
        from kvctl.recommend.verify import answered

        each = (answered(each[0], known),)
    report = RecommendReport(each, site if len(asks) == 1 else None, explain)
    if report.met and (kinds or others) and not quiet:
        output_recommend.say_unused(report)
    if kinds and report.met:
        output_recommend.emit_files(report, kinds, output, answer, force=force, quiet=quiet)
    elif others and report.met:
        output_recommend.emit_what_if(others[0], output_recommend.side_of(report, answer), form)
    else:
        if proof is not None and report.met:
            report = output_recommend.verified(report, answer, proof, asks[0], known, quiet=quiet)
        output_recommend.emit_recommend(report, form, quiet=quiet)
    if report.interrupted:
        raise KeyboardInterrupt
    if not (report.met and report.proven):
        raise SystemExit(ExitCode.ANSWER_IS_NO)
