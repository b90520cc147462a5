"""A runbook in Markdown: what was chosen, how it is started and checked, and what to do when an alarm fires."""

from __future__ import annotations

import contextlib
import shlex
from typing import TYPE_CHECKING

from kvctl.errors import UsageError
from kvctl.recommend.emit.command import asked_for
from kvctl.recommend.emit.compose import compose
from kvctl.recommend.emit.config_files import config, start
from kvctl.recommend.emit.containers import health_of
from kvctl.recommend.emit.documents import title
from kvctl.recommend.emit.kubernetes import ONE_NODE, kubernetes, leader_worker_set
from kvctl.recommend.emit.prometheus import DOWN, Alert, alerts
from kvctl.recommend.emit.script import script
from kvctl.recommend.emit.site import reached
from kvctl.recommend.emit.starting import limit_words, variables
from kvctl.recommend.emit.systemd import systemd, unit_names
from kvctl.recommend.emit.told import unsaid
from kvctl.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvctl.recommend.deployment import Deployment
    from kvctl.recommend.emit.site import Promise, Site


def runbook(deployment: Deployment, site: Site, promise: Promise, beside: Mapping[str, str]) -> str:
    """The whole of it; `beside` are the files in the same folder, by kind.

    Raises:
        UsageError: the engine cannot be started so.

    """
    parts = [
        f"# {site.name}\n\n{title(deployment)}.\n",
        _chosen(deployment, promise),
        _before(deployment, site),
        _start(deployment, site, beside),
        _log(deployment, promise),
        _checks(deployment, site, promise, beside),
        _alarms(deployment, site, promise, beside),
        _back(deployment, site),
    ]
    return "\n".join(part for part in parts if part)


def _code(text: str, language: str = "sh") -> str:
    return f"```{language}\n{text.rstrip()}\n```\n"


