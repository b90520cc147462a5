"""Manifests against the schemas of what reads them, alerts against Prometheus' grammar, units against systemd itself."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployments import (
    CASES,
    GIB,
    LLAMA_CPP,
    LLAMA_CPP_GPU,
    OLLAMA,
    SGLANG,
    SGLANG_NODES,
    TENSORRT_LLM,
    VLLM,
    VLLM_NODES,
)
from jsonschema import Draft202012Validator

from kvctl.engines.metrics import NAMES, TIMES
from kvctl.errors import UsageError
from kvctl.recommend.deployment import Deployment
from kvctl.recommend.emit import Promise, Site, emit
from kvctl.recommend.emit.prometheus import alerts

SITE = Site("llm", port=8001)
PROMISE = Promise(ttft_s=2, tpot_s=0.05, percent=95, hit_rate=0.5)


@functools.cache
def schemas() -> Any:
    """scripts/manifest_schemas.py: Kubernetes 1.37 (strict), Compose, LeaderWorkerSet, rules of Prometheus."""
    return json.loads(gzip.decompress((Path(__file__).parent / "data/manifest_schemas.json.gz").read_bytes()))


@functools.cache
def checker(kind: str) -> Draft202012Validator:
    every = schemas()
    if kind in ("compose", "prometheus"):
        return Draft202012Validator(every[kind])
    definitions = every["kubernetes"]["$defs"]
    if kind == "LeaderWorkerSet":
        return Draft202012Validator(every["leader_worker_set"] | {"$defs": definitions})
    return Draft202012Validator({"$ref": f"#/$defs/{every['kubernetes']['kinds'][kind]}", "$defs": definitions})


def documents(text: str) -> list[Any]:
    return list(yaml.safe_load_all(text))


def of_kind(kind: str) -> list[Any]:
    """Deployments for which a kind makes sense."""
    out = []
    for name, deployment in CASES.items():
        try:
            emit(kind, deployment, SITE, PROMISE)
        except UsageError:
            continue
        out.append(pytest.param(deployment, id=name))
    return out


def problems(kind: str, document: Any) -> list[str]:
    return [f"{'.'.join(map(str, error.path))}: {error.message[:200]}" for error in checker(kind).iter_errors(document)]


# -- the schemas themselves -----------------------------------------------------------------


def test_schemas_refuse_what_is_wrong() -> None:
    """They are strict: a misspelt key is an error, at any depth."""
    [whole, service] = documents(emit("kubernetes", VLLM, SITE))
    whole["spec"]["template"]["spec"]["containers"][0]["startupProbe"]["periodSecond"] = 1
    assert problems("Deployment", whole)
    service["spec"]["port"] = []
    assert problems("Service", service)
    [compose] = documents(emit("compose", VLLM, SITE))
    compose["services"]["llm"]["healthcheck"]["intervall"] = "1s"
    assert problems("compose", compose)
    [lws, _] = documents(emit("lws", VLLM_NODES, SITE))
    lws["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["container"] = []
    assert problems("LeaderWorkerSet", lws)
    [rules] = documents(emit("alerts", VLLM, SITE))
    rules["groups"][0]["rules"][0]["for"] = "2 minutes"
    assert problems("prometheus", rules)


# -- compose --------------------------------------------------------------------------------


@pytest.mark.parametrize("deployment", of_kind("compose"))
def test_compose_files(deployment: Deployment) -> None:
    [whole] = documents(emit("compose", deployment, SITE))
    assert problems("compose", whole) == []
    assert len(whole["services"]) == deployment.replicas


def test_a_composed_service() -> None:
    [whole] = documents(emit("compose", VLLM, SITE))
    service = whole["services"]["llm"]
    assert service["image"] == "vllm/vllm-openai:v0.33.0"
    assert service["entrypoint"] == ["vllm", "serve"]
    assert service["command"][:7] == [
        "Qwen/Qwen3-32B",
        "--served-model-name",
        "Qwen/Qwen3-32B",
        "--host",
        "0.0.0.0",
        "--port",
        "8001",
    ]
    assert service["ports"] == ["127.0.0.1:8001:8001"]
    assert service["ipc"] == "host"
    assert service["environment"]["HF_TOKEN"] is None  # passed on, and written nowhere
    assert service["deploy"]["resources"]["reservations"]["devices"] == [
        {"driver": "nvidia", "device_ids": ["0", "1"], "capabilities": ["gpu"]}
    ]
    assert service["healthcheck"]["test"][-1] == "http://127.0.0.1:8001/health"
    assert service["healthcheck"]["start_period"] == "1800s"


def test_replicas_are_services_on_gpus_of_their_own() -> None:
    [whole] = documents(emit("compose", VLLM.replace(replicas=3), SITE))
    found = {name: (one["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"], one["ports"])
             for name, one in whole["services"].items()}  # fmt: skip
    assert found == {
        "llm-0": (["0", "1"], ["127.0.0.1:8001:8001"]),
        "llm-1": (["2", "3"], ["127.0.0.1:8002:8001"]),
        "llm-2": (["4", "5"], ["127.0.0.1:8003:8001"]),
    }


def test_files_of_an_engine_are_in_the_file() -> None:
    [whole] = documents(emit("compose", TENSORRT_LLM, SITE))
    service = whole["services"]["llm"]
    [config] = service["configs"]
    assert config["target"] == service["command"][service["command"].index("--extra_llm_api_options") + 1]
    inside = yaml.safe_load(whole["configs"][config["source"]]["content"])
    assert inside["kv_cache_config"]["free_gpu_memory_fraction"] == 0.9


def test_models_of_ollama_are_fetched_when_it_is_up() -> None:
    assert "# When it is up: docker compose exec llm ollama pull qwen3:8b\n" in emit("compose", OLLAMA, SITE)
    assert "# When it is up: kubectl exec deploy/llm -- ollama pull qwen3:8b\n" in emit("kubernetes", OLLAMA, SITE)
    own = OLLAMA.replace(model="/srv/models/q.gguf")
    text = emit("kubernetes", own, SITE)
    assert "ollama create llm -f /etc/engine/Modelfile" in text
    assert documents(text)[0]["data"] == {"Modelfile": "FROM /models/q.gguf\nPARAMETER num_ctx 4096\n"}


def test_amd_gpus_are_devices() -> None:
    [whole] = documents(emit("compose", CASES["vllm-amd"].replace(replicas=2), SITE))
    second = whole["services"]["llm-1"]
    assert second["image"] == "vllm/vllm-openai-rocm:v0.33.0"
    assert second["devices"] == ["/dev/kfd", "/dev/dri"]
    assert second["environment"]["HIP_VISIBLE_DEVICES"] == "2,3"
    assert "deploy" not in second


def expanded(text: str, values: dict[str, str]) -> str:
    """What Kubernetes makes of a word: $(NAME) becomes its value where it has one, $$ a dollar, all else stays
    (k8s.io third_party/forked/golang/expansion)."""
    return re.sub(
        r"\$(\$|\([^)]*\))", lambda found: "$" if found[1] == "$" else values.get(found[1][1:-1], found[0]), text
    )


@pytest.mark.parametrize("served", ["$(HF_HOME)", "$$(HF_HOME)", "a$$b", "a$b$", "${HF_HOME}", "$(", "$$$"])
def test_kubernetes_leaves_names_as_they_are(served: str) -> None:
    found = documents(emit("kubernetes", VLLM, SITE.replace(served=served)))[0]
    words = found["spec"]["template"]["spec"]["containers"][0]["args"]
    assert expanded(words[words.index("--served-model-name") + 1], {"HF_HOME": "/models"}) == served


def test_dollars_stay_dollars() -> None:
    """Compose puts variables in place of $NAME; two stand for one."""
    [whole] = documents(emit("compose", VLLM.replace(base="a$B"), SITE))
    assert "a$$B" in whole["services"]["llm"]["command"]


# -- kubernetes -----------------------------------------------------------------------------


@pytest.mark.parametrize("deployment", of_kind("kubernetes"))
def test_manifests(deployment: Deployment) -> None:
    found = documents(emit("kubernetes", deployment, SITE))
    assert [one["kind"] for one in found][-2:] == ["Deployment", "Service"]
    for document in found:
        assert problems(document["kind"], document) == []


def test_a_manifest() -> None:
    [whole, service] = documents(emit("kubernetes", VLLM.replace(serving=VLLM.serving.replace(offload=5 * GIB)), SITE))
    pod = whole["spec"]["template"]["spec"]
    [server] = pod["containers"]
    assert server["command"] == ["vllm", "serve"]
    assert server["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    # Loading may take half an hour: 180 looks, ten seconds apart.
    probe = server["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 1800
    assert probe["httpGet"] == {"path": "/health", "port": "http"}
    [token] = [one for one in server["env"] if one["name"] == "HF_TOKEN"]
    assert token == {
        "name": "HF_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "token", "optional": True}},
    }
    memory = {one["name"]: one for one in pod["volumes"]}["shared-memory"]["emptyDir"]
    assert memory == {
        "medium": "Memory",
        "sizeLimit": "20Gi",
    }  # 15 of vLLM's manifest for several GPUs, 5 that are offloaded
    assert pod["enableServiceLinks"] is False  # VLLM_PORT=tcp://… of a service called vllm
    # nvidia-smi's name, as GPU feature discovery writes it into a label.
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert service["spec"]["selector"] == whole["spec"]["selector"]["matchLabels"]
    assert whole["spec"]["strategy"] == {"type": "Recreate"}
    [many, _] = documents(emit("kubernetes", VLLM.replace(replicas=3), SITE))
    assert many["spec"]["replicas"] == 3
    assert many["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0


def test_a_start_may_take_as_long_as_its_weights_do() -> None:
    """600 GB: 6,000 s at 100 MB/s, 1,200 s at 500 MB/s, 600 s beside; 7,800 s are 130 minutes. 60 GB: 600 + 120 + 600 s, less than half an hour."""
    large, small = SITE.replace(weights=600 * 10**9), SITE.replace(weights=60 * 10**9)
    found = {}
    for site in (large, small, SITE):
        [whole, _] = documents(emit("kubernetes", VLLM, site))
        [server] = whole["spec"]["template"]["spec"]["containers"]
        probe = server["startupProbe"]
        found[site.weights] = probe["periodSeconds"] * probe["failureThreshold"]
        # The Deployment, and vLLM itself, give up no sooner.
        assert whole["spec"]["progressDeadlineSeconds"] > found[site.weights]
        [own] = [one["value"] for one in server["env"] if one["name"] == "VLLM_ENGINE_READY_TIMEOUT_S"]
        assert int(own) >= found[site.weights]
        [composed] = documents(emit("compose", VLLM, site))
        assert composed["services"]["llm"]["healthcheck"]["start_period"] == f"{found[site.weights]}s"
        assert f"VLLM_ENGINE_READY_TIMEOUT_S={own}\n" in emit("systemd", VLLM, site)
        [lws, _] = documents(emit("lws", VLLM_NODES, site))
        probe = lws["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"][0]["startupProbe"]
        assert probe["failureThreshold"] * probe["periodSeconds"] == found[site.weights]
    assert found == {600 * 10**9: 7800, 60 * 10**9: 1800, None: 1800}
    for kind in ("kubernetes", "compose", "runbook"):
        text = emit(kind, VLLM, large)
        assert "130 minutes: 558.8 GiB of weights at 100 MB/s from the Hub" in text
        assert "is not known" in emit(kind, VLLM, SITE)
    assert "`export VLLM_ENGINE_READY_TIMEOUT_S=7800` before it" in emit("runbook", VLLM, large)
    assert "READY_TIMEOUT" not in emit("runbook", SGLANG, large)
    # A folder is on the disk already: 1,200 s and 600 s.
    [local, _] = documents(emit("kubernetes", CASES["vllm-made"], large))
    assert local["spec"]["template"]["spec"]["containers"][0]["startupProbe"]["failureThreshold"] == 180


def test_metrics_are_where_the_engine_has_them() -> None:
    """tensorrt_llm/serve/openai_server.py: Prometheus' page is /prometheus/metrics."""
    page = {}
    for one in (VLLM, TENSORRT_LLM):
        whole = documents(emit("kubernetes", one, SITE))[-2]
        page[one.engine.name] = whole["spec"]["template"]["metadata"]["annotations"]["prometheus.io/path"]
        assert f"metrics_path: {page[one.engine.name]}\n" in emit("alerts", one, SITE)
    assert page == {"vllm": "/metrics", "tensorrt-llm": "/prometheus/metrics"}


