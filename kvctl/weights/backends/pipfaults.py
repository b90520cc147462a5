"""What goes wrong when pip installs, in plain lines."""

from __future__ import annotations

import contextlib
import re

from kvctl.errors import KvctlError
from kvctl.sources import jsonfile
from kvctl.weights.backends.children import Log

_OFFLINE = re.compile(
    r"NewConnectionError|NameResolutionError|Name or service not known|name resolution|Network is unreachable|Connection refused|"
    r"ConnectTimeout|Connection timed out|Max retries exceeded|ProxyError|No route to host|nodename nor servname", re.I
)  # fmt: skip
_HASHES = re.compile(r"DO NOT MATCH THE HASHES.*?\n\s*(\S+==\S+|\S+)", re.S)
_MISSING = re.compile(r"No matching distribution found for (\S+)")
_BUILD = re.compile(r"(?:Failed to build|Failed building wheel for|Could not build wheels for) '?([\w.-]+)")
_ELSEWHERE = "on a machine with network: pip download --require-hashes -r {}; here PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER"


def explain(name: str, log: Log) -> KvctlError:
    """Why pip failed, by what it said."""
    text = ""
    with contextlib.suppress(OSError):
        text = log.path.read_text(encoding="utf-8", errors="replace")
    hint = f"pip's log: {jsonfile.plain(str(log.path))}"
    if "No space left on device" in text:
        return KvctlError(f"cannot install {name}: no space left on the disk", hint="KVCTL_CACHE names another folder")
    if found := _HASHES.search(text):
        return KvctlError(f"cannot install {name}: {jsonfile.plain(found[1])[:80]} is not the file that kvctl's list names",
                          hint="the index, or what lies between, serves another one: do not trust it; " + hint)  # fmt: skip
    if _OFFLINE.search(text):
        return KvctlError(f"cannot install {name}: pip reaches no package index",
                          hint=_ELSEWHERE.format(f"{name}.txt") + "; proxies and mirrors are pip's settings; " + hint)  # fmt: skip
    if found := _MISSING.search(text):
        what = jsonfile.plain(found[1])[:80]
        more = "torch's CPU builds have an index of their own: PIP_EXTRA_INDEX_URL, or take the cuda build; "
        return KvctlError(
            f"cannot install {name}: pip finds no {what}",
            hint=(more if "+cpu" in what else "no index that it reaches has it; ") + hint,
        )
    if found := _BUILD.search(text):
        return KvctlError(f"cannot install {name}: {jsonfile.plain(found[1])[:80]} does not build", hint=hint)
    errors = [line for line in text.splitlines() if line.startswith("ERROR:")]
    last = jsonfile.plain(errors[-1].removeprefix("ERROR:").strip())[:200] if errors else log.last_line()
    return KvctlError(f"cannot install {name}: {last or 'pip failed'}", hint=hint)
