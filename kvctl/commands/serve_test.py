"""`kvctl serve-test`.

Annotations are real objects here: Typer would have to compile them from text at every start.
"""

from typing import Annotated, Optional

import typer

from kvctl.options_shared import Format, Json, Quiet

_OF_SAVED = (
    "from_",
    "save",
    "compare",
    "fail_on",
    "report",
    "prometheus",
    "junit",
    "explain",
    "format_",
    "json_",
    "quiet",
)
"""Options that go with --from."""


def serve_test(
    context: typer.Context,
    url: Annotated[
        Optional[str],
        typer.Argument(
            metavar="URL",
            help="The server: http://127.0.0.1:8000, with /v1 or without. Default: the one that answers on this machine.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        Optional[str],
        typer.Option(
            "--model",
            "-m",
            metavar="NAME",
            help="Default: the first that it serves. Of --launch: the .gguf file, folder or name to start it with.",
            show_default=False,
        ),
    ] = None,
    launch: Annotated[
        Optional[str],
        typer.Option(
            "--launch",
            metavar="ENGINE",
            help="Start llama.cpp, vllm or transformers for the test; or a command line: 'llama-server -m X.gguf -np 4'.",
            show_default=False,
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
    server_log: Annotated[
        Optional[str],
        typer.Option(
            "--server-log",
            metavar="FILE",
            help="The log of the server's start, read for its KV cache; of --launch where it is written.",
            show_default=False,
        ),
    ] = None,
    size_model: Annotated[
        Optional[str],
        typer.Option(
            "--size-model",
            metavar="MODEL",
            help="The model as kvctl size knows it, for what is predicted. Default: what it was started with, or its name.",
            show_default=False,
        ),
    ] = None,
    endpoint: Annotated[str, typer.Option("--endpoint", metavar="NAME", help="chat or completions.")] = "chat",
    input_tokens: Annotated[
        Optional[str],
        typer.Option(
            "--input-tokens",
            "-i",
            metavar="N",
            help="Tokens of each prompt, as the server counts them: 512, 200-800, normal:512:64, lognormal:512:0.8, "
            "512:70+4k:30. Default: 512.",
            show_default=False,
        ),
    ] = None,
    output_tokens: Annotated[
        Optional[str],
        typer.Option(
            "--output-tokens",
            "-o",
            metavar="N",
            help="Tokens of each answer, likewise; of --prompts at most. Default: 128.",
            show_default=False,
        ),
    ] = None,
    shared_prefix: Annotated[
        Optional[str],
        typer.Option(
            "--shared-prefix",
            metavar="N",
            help="Tokens with which prompts begin alike: does its prefix cache hit?",
            show_default=False,
        ),
    ] = None,
    groups: Annotated[
        Optional[int], typer.Option("--groups", metavar="N", help="Such beginnings. Default: 1.", show_default=False)
    ] = None,
    order: Annotated[
        Optional[str],
        typer.Option(
            "--order",
            metavar="NAME",
            help="Of groups: random, or round (one after the other). Default: random.",
            show_default=False,
        ),
    ] = None,
    control: Annotated[
        bool,
        typer.Option("--control", help="Before each load of --shared-prefix one without it: what does the cache save?"),
    ] = False,
    turns: Annotated[
        Optional[int],
        typer.Option(
            "--turns",
            metavar="N",
            help="Conversations of so many requests, each with all that was said before.",
            show_default=False,
        ),
    ] = None,
    turn_tokens: Annotated[
        Optional[str],
        typer.Option(
            "--turn-tokens",
            metavar="N",
            help="That the user adds in each turn after the first. Default: 64.",
            show_default=False,
        ),
    ] = None,
    think: Annotated[
        Optional[str],
        typer.Option(
            "--think", metavar="TIME", help="Between an answer and the next turn. Default: none.", show_default=False
        ),
    ] = None,
    tools: Annotated[
        Optional[int],
        typer.Option(
            "--tools",
            metavar="N",
            help="Definitions of tools in every request; with --turns an agent's loop.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        Optional[str],
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Replay a trace's lengths, shared beginnings and times (Mooncake, Qwen-Bailian, logs of requests).",
            show_default=False,
        ),
    ] = None,
    speed: Annotated[
        Optional[float],
        typer.Option(
            "--speed", metavar="X", help="Times as fast as the trace's requests came. Default: 1.", show_default=False
        ),
    ] = None,
    prompts: Annotated[
        Optional[str],
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="Send prompts of a file: JSON lines with prompt or messages, ShareGPT, or plain lines.",
            show_default=False,
        ),
    ] = None,
    plan_: Annotated[
        Optional[str],
        typer.Option(
            "--plan",
            metavar="FILE",
            help="Send what a plan of kvctl recommend --json is for (FILE#2: its second answer), and exit with status 3 where it does not hold.",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[
        Optional[str],
        typer.Option(
            "--concurrency",
            "-c",
            metavar="N",
            help="Requests (with --turns conversations) that are kept under way; several one after the other: 1,4,16. Default: 1.",
            show_default=False,
        ),
    ] = None,
    rate: Annotated[
        Optional[str],
        typer.Option(
            "--rate",
            "-r",
            metavar="N",
            help="Requests (with --turns conversations) a second instead, whatever becomes of those before; several: "
            "1,2,4; rising over --duration: 1..10.",
            show_default=False,
        ),
    ] = None,
    sweep: Annotated[
        Optional[list[str]],
        typer.Option(
            "--sweep",
            metavar="NAME=LIST",
            help="A load for each value: concurrency=1,2,4 or input-tokens=1k,4k,16k. Repeatable: all combinations.",
            show_default=False,
        ),
    ] = None,
    reset_cache: Annotated[
        bool,
        typer.Option(
            "--reset-cache", help="Have the server empty its prefix cache before each load (vLLM, SGLang, llama.cpp)."
        ),
    ] = False,
    find_limit: Annotated[
        bool,
        typer.Option(
            "--find-limit",
            help="Raise --concurrency until the KV cache is full, requests wait, or --slo is missed, and find where.",
        ),
    ] = False,
    burstiness: Annotated[
        Optional[float],
        typer.Option(
            "--burstiness",
            metavar="X",
            help="Of --rate: 1 is Poisson, less comes in bursts. Default: evenly.",
            show_default=False,
        ),
    ] = None,
    requests: Annotated[
        Optional[int],
        typer.Option(
            "--requests",
            "-n",
            metavar="N",
            help="Measured requests of each load. Default: 50, or 4 for each under way.",
            show_default=False,
        ),
    ] = None,
    duration: Annotated[
        Optional[str],
        typer.Option("--duration", "-d", metavar="TIME", help="Send for so long instead: 30s, 5m.", show_default=False),
    ] = None,
    warmup: Annotated[
        Optional[int],
        typer.Option(
            "--warmup",
            metavar="N",
            help="Requests before those. Default: one for each under way, and 8 at least; of a slow --rate those of 10 s.",
            show_default=False,
        ),
    ] = None,
    slo: Annotated[
        Optional[str],
        typer.Option(
            "--slo",
            metavar="LIST",
            help="Exit with status 3 where fewer requests keep these: ttft=500ms,tpot=50ms,p99.",
            show_default=False,
        ),
    ] = None,
    retry: Annotated[
        int,
        typer.Option(
            "--retry", metavar="N", help="Send a request that is turned away (429, 503) again, when the server says."
        ),
    ] = 0,
    max_error_rate: Annotated[
        float, typer.Option("--max-error-rate", metavar="PERCENT", help="Give a load up where more requests fail.")
    ] = 5.0,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="A request fails where nothing comes for so long.")
    ] = "300s",
    api_key_env: Annotated[
        Optional[str],
        typer.Option(
            "--api-key-env", metavar="NAME", help="The variable that holds the server's key.", show_default=False
        ),
    ] = None,
    header: Annotated[
        Optional[list[str]],
        typer.Option(
            "--header", "-H", metavar="TEXT", help="One more header of every request. Repeatable.", show_default=False
        ),
    ] = None,
    extra: Annotated[
        Optional[list[str]],
        typer.Option(
            "--extra",
            metavar="KEY=VALUE",
            help="One more value in every request's body. Repeatable.",
            show_default=False,
        ),
    ] = None,
    ca: Annotated[
        Optional[str], typer.Option("--ca", metavar="FILE", help="Certificates to trust, in PEM.", show_default=False)
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Trust any certificate.")] = False,
    processes: Annotated[
        int,
        typer.Option(
            "--processes", metavar="N", help="Of this client, which share each load: where one takes in too little."
        ),
    ] = 1,
    seed: Annotated[
        Optional[int],
        typer.Option(
            "--seed",
            metavar="N",
            help="Of prompts and times. Default: another in each run, so that none meets its own prompts in "
            "the server's cache.",
            show_default=False,
        ),
    ] = None,
    log: Annotated[
        Optional[str],
        typer.Option("--log", metavar="FILE", help="Write a line of JSON for every request.", show_default=False),
    ] = None,
    save: Annotated[
        Optional[str], typer.Option("--save", metavar="FILE", help="Keep the result, as JSON.", show_default=False)
    ] = None,
    from_: Annotated[
        Optional[str],
        typer.Option("--from", metavar="FILE", help="Show a saved result in place of a run.", show_default=False),
    ] = None,
    compare: Annotated[
        Optional[str],
        typer.Option(
            "--compare",
            metavar="FILE",
            help="Put a saved result before this one: what differs, and whether that is more than noise.",
            show_default=False,
        ),
    ] = None,
    fail_on: Annotated[
        Optional[list[str]],
        typer.Option(
            "--fail-on",
            metavar="CHANGE",
            help="Exit with status 3 where a figure is surely worse than before by more: ttft_p99:+5%, output_tokens:-5%. Repeatable.",
            show_default=False,
        ),
    ] = None,
    report: Annotated[
        Optional[str],
        typer.Option(
            "--report", metavar="FILE", help="Write a web page with tables and plots: FILE.html.", show_default=False
        ),
    ] = None,
    prometheus: Annotated[
        Optional[str],
        typer.Option(
            "--prometheus",
            metavar="FILE",
            help="Write metrics for node_exporter's textfile collector: FILE.prom.",
            show_default=False,
        ),
    ] = None,
    junit: Annotated[
        Optional[str],
        typer.Option(
            "--junit",
            metavar="FILE",
            help="Write JUnit's XML: a test for each load, objective and --fail-on.",
            show_default=False,
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Measure this client against a server of known cadence, and keep that for later runs."
        ),
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", "-e", help="Say what every figure means.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be sent, and send nothing.")] = False,
    format_: Format = "table",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Load a server, and watch its KV cache.

    \b
    Examples:
      kvctl serve-test http://127.0.0.1:8000 --concurrency 1,4,16
      kvctl serve-test http://127.0.0.1:8000 -i 4k -o 256 --rate 2 --duration 60s --slo ttft=2s,tpot=60ms,p95
      kvctl serve-test http://127.0.0.1:8000 -i 2k --shared-prefix 1k --groups 4 -c 8
      kvctl serve-test http://127.0.0.1:8000 --sweep input-tokens=1k,8k,32k --sweep concurrency=1,8
      kvctl serve-test http://127.0.0.1:8000 --turns 6 --turn-tokens 100-400 --think 2s -c 32
      kvctl serve-test http://127.0.0.1:8000 --trace mooncake.jsonl --speed 2 --duration 10m
      kvctl serve-test http://127.0.0.1:8000 --find-limit --slo tpot=50ms,p95
      kvctl serve-test http://127.0.0.1:8000 -c 8 -n 600 --save today.json --compare main.json --fail-on ttft_p99:+5%
      kvctl serve-test --from today.json --report today.html
      kvctl serve-test --launch llama.cpp --model model-Q4_1.gguf -c 4
      kvctl serve-test --launch "vllm serve ./model --max-model-len 2048" --find-limit
      kvctl serve-test http://127.0.0.1:8000 --plan plan.json
      kvctl serve-test --calibrate
      kvctl serve-test https://llm.example.com/v1 --api-key-env LLM_KEY --concurrency 8 --json
    """
    from kvctl import options, options_launch, options_serve, output_profile, output_serve, signals
    from kvctl.errors import KvctlError, UsageError

    form = options.read_output_format(format_, json_)
    if calibrate:
        if url is not None or launch is not None or from_ is not None:
            raise UsageError("--calibrate brings its own server", hint="kvctl serve-test --calibrate")
        from kvctl.loadtest import calibrate as own

        signals.heed()
        with output_profile.live(quiet=quiet) as progress:
            errors = own.calibrate(progress.now.say)
        own.save(errors)
        output_serve.emit_calibration(errors, form)
        return
    options_serve.check_files(
        {"--save": save, "--report": report, "--prometheus": prometheus, "--junit": junit, "--log": log}
    )
    gates = options_serve.read_gates(fail_on or [], compare)
    earlier = None if compare is None else options_serve.read_saved(compare, ())
    if from_ is not None:
        found = options_serve.read_saved(from_, options_serve.given(context, _OF_SAVED))
    else:
        aim = options_launch.read_aim(
            url, launch, model, server_log=server_log, start_timeout=start_timeout, dry_run=dry_run
        )
        load = options_serve.Load(
            input_tokens=input_tokens, output_tokens=output_tokens, shared_prefix=shared_prefix, groups=groups, order=order, control=control, turns=turns,
            turn_tokens=turn_tokens, think=think, tools=tools, trace=trace, speed=speed, prompts=prompts, concurrency=concurrency, rate=rate,
            burstiness=burstiness, find_limit=find_limit, requests=requests, duration=duration, warmup=warmup, retry=retry,
        )  # fmt: skip
        planned = None
        if plan_ is not None:
            from kvctl import options_planned

            planned = options_planned.read(plan_, load, sweep or [])
            load, slo = planned.load, slo or planned.slo
        plan = options_serve.read_plan(
            aim.url, load, sweeps=sweep or [], model=aim.model, endpoint=endpoint, slo=slo, headers=header or [], api_key_env=api_key_env,
            extra=extra or [], ca=ca, insecure=insecure, timeout=timeout, seed=seed, max_error_rate=max_error_rate, reset_cache=reset_cache, processes=processes,
        )  # fmt: skip
        plan = plan.replace(
            sizing=options_launch.read_sizing(
                aim.launch, server_log, size_model, None if planned is None else planned.command
            ),
            launch=aim.launch,
            promised=None if planned is None else planned.promised,
            notes=aim.notes,
        )
        if earlier is not None and compare is not None:
            from kvctl.loadtest.compare import check_plan

            check_plan(plan, earlier, compare, gates)
        signals.heed()
        from kvctl.loadtest import tests

        if dry_run:
            output_serve.emit_serve(tests.planned(plan), form, quiet=quiet, explain=explain)
            return
        with output_serve.live(quiet=quiet) as (now, live, done), tests.Log(log) as kept:
            found = tests.run(plan, now, kept, live, done)
    comparison = None
    if gates and (found.interrupted or not found.outcomes):
        raise KvctlError("--fail-on: this run is not whole: it was interrupted, or has no loads", hint="a whole run")
    if earlier is not None and compare is not None and found.outcomes:
        from kvctl.loadtest.compare import compare as beside

        comparison = beside(found, earlier, compare, gates)
    try:
        output_serve.emit_serve(found, form, quiet=quiet, explain=explain, comparison=comparison)
    finally:  # a reader of stdout that has enough takes no files with it
        output_serve.write_files(
            found, comparison, explain=explain, save=save, page=report, prometheus=prometheus, junit=junit
        )
    if found.interrupted and from_ is None:
        raise KeyboardInterrupt
    for lines, code in output_serve.outcome(found, comparison):
        output_profile.say_broken(lines)
        raise SystemExit(code)