@pytest.mark.parametrize("deployment", [*of_kind("lws"), pytest.param(VLLM_NODES.replace(replicas=2), id="replicas")])
@pytest.mark.parametrize("ray", [False, True])
def test_leader_worker_sets(deployment: Deployment, ray: bool) -> None:
    [whole, service] = documents(emit("lws", deployment, SITE.replace(ray=ray)))
    assert problems("LeaderWorkerSet", whole) == []
    assert problems("Service", service) == []
    template = whole["spec"]["leaderWorkerTemplate"]
    assert template["size"] == deployment.nodes
    assert whole["spec"]["replicas"] == deployment.replicas
    first, other = (template[name]["spec"]["containers"][0] for name in ("leaderTemplate", "workerTemplate"))
    # Requests come to the first pod of a group, and only it is asked whether it is well.
    assert "readinessProbe" in first
    assert "readinessProbe" not in other
    assert service["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"


def test_a_leader_worker_set_by_the_engines_own_processes() -> None:
    """Kubernetes itself puts LWS_LEADER_ADDRESS and LWS_WORKER_INDEX, which every pod has, in place of $(NAME)."""
    for deployment, option in ((VLLM_NODES, "--master-addr"), (SGLANG_NODES, "--dist-init-addr")):
        [whole, _] = documents(emit("lws", deployment, SITE))
        template = whole["spec"]["leaderWorkerTemplate"]
        for name, rank in (("leaderTemplate", "0"), ("workerTemplate", "$(LWS_WORKER_INDEX)")):
            words = template[name]["spec"]["containers"][0]["args"]
            assert words[words.index("--node-rank") + 1] == rank
            assert words[words.index(option) + 1].startswith("$(LWS_LEADER_ADDRESS)")
            assert words[words.index("--nnodes") + 1] == "2"


def test_a_leader_worker_set_by_ray() -> None:
    [whole, _] = documents(emit("lws", VLLM_NODES, SITE.replace(ray=True)))
    template = whole["spec"]["leaderWorkerTemplate"]
    first, other = (template[name]["spec"]["containers"][0] for name in ("leaderTemplate", "workerTemplate"))
    for one in (first, other):
        assert one["command"] == ["/bin/sh", "-ec"]
        ran = subprocess.run(["/bin/sh", "-n", "-c", one["args"][0]], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
    assert "ray start --head --port=6379\nexec vllm serve deepseek-ai/DeepSeek-V3 " in first["args"][0]
    assert "ray start --address=$LWS_LEADER_ADDRESS:6379 --block" in other["args"][0]
    assert """--speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'""" in first["args"][0]


# -- systemd --------------------------------------------------------------------------------


def units(text: str) -> dict[str, str]:
    """The units of a text, by the file that each belongs in."""
    parts = re.split(r"^# /etc/systemd/system/(\S+\.service):", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], (f"#{part}" for part in parts[2::2]), strict=True))


