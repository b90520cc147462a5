"""Write the schemas that tests check emitted manifests against: tests/data/manifest_schemas.json.gz.

    python scripts/manifest_schemas.py SITE_PACKAGES

SITE_PACKAGES has kubernetes-validate 1.37.0 (Kubernetes' own OpenAPI definitions, strict: unknown keys are errors) and
check-jsonschema 0.39.0 (compose-spec.json of github.com/compose-spec/compose-spec). Kept is what Deployment, Service,
ConfigMap and pod templates reach, without descriptions. LeaderWorkerSet and Prometheus' rules are written out below.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "tests/data/manifest_schemas.json.gz"
KUBERNETES = "kubernetes_validate/kubernetes-json-schema/v1.37.0-local-strict/_definitions.json"
COMPOSE = "check_jsonschema/builtin_schemas/vendor/compose-spec.json"
KINDS = {"Deployment": "io.k8s.api.apps.v1.Deployment", "Service": "io.k8s.api.core.v1.Service",
         "ConfigMap": "io.k8s.api.core.v1.ConfigMap", "PodTemplate": "io.k8s.api.core.v1.PodTemplateSpec"}  # fmt: skip

_NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
# github.com/kubernetes-sigs/lws api/leaderworkerset/v1/leaderworkerset_types.go, commit 024af08: every field and enum of the
# spec; pod templates are Kubernetes' own.
LEADER_WORKER_SET: dict[str, Any] = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "metadata": {"type": "object", "required": ["name"], "properties": {"name": _NAME}},
        "spec": {
            "type": "object",
            "required": ["leaderWorkerTemplate"],
            "additionalProperties": False,
            "properties": {
                "replicas": {"type": "integer", "minimum": 0},
                "leaderWorkerTemplate": {
                    "type": "object",
                    "required": ["workerTemplate"],
                    "additionalProperties": False,
                    "properties": {
                        "leaderTemplate": {"$ref": "#/$defs/io.k8s.api.core.v1.PodTemplateSpec"},
                        "workerTemplate": {"$ref": "#/$defs/io.k8s.api.core.v1.PodTemplateSpec"},
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {
                            "enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
                        },
                        "subGroupPolicy": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {
                                "subGroupPolicyType": {"enum": ["LeaderWorker", "LeaderExcluded"]},
                                "subGroupSize": {"type": "integer"},
                            },
                        },
                        "volumeClaimTemplates": {"type": "array"},
                        "persistentVolumeClaimRetentionPolicy": {"type": "object"},
                    },
                },
                "rolloutStrategy": {
                    "type": "object",
                    "required": ["type"],
                    "additionalProperties": False,
                    "properties": {
                        "type": {"enum": ["RollingUpdate"]},
                        "rollingUpdateConfiguration": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {
                                "partition": {"type": "integer"},
                                "maxUnavailable": {"type": ["integer", "string"]},
                                "maxSurge": {"type": ["integer", "string"]},
                            },
                        },
                    },
                },
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "networkConfig": {
                    "type": "object",
                    "required": ["subdomainPolicy"],
                    "additionalProperties": False,
                    "properties": {"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}},
                },
            },
        },
    },
}
# prometheus.io docs/prometheus/latest/configuration/{recording_rules,alerting_rules}: model/rulefmt's RuleGroups, which
# refuses unknown keys.
_DURATION = {"type": "string", "pattern": "^((([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?|0)$"}  # fmt: skip
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}, "propertyNames": {"pattern": "^[a-zA-Z_][a-zA-Z0-9_]*$"}}  # fmt: skip
PROMETHEUS: dict[str, Any] = {
    "type": "object",
    "required": ["groups"],
    "additionalProperties": False,
    "properties": {
        "groups": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "rules"],
                "additionalProperties": False,
                "properties": {
                    "name": {"type": "string", "minLength": 1},
                    "interval": _DURATION,
                    "query_offset": _DURATION,
                    "limit": {"type": "integer"},
                    "labels": _TEXTS,
                    "rules": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["alert", "expr"],
                            "additionalProperties": False,
                            "properties": {
                                "alert": {"type": "string", "minLength": 1},
                                "expr": {"type": "string", "minLength": 1},
                                "for": _DURATION,
                                "keep_firing_for": _DURATION,
                                "labels": _TEXTS,
                                "annotations": _TEXTS,
                            },
                        },
                    },
                },
            },
        }
    },
}


def bare(value: Any) -> Any:
    """A schema without descriptions, its references within one file."""
    if isinstance(value, dict):
        kept = {key: bare(inner) for key, inner in value.items() if key != "description" or not isinstance(inner, str)}
        if isinstance(kept.get("$ref"), str):
            kept["$ref"] = "#/$defs/" + kept["$ref"].rpartition("/")[2]
        return kept
    return [bare(item) for item in value] if isinstance(value, list) else value


def names(value: Any) -> set[str]:
    """Definitions that a schema names."""
    if isinstance(value, dict):
        own = {value["$ref"].rpartition("/")[2]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(names, value.values()))
    return set().union(*map(names, value)) if isinstance(value, list) else set()


def main() -> None:
    packages = Path(sys.argv[1])
    every = json.loads((packages / KUBERNETES).read_text("utf-8"))["$defs"]
    kept: dict[str, Any] = {}
    queue = list(KINDS.values())
    while queue:
        name = queue.pop()
        if name not in kept:
            kept[name] = bare(every[name])
            queue += names(kept[name])
    compose = json.loads((packages / COMPOSE).read_text("utf-8"))
    data = {
        "kubernetes": {"kinds": KINDS, "$defs": dict(sorted(kept.items()))},
        "compose": bare(compose),
        "leader_worker_set": LEADER_WORKER_SET,
        "prometheus": PROMETHEUS,
    }
    text = json.dumps(data, separators=(",", ":"))
    OUT.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