def _list(lines: Iterable[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)


def _chosen(deployment: Deployment, promise: Promise) -> str:
    serving = deployment.serving
    rows = [("model", deployment.model), ("weights", f"{deployment.weights} ({_how(deployment)})"),
            ("KV cache", f"{deployment.kv_dtype}" + (f", {format_bytes(serving.kv_budget)} on each rank" if serving.kv_budget else "")),
            ("longest request", f"{deployment.context:,} tokens, prompt and answer")]  # fmt: skip
    if at_once := serving.max_sequences or serving.slots:
        each = f" on each of {deployment.replicas:,} servers" if deployment.replicas > 1 else ""
        rows.append(("requests in a batch", f"{at_once:,}{each}"))
    if deployment.all_gpus:
        rows.append(("GPUs", f"{deployment.all_gpus:,} × {deployment.device.name}"))
    ranks = {"tensor": serving.tensor_parallel, "pipeline": serving.pipeline_parallel, "data": serving.data_parallel,
             "decode context": serving.decode_context_parallel}  # fmt: skip
    if said := ", ".join(f"{kind} {count}" for kind, count in ranks.items() if count and count > 1):
        rows.append(("parallelism", said + (", experts whole" if serving.expert_parallel else "")))
    if (asked := _asked(promise)) != "":
        rows.append(("meant to hold", asked))
    table = "| | |\n|---|---|\n" + "".join(f"| {name} | {_cell(value)} |\n" for name, value in rows)
    why = f"\n{_list(promise.why)}" if promise.why else ""
    left = unsaid(deployment)
    open_ = f"\nLeft to the engine, which may choose otherwise on another machine: {', '.join(left)}.\n" if left else ""
    return f"## What was chosen\n\n{table}{why}{open_}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _how(deployment: Deployment) -> str:
    return {
        "stored": "as the checkpoint has them",
        "load": "converted while they are loaded",
        "make": "to be made first",
    }[deployment.made]


def _asked(promise: Promise) -> str:
    parts = [f"{promise.concurrency:,} requests at once"] if promise.concurrency else []
    if promise.rate:
        parts.append(f"{promise.rate:g} requests a second")
    if promise.ttft_s:
        parts.append(f"first token in {format_seconds(promise.ttft_s)}")
    if promise.tpot_s:
        parts.append(f"{format_seconds(promise.tpot_s)} between tokens")
    kept = f", kept by {promise.percent:g} of 100 requests" if promise.ttft_s or promise.tpot_s else ""
    return ", ".join(parts) + kept


def _before(deployment: Deployment, site: Site) -> str:
    steps = [f"The models' folder is {site.folder} on every machine, or the PersistentVolumeClaim {site.claim}.",
             f"A token of the Hub, where the model needs one: HF_TOKEN in the environment, in /etc/{site.name}.env, or in the Secret "
             f"{site.secret}. It stands in none of the files."]  # fmt: skip
    if deployment.nodes * deployment.replicas > 1:
        steps.append(
            f"In Kubernetes, {site.claim} has to have the access mode ReadWriteMany: pods on several nodes read it. {ONE_NODE}"
        )
    if deployment.nodes > 1:
        steps.append(
            "All nodes have the same image and the same folder of models, and reach one another on every port."
        )
    steps.append(f"In containers {limit_words(deployment, site)}")
    steps += [
        f"{deployment.engine.name} itself gives up sooner: where weights are fetched by a command in a shell, `export {name}={value}` before it."
        for name, value in variables(deployment, site)
    ]
    steps.append(f"The server asks for no key: let only what may use it reach port {site.port}.")
    text = f"## Before\n\n{_list(steps)}"
    if deployment.made == "make":
        text += "\nThe weights have to be made first:\n\n" + _code(_make(deployment))
    return text


def _make(deployment: Deployment) -> str:
    """The command that makes the weights."""
    if deployment.model.lower().endswith(".gguf"):
        return f"llama-quantize MODEL-F16.gguf {shlex.quote(deployment.model)} {deployment.weights.upper()}"
    return shlex.join(["kvctl", "quantize", deployment.base, "--weights", deployment.weights, "-o", deployment.model])


def _start(deployment: Deployment, site: Site, beside: Mapping[str, str]) -> str:
    ways = [f"{_file(kind, beside)}: {what}" for kind, what in _ways(deployment, site, beside)]
    what = "Or with a file beside this one" if beside else "Or as a file, from the same plan"
    files = f"\n{what}:\n\n{_list(ways)}" if ways else ""
    same = f"\nThese lines are in `{beside['command']}`.\n" if "command" in beside else ""
    return f"## Start\n\n{_code(script(deployment, site))}{same}{files}"


def _file(kind: str, beside: Mapping[str, str]) -> str:
    """The file of a kind, or what writes it."""
    return f"`{beside[kind]}`" if kind in beside else f"`--emit {kind}`"


def _ways(deployment: Deployment, site: Site, beside: Mapping[str, str]) -> list[tuple[str, str]]:
    """The kinds of files that this deployment can be started from, and how."""

    def apply(kind: str, service: str) -> str:
        return f"`kubectl apply -f {beside.get(kind, 'FILE')}`; for the checks `kubectl port-forward service/{service} {site.port}`"

    def unit() -> str:
        names = unit_names(deployment, site)
        each = "" if len(names) == 1 else "each unit in a file of its own, whose name is in its first line; "
        if deployment.nodes > 1:
            return f"{each}on each node its own: `systemctl enable --now {names[0]}`, …"
        return (
            f"{each}in /etc/systemd/system, then `systemctl daemon-reload`, `systemctl enable --now {' '.join(names)}`"
        )

    one = "; the other servers need a `--port` and GPUs of their own" if deployment.replicas > 1 else ""
    kinds: tuple[tuple[str, Callable[[Deployment, Site], str], Callable[[], str]], ...] = (
        ("compose", compose, lambda: "`docker compose up -d`"),
        ("kubernetes", kubernetes, lambda: apply("kubernetes", site.name)),
        ("lws", leader_worker_set, lambda: f"{apply('lws', f'{site.name}-leader')}; the cluster needs the LeaderWorkerSet operator"),
        ("systemd", systemd, unit),
        ("config", config, lambda: f"`{start(deployment, site)}`{one}"),
    )  # fmt: skip
    out = []
    for kind, write, how in kinds:
        with contextlib.suppress(UsageError):
            write(deployment, site)
            out.append((kind, how()))
    return out


def _log(deployment: Deployment, promise: Promise) -> str:
    if not promise.log:
        return ""
    told = " llama-server prints them with `--verbosity 4`." if deployment.engine.name == "llama.cpp" else ""
    return f"""## What its log should say

These lines are predicted; other numbers mean that the engine found more or less memory than the plan has.{told}

{_code(chr(10).join(promise.log), "text")}
`kvctl size --from-log LOG` compares the whole log with the prediction, and says what accounts for a difference.
"""


def _checks(deployment: Deployment, site: Site, promise: Promise, beside: Mapping[str, str]) -> str:
    url = f"http://{reached(site.host)}:{site.port}"
    health = _code(
        f"curl --fail --silent --show-error {url}{health_of(deployment.engine.name)}\ncurl --silent {url}/v1/models"
    )
    name = asked_for(deployment, site)
    test = ["kvctl", "serve-test", url, *(["--model", name] if name is not None else [])]
    if promise.prompt_tokens:
        test += ["-i", str(promise.prompt_tokens)]
    if promise.output_tokens:
        test += ["-o", str(promise.output_tokens)]
    if promise.rate:
        test += ["--rate", f"{promise.rate:g}", "--duration", "5m"]
    elif promise.concurrency:
        test += ["-c", str(promise.concurrency)]
    slo = [
        f"{name}={limit * 1000:g}ms" for name, limit in (("ttft", promise.ttft_s), ("tpot", promise.tpot_s)) if limit
    ]
    if slo:
        test += ["--slo", ",".join([*slo, f"p{promise.percent:g}"])]
    load = _code(shlex.join(test))
    whole = f" and at the router of all {plural(deployment.replicas, 'server')}" if deployment.replicas > 1 else ""
    plan = (
        f"All that was promised, and not the objective alone: `kvctl serve-test {url} --plan {beside['json']}`.\n\n"
        if "json" in beside and deployment.replicas == 1
        else ""
    )
    verdict = "It exits with status 3 where the objective is missed. " if slo else ""
    return f"""## Checks

Does it answer, and with which models?

{health}
Does it hold what it is meant to hold?{f" (The load is that of all {deployment.replicas} servers: run it at the router.)" if whole else ""}

{load}
{plan}{verdict}There must be no preemptions, and no request may fail. Where the limit lies: the same with `--find-limit`.
"""


def _alarms(deployment: Deployment, site: Site, promise: Promise, beside: Mapping[str, str]) -> str:
    try:
        rows = alerts(deployment, site, promise)
    except UsageError as error:
        return (
            f"## Alarms\n\n{error.message[0].upper()}{error.message[1:]}: repeat the checks above from time to time.\n"
        )
    table = "".join(f"| [{row.name}](#{row.name.lower()}) | {_cell(row.summary)} | {row.lasts} |\n" for row in rows)
    whole = "".join(_alarm(row) for row in rows)
    return f"""## Alarms

{_file("alerts", beside)} has these as rules for Prometheus. They ask for `job="{site.name}"`: its first lines have the scrape configuration that gives that, on
machines and in Kubernetes. Under any other name {DOWN} fires for ever.

| alarm | fires where | for |
|---|---|---|
{table}
{whole.rstrip()}
"""


def _alarm(row: Alert) -> str:
    return f"### {row.name}\n\n{row.summary}.\n\n{_code(row.expression, 'promql')}\n{_list(row.do)}\n"


def _back(deployment: Deployment, site: Site) -> str:
    own = ", on each node its own" if deployment.nodes > 1 else ""
    steps = [
        "Keep the files of the version that runs before you put new ones in their place.",
        "docker compose: put the old file back, `docker compose up -d`.",
        f"Kubernetes: `kubectl rollout undo deployment/{site.name}`; a LeaderWorkerSet: apply the old file.",
        f"systemd: put the old unit back, `systemctl daemon-reload`, `systemctl restart {' '.join(unit_names(deployment, site))}`{own}.",
        "Then run the checks again.",
    ]
    return f"## Back to what ran before\n\n{_list(steps)}"