@pytest.mark.parametrize("deployment", of_kind("systemd"))
def test_systemd_takes_the_units(deployment: Deployment, tmp_path: Path) -> None:
    found = units(emit("systemd", deployment, SITE))
    assert len(found) == max(deployment.nodes, deployment.replicas)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("vllm", "python3", "llama-server", "trtllm-serve", "ollama", "transformers"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    site = SITE.replace(programs=str(programs), user="root", folder=str(tmp_path))
    for name, text in units(emit("systemd", deployment, site)).items():
        assert verified(tmp_path / name, text) == []
        assert verified(tmp_path / name, text.replace("KillMode=mixed", "KillMode=mixt\nKillMod=1"))


def verified(path: Path, text: str) -> list[str]:
    """What systemd says of a unit; of other units of this machine it says what is not about this one."""
    path.write_text(text)
    ran = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, check=False, timeout=60
    )
    return [line for line in ran.stderr.splitlines() if path.name in line]


def test_words_of_a_unit() -> None:
    """systemd.service(5): % and $ are doubled; ${HEAD_ADDRESS} is a variable of the file beside."""
    found = units(emit("systemd", VLLM.replace(base="a % $b", made="stored"), SITE))["llm.service"]
    assert '--served-model-name "a %% $$b"' in found
    assert "EnvironmentFile=-/etc/llm.env" in found
    nodes = units(emit("systemd", VLLM_NODES, SITE))
    assert list(nodes) == ["llm-node-0.service", "llm-node-1.service"]
    assert "--master-addr ${HEAD_ADDRESS} \\" in nodes["llm-node-1.service"]
    assert "EnvironmentFile=/etc/llm.env" in nodes["llm-node-1.service"]  # without it no node knows the first one
    assert r'--speculative-config "{\"method\": \"mtp\", \"num_speculative_tokens\": 1}"' in nodes["llm-node-0.service"]
    replicas = units(emit("systemd", VLLM.replace(replicas=2), SITE))
    assert "Environment=CUDA_VISIBLE_DEVICES=2,3" in replicas["llm-1.service"]
    assert "--port 8002" in replicas["llm-1.service"]


