"""`kvctl quantize`.

Annotations are real objects here: Typer would have to compile them from text at every start.
"""

from typing import Annotated, Optional

import typer

from kvctl.completing import (
    complete_backends,
    complete_devices,
    complete_dtypes,
    complete_gpus,
    complete_models,
    complete_techniques,
    complete_weight_formats,
)
from kvctl.options_shared import Format, Json, Quiet, Revision, Source, TextFile


def quantize(
    model: Annotated[
        Optional[str],
        typer.Argument(
            metavar="MODEL",
            help="A folder with weights in safetensors, a .gguf file, or a Hub name.",
            autocompletion=complete_models,
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Optional[str],
        typer.Option("--output", "-o", metavar="DIR", help="Where the checkpoint goes.", show_default=False),
    ] = None,
    weights: Annotated[
        Optional[str],
        typer.Option(
            "--weights",
            "-w",
            metavar="NAME",
            help="Format of the weights: awq, int8, nf4, nf4-dq, fp4, rtn, gptq, fp8 … (--list-formats).",
            autocompletion=complete_weight_formats,
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        Optional[str],
        typer.Option(
            "--compare",
            metavar="NAMES",
            help="Make several, measure them beside the original, keep none: int8,nf4,awq.",
            autocompletion=complete_weight_formats,
            show_default=False,
        ),
    ] = None,
    backend: Annotated[
        Optional[str],
        typer.Option(
            "--backend",
            metavar="NAME",
            help="Who makes awq: kvctl, gptqmodel or autoawq. Others have environments of their own, made on first use after asking.",
            autocompletion=complete_backends,
            show_default=False,
        ),
    ] = None,
    kv: Annotated[
        Optional[str],
        typer.Option(
            "--kv",
            metavar="NAMES",
            help="What formats of the KV cache cost this model: fp8,int8,int4; with those of weights, each with each. By itself with -o, calibrated scales of an FP8 cache are written beside the weights.",
            autocompletion=complete_techniques,
            show_default=False,
        ),
    ] = None,
    per_head: Annotated[
        bool, typer.Option("--per-head", help="Scales for each KV head, which vLLM reads and SGLang does not.")
    ] = False,
    ctx: Annotated[
        Optional[str],
        typer.Option(
            "--ctx",
            metavar="N",
            help="Tokens at which caches are told, and what fits. Default: 4,096.",
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        Optional[str],
        typer.Option(
            "--gpu",
            metavar="NAME",
            help="Say what fits: the longest context, and requests of --ctx tokens: H100, 2xRTX4090, A100:40GiB, local.",
            autocompletion=complete_gpus,
            show_default=False,
        ),
    ] = None,
    group: Annotated[
        Optional[int],
        typer.Option(
            "--group",
            metavar="N",
            help="Inputs that share a scale in awq: 32, 64 or 128. Default: the largest that divides all.",
            show_default=False,
        ),
    ] = None,
    calib: Annotated[
        Optional[str],
        typer.Option(
            "--calib",
            metavar="FILE|DATASET",
            help="What awq, gptq and FP8 scales are searched on: a text; chats or texts as JSON Lines, JSON or Parquet; or a data set on the Hub, NAME[@REV][:CONFIG][:SPLIT]. Default: kvctl's own text.",
            show_default=False,
        ),
    ] = None,
    calib_chat: Annotated[
        bool, typer.Option("--calib-chat", help="Texts go through the model's chat template, as chats always do.")
    ] = False,
    calib_samples: Annotated[
        Optional[int],
        typer.Option("--calib-samples", metavar="N", help="Pieces of it. Default: 16.", show_default=False),
    ] = None,
    calib_length: Annotated[
        Optional[int],
        typer.Option("--calib-length", metavar="N", help="Tokens of a piece. Default: 512.", show_default=False),
    ] = None,
    seed: Annotated[
        Optional[int],
        typer.Option(
            "--seed",
            metavar="N",
            help="Which pieces. The same seed gives the same bytes. Default: 0.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="Of what is not packed: auto, fp16, bf16, fp32.",
            autocompletion=complete_dtypes,
        ),
    ] = "auto",
    compute_dtype: Annotated[
        Optional[str],
        typer.Option(
            "--compute-dtype",
            metavar="NAME",
            help="nf4 and fp4: computed in. Default: --dtype.",
            autocompletion=complete_dtypes,
            show_default=False,
        ),
    ] = None,
    int8_threshold: Annotated[
        Optional[float],
        typer.Option(
            "--int8-threshold",
            metavar="X",
            help="int8: larger inputs are multiplied in 16 bits. Default: 6.",
            show_default=False,
        ),
    ] = None,
    skip: Annotated[
        Optional[list[str]],
        typer.Option(
            "--skip",
            metavar="MODULE",
            help="int8, nf4, fp4: leave these modules as they are. Repeatable.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        Optional[int],
        typer.Option(
            "--tokens",
            metavar="N",
            help="Tokens of text that quality is measured on. Default: 4,088, and 2,040 of what is read through a cache.",
            show_default=False,
        ),
    ] = None,
    text: TextFile = None,
    max_ppl_increase: Annotated[
        Optional[str],
        typer.Option(
            "--max-ppl-increase",
            metavar="PERCENT",
            help="Exit with status 3 where the perplexity rises by more.",
            show_default=False,
        ),
    ] = None,
    min_top1: Annotated[
        Optional[str],
        typer.Option(
            "--min-top1",
            metavar="PERCENT",
            help="Exit with status 3 where the likeliest token is the same less often.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            "--device", metavar="NAME", help="Where it is measured: auto, cpu, cuda:N.", autocompletion=complete_devices
        ),
    ] = "auto",
    source: Source = None,
    revision: Revision = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say sizes, memory and disk that it would take, and make nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where a run was stopped; the same bytes come out.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what is at DIR.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Agree to what a backend's environment takes.")] = False,
    list_backends: Annotated[
        bool, typer.Option("--list-backends", help="List the backends: version, state, what they take and make.")
    ] = False,
    list_formats: Annotated[bool, typer.Option("--list-formats", help="List the formats that are known.")] = False,
    format_: Format = "table",
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a smaller model, reload it, and measure what it cost.

    \b
    Examples:
      kvctl quantize ./SmolLM2-135M --weights awq -o ./SmolLM2-135M-awq
      kvctl quantize model-f16.gguf --weights nf4 -o ./model-nf4 --max-ppl-increase 5%
      kvctl quantize Qwen/Qwen3-8B --weights awq -o ./Qwen3-8B-awq --dry-run
      kvctl quantize ./model --compare int8,nf4,rtn,awq --json
      kvctl quantize ./model --kv fp8,int8,int4
      kvctl quantize ./model --compare nf4,int8,awq --kv plain,fp8,int8,int4 --gpu RTX4090 --ctx 32k
      kvctl quantize ./model --kv fp8 -o ./model-fp8-kv
    """
    import os
    from pathlib import Path

    from kvctl import options, options_quantize, output_profile, output_quantize, signals
    from kvctl import options_profile as own
    from kvctl.errors import ExitCode, UsageError

    form = options.read_output_format(format_, json_)
    if list_formats:
        output_quantize.emit_ways(form)
        return
    if list_backends:
        output_quantize.emit_backends(form)
        return
    if model is None:
        raise UsageError("no model is named", hint="kvctl quantize MODEL --weights awq -o DIR")
    options_quantize.check_revision(model, source, revision)
    alone = kv is not None and weights is None and compare is None
    caches = options_quantize.read_caches(kv, {
        "--backend": backend, "--group": group, "--compute-dtype": compute_dtype, "--skip": skip,
        "--int8-threshold": int8_threshold, "--dry-run": dry_run, "--resume": resume,
    } if alone else {})  # fmt: skip
    ways = () if alone else options_quantize.read_ways(weights, compare, output, backend, dry=dry_run)
    settings = options_quantize.read_settings(
        group=group, dtype=dtype, compute_dtype=compute_dtype, int8_threshold=int8_threshold, skip=skip or [],
        calib=calib, calib_chat=calib_chat, calib_samples=calib_samples, calib_length=calib_length, seed=seed,
    )  # fmt: skip
    options_quantize.check_together(
        ways, caches.techniques if alone else (), compare=compare, output=output, per_head=per_head, resume=resume, force=force,
        calibration={"--calib": calib, "--calib-chat": calib_chat or None, "--calib-samples": calib_samples,
                     "--calib-length": calib_length, "--seed": seed},
    )  # fmt: skip
    if ways:
        settings.check(ways)
    gate = options_quantize.read_gate(max_ppl_increase, min_top1)
    if dry_run and gate:
        raise UsageError("--dry-run measures nothing that a bound could be held against", hint="without --dry-run")
    if resume and (compare is not None or dry_run):
        raise UsageError("--resume goes on with a checkpoint", hint="--weights NAME -o DIR --resume")
    context = options_quantize.read_context(ctx, of=bool(kv or gpu))
    hardware = options.read_hardware(gpu, None, None, started=False, needed=False)
    options_quantize.need_packages(ways)
    exam = options_quantize.read_exam(tokens, text, device, caches.techniques, alone=alone)
    spec = own.read_model(model, [], source, revision)
    settings, exam = options_quantize.within(spec, settings, exam, calib_length)
    notes = caches.notes(spec)
    signals.heed()
    from kvctl.weights import run

    if not alone:
        run.check_source(spec)
    wanted = [] if dry_run else run.missing(ways)
    if not all(output_quantize.may_install(one, yes=yes) for one in wanted):
        raise UsageError("nothing was made", hint="awq without --backend needs no environment")
    with output_profile.live(quiet=quiet) as progress:
        for one in wanted:
            run.install(one, progress.now)
        progress.now.stage(f"reading {spec.id}")
        files, target = run.files_of(spec, revision), None if output is None else Path(os.path.abspath(output))
        if alone:
            cache = run.KvAsk(
                spec, files, caches.techniques, settings, exam, per_head, gate, target, force, context, hardware, notes
            )
            report = run.of_cache(cache, progress.now)
        else:
            ask = run.Ask(spec, files, ways, settings, exam, gate, target, resume, force, context, hardware, notes)
            report = run.plan(ask) if dry_run else run.quantize(ask, progress.now)
    output_quantize.emit_quantize(report, form, quiet=quiet)
    if report.interrupted:
        raise KeyboardInterrupt
    if report.broken:
        output_profile.say_broken(report.broken)
        raise SystemExit(ExitCode.ANSWER_IS_NO)
    if report.failed:
        raise SystemExit(ExitCode.FAILED)
