"""Texts that people and programs read: YAML, and words of a shell."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

from kvctl.recommend.emit.nodes import HEAD
from kvctl.units import plural

if TYPE_CHECKING:
    from kvctl.recommend.deployment import Deployment

_VARIABLE = re.compile(rf"[\w.:/,=@%+-]*\$(?:{HEAD}|\{{{HEAD}(?::\?)?\}})[\w.:/,=@%+-]*")
"""A word with the one variable that is meant to be one; a $ in any other stands for itself."""


def document(*values: Any, comment: str = "") -> str:
    """Mappings as YAML documents, in the order that they have; `comment` lines come first."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Texts of several lines as they are, lists set in below their key, nothing by reference."""

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> Any:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    parts = [
        yaml.dump(value, Dumper=Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=1000)
        for value in values
    ]
    return comments(comment) + "---\n".join(parts)


def comments(text: str) -> str:
    """Lines as comments of YAML, of a shell, of a unit."""
    return "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())


def shell(word: str) -> str:
    """A word for a shell; the first node's address stays a variable."""
    return f'"{word}"' if _VARIABLE.fullmatch(word) else shlex.quote(word)


def title(deployment: Deployment) -> str:
    """One line of what it is: "Qwen/Qwen3-32B in fp8, vllm 0.33, 2 × NVIDIA H100 80GB HBM3"."""
    count = deployment.gpus
    where = deployment.device.name if count <= 1 else f"{count} × {deployment.device.name}"
    parts = [f"{deployment.base} in {deployment.weights}", f"{deployment.engine.name} {deployment.engine.version}",
             where if count or deployment.device.kind == "cpu" else f"the CPU beside {where}"]  # fmt: skip
    if deployment.nodes > 1:
        parts.append(f"on each of {plural(deployment.nodes, 'node')}")
    if deployment.replicas > 1:
        parts.append(f"one of {plural(deployment.replicas, 'server')} side by side")
    return ", ".join(parts)