# -- an engine's own file -------------------------------------------------------------------


def test_settings_in_a_file() -> None:
    """A mapping is JSON (vLLM's FlexibleArgumentParser.load_config_file); a switch is true, one that turns something off too."""
    settings = yaml.safe_load(
        emit("config", VLLM.replace(serving=VLLM.serving.replace(prefix_caching=False, capture_sizes=(1, 2),
                                                                 speculative={"method": "ngram"})), SITE)
    )  # fmt: skip
    assert settings["model"] == "Qwen/Qwen3-32B"
    assert settings["no-enable-prefix-caching"] is True
    assert "enable-prefix-caching" not in settings
    assert settings["cudagraph-capture-sizes"] == [1, 2]
    assert settings["speculative-config"] == {"method": "ngram"}
    assert settings["max-model-len"] == 32768
    sglang = yaml.safe_load(emit("config", CASES["sglang-whole"], SITE))
    assert sglang["disable-radix-cache"] is True
    assert sglang["chunked-prefill-size"] == -1
    variables = emit("config", LLAMA_CPP, SITE)
    assert "LLAMA_ARG_CTX_SIZE=16384\n" in variables
    assert "LLAMA_ARG_KV_UNIFIED=0\n" in variables
    assert "OLLAMA_CONTEXT_LENGTH=4096\n" in emit("config", OLLAMA, SITE)


# -- alerts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("deployment", of_kind("alerts"))
def test_alerts(deployment: Deployment) -> None:
    [whole] = documents(emit("alerts", deployment, SITE, PROMISE))
    assert problems("prometheus", whole) == []
    [group] = whole["groups"]
    known = {name for names in NAMES[deployment.engine.name].values() for name in names}
    known |= {f"{name}_bucket" for name in TIMES.get(deployment.engine.name, {}).values()} | {"up"}
    for rule in group["rules"]:
        metrics = re.findall(r'([a-z_:]+)\{job="llm"\}', rule["expr"])
        assert metrics
        assert set(metrics) <= known


def jobs(text: str) -> list[dict[str, Any]]:
    """The scrape configurations in the comments at the head of rules."""
    head = [line.removeprefix("#").removeprefix(" ") for line in text.splitlines() if line.startswith("#")]
    blocks: list[list[str]] = []
    for line in head:
        if line == "  scrape_configs:":
            blocks.append([])
        if line.startswith("  ") and blocks:
            blocks[-1].append(line)
    return [yaml.safe_load("\n".join(block))["scrape_configs"][0] for block in blocks]


@pytest.mark.parametrize("deployment", of_kind("alerts"))
def test_a_scrape_configuration_gives_the_job_that_alerts_ask_for(deployment: Deployment) -> None:
    """Prometheus' relabelling: values of source_labels joined by ; and the regex anchored at both ends; labels of pods have _ for what
    is no letter or digit (prometheus.io docs/prometheus/latest/configuration/configuration)."""
    found = jobs(emit("alerts", deployment, SITE, PROMISE))
    for job in found:
        assert all(f'job="{job["job_name"]}"' in alert.expression for alert in alerts(deployment, SITE, PROMISE))
    kind = "kubernetes" if deployment.nodes == 1 else "lws"
    try:
        [*_, whole, service] = documents(emit(kind, deployment, SITE))
    except UsageError:
        assert len(found) == 1  # on machines alone
        return
    [rule] = found[1]["relabel_configs"]
    spec = whole["spec"]
    pods = (
        [spec["template"]]
        if kind == "kubernetes"
        else [spec["leaderWorkerTemplate"][name] for name in ("leaderTemplate", "workerTemplate")]
    )
    kept = []
    for pod in pods:
        labels = {f"__meta_kubernetes_pod_{what}_{re.sub('[^A-Za-z0-9]', '_', key)}": value
                  for what in ("label", "annotation") for key, value in pod["metadata"].get(f"{what}s", {}).items()}  # fmt: skip
        kept.append(
            re.fullmatch(rule["regex"], ";".join(labels.get(name, "") for name in rule["source_labels"])) is not None
        )
    assert kept == [True] if len(pods) == 1 else kept == [True, False]  # workers answer nobody
    # A ServiceMonitor's jobLabel is a label of the Service.
    assert service["metadata"]["labels"]["app.kubernetes.io/name"] == "llm"
    assert service["spec"]["ports"][0]["name"] == "http"


def test_targets_of_servers_side_by_side() -> None:
    found = jobs(emit("alerts", VLLM.replace(replicas=3), SITE))[0]
    assert found["static_configs"] == [{"targets": ["127.0.0.1:8001", "127.0.0.1:8002", "127.0.0.1:8003"]}]


def test_an_engine_without_metrics_is_not_scraped() -> None:
    [whole, _] = documents(emit("kubernetes", OLLAMA, SITE))
    assert "annotations" not in whole["spec"]["template"]["metadata"]


def test_pods_on_several_nodes_need_a_claim_that_several_nodes_mount() -> None:
    """kubernetes.io concepts/storage/persistent-volumes: ReadWriteOnce is mounted by a single node."""
    for kind, deployment in (("kubernetes", VLLM.replace(replicas=2)), ("lws", VLLM_NODES)):
        for text in (emit(kind, deployment, SITE), emit("runbook", deployment, SITE)):
            assert "models has to have the access mode ReadWriteMany" in text
    assert "ReadWriteMany" not in emit("kubernetes", VLLM, SITE)


@pytest.mark.parametrize("deployment", of_kind("alerts"))
def test_expressions_parse(deployment: Deployment) -> None:
    parser = pytest.importorskip("promql_parser", reason="pip install promql-parser")
    for alert in alerts(deployment, SITE, PROMISE):
        parser.parse(alert.expression)
    with pytest.raises(ValueError):  # noqa: PT011
        parser.parse("sum by (instance (up)")


def test_what_an_alert_asks() -> None:
    found = {alert.name: alert.expression for alert in alerts(VLLM, SITE, PROMISE)}
    assert found["KVCacheFull"] == 'max by (instance) (vllm:kv_cache_usage_perc{job="llm"}) > 0.95'
    assert found["Preemptions"] == 'sum by (instance) (increase(vllm:num_preemptions_total{job="llm"}[15m])) > 0'
    assert found["TTFTMissed"] == (
        'histogram_quantile(0.95, sum by (instance, le) (rate(vllm:time_to_first_token_seconds_bucket{job="llm"}[10m]))) > 2'
    )
    assert found["TPOTMissed"].endswith("> 0.05")
    assert found["PrefixCacheMisses"].endswith("< 0.25")  # half of the half that was counted on
    # Without an objective or a rate nothing is asked of them; llama.cpp has no share of its cache and no times.
    assert [alert.name for alert in alerts(VLLM, SITE, Promise())] == [
        "ServerDown",
        "KVCacheFull",
        "Preemptions",
        "RequestsWait",
    ]
    assert [alert.name for alert in alerts(LLAMA_CPP_GPU, SITE, PROMISE)] == [
        "ServerDown",
        "RequestsWait",
        "PrefixCacheMisses",
    ]
    assert "PrefixCacheMisses" not in {one.name for one in alerts(CASES["sglang-whole"], SITE, PROMISE)}
    assert (
        "sglang:num_retracted_requests_total"
        in {one.name: one for one in alerts(SGLANG, SITE, PROMISE)}["Preemptions"].expression
    )


# -- the runbook ----------------------------------------------------------------------------


def test_a_runbook_has_every_part() -> None:
    promise = PROMISE.replace(
        concurrency=64, prompt_tokens=2048, output_tokens=256, why=("It fits.",), log=("GPU KV cache size: 1",)
    )
    text = emit("runbook", VLLM, SITE, promise)
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert heads == [
        "What was chosen",
        "Before",
        "Start",
        "What its log should say",
        "Checks",
        "Alarms",
        "Back to what ran before",
    ]
    assert (
        "kvctl serve-test http://127.0.0.1:8001 --model Qwen/Qwen3-32B -i 2048 -o 256 -c 64 --slo ttft=2000ms,tpot=50ms,p95"
        in text
    )
    assert "GPU KV cache size: 1\n" in text
    assert emit("command", VLLM, SITE) in text
    assert "`kubectl port-forward service/llm 8001`" in text
    assert "`kubectl port-forward service/llm-leader 8001`" in emit("runbook", VLLM_NODES, SITE)
    for alert in alerts(VLLM, SITE, promise):
        assert f"](#{alert.name.lower()})" in text
        assert f"### {alert.name}\n" in text
        assert alert.expression in text
        assert all(f"- {line}\n" in text for line in alert.do)


def test_a_runbooks_test_asks_for_the_model_by_its_name_there() -> None:
    """Ollama, transformers and TensorRT-LLM are not told a name: theirs is the model's own, or what their list says."""
    names = {}
    for name in ("vllm-made", "ollama", "transformers", "tensorrt-llm"):
        [line] = [
            line for line in emit("runbook", CASES[name], SITE).splitlines() if line.startswith("kvctl serve-test")
        ]
        names[name] = line.partition("--model ")[2]
    assert names == {"vllm-made": "Qwen/Qwen3-32B", "ollama": "qwen3:8b",
                     "transformers": "HuggingFaceTB/SmolLM2-135M-Instruct", "tensorrt-llm": ""}  # fmt: skip


def test_a_runbook_names_only_files_that_can_be_written() -> None:
    for deployment in (*CASES.values(), VLLM.replace(replicas=9), SGLANG.replace(device=CASES["vllm-amd"].device)):
        named = set(re.findall(r"^- `--emit (\w+)`: ", emit("runbook", deployment, SITE), re.MULTILINE))
        can = set()
        for kind in ("compose", "kubernetes", "lws", "systemd", "config"):
            with contextlib.suppress(UsageError):
                can |= {kind} if emit(kind, deployment, SITE) else set()
        assert named == can


def test_a_runbook_names_the_files_beside_it() -> None:
    beside = {"command": "start.sh", "compose": "compose.yaml", "kubernetes": "kubernetes.yaml", "systemd": "llm.service",
              "config": "engine.yaml", "alerts": "alerts.yaml", "json": "plan.json"}  # fmt: skip
    text = emit("runbook", VLLM, SITE, PROMISE, beside)
    assert "--emit" not in text
    for name in beside.values():
        assert re.search(rf"[` ]{re.escape(name)}[` ]", text), name
    assert "`kubectl apply -f kubernetes.yaml`" in text
    assert "`systemctl enable --now llm`" in text
    assert "`vllm serve --config engine.yaml`" in text
    assert "kvctl serve-test http://127.0.0.1:8001 --plan plan.json" in text
    # What is not there is named by what writes it.
    some = emit("runbook", VLLM, SITE, PROMISE, {"compose": "compose.yaml"})
    assert "- `compose.yaml`: " in some
    assert "- `--emit kubernetes`: `kubectl apply -f FILE`" in some
    replicas = emit("runbook", VLLM.replace(replicas=2), SITE, PROMISE, beside)
    assert "`systemctl enable --now llm-0 llm-1`" in replicas
    assert "`systemctl restart llm-0 llm-1`" in replicas


def test_a_runbook_says_how_weights_are_made() -> None:
    assert "kvctl quantize Qwen/Qwen3-32B --weights awq -o ./Qwen3-32B-awq" in emit("runbook", CASES["vllm-made"], SITE)
    made = LLAMA_CPP.replace(made="make", model="/srv/models/x-q4_k_m.gguf", weights="q4_k_m")
    assert "llama-quantize MODEL-F16.gguf /srv/models/x-q4_k_m.gguf Q4_K_M" in emit("runbook", made, SITE)
    assert "## What its log should say" not in emit("runbook", VLLM, SITE)  # nothing was predicted
    assert "repeat the checks above" in emit("runbook", OLLAMA, SITE)


def test_a_runbooks_test_is_a_test_that_serve_test_takes(kvctl: Any) -> None:
    promise = PROMISE.replace(rate=2.5, prompt_tokens=2048, output_tokens=256)
    text = emit("runbook", VLLM, SITE, promise)
    [line] = [line for line in text.splitlines() if line.startswith("kvctl serve-test")]
    ran = kvctl(*line.split()[1:], "--dry-run")
    assert ran.code == 0, ran.err
