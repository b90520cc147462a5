"""Emptying a server's prefix cache before a load, so that loads do not depend on those before them (pegainfer#697)."""

from __future__ import annotations

import time
from collections.abc import Mapping

from kvctl.errors import KvctlError
from kvctl.loadtest.target import Client, Server

_PATHS: Mapping[str, str] = {
    "vllm": "/reset_prefix_cache",
    "sglang": "/flush_cache",
    "llama.cpp": "/slots/{}?action=erase",
}
_HINTS: Mapping[str, str] = {
    "vllm": "start it with VLLM_SERVER_DEV_MODE=1 in its environment",
    "sglang": "is it at work for others?",
    "llama.cpp": "start it with --slot-save-path FOLDER, or with --no-cache-prompt",
}
"""vllm/entrypoints/serve/dev/cache/api_router.py, sglang's http_server.py, llama.cpp's tools/server/README.md."""
_TRIES, _PAUSE = 30, 0.1
"""SGLang says 400 while a request is at work, and the last one is so for some steps after its answer."""


def reset(client: Client, server: Server) -> None:
    """Have the server forget what it keeps of prompts.

    Raises:
        KvctlError: it cannot, or does not.

    """
    path = _PATHS.get(server.engine)
    if path is None:
        raise KvctlError(f"--reset-cache: an engine that is {server.engine} has no way for that", hint="leave it out: no two prompts begin alike")  # fmt: skip
    for slot in range(server.slots or 1) if "{}" in path else (0,):
        answer = client.post(path.format(slot), {})
        for _ in range(_TRIES):
            if answer is None or answer.status_code != 400 or server.engine != "sglang":
                break
            time.sleep(_PAUSE)
            answer = client.post(path.format(slot), {})
        if answer is None or answer.status_code != 200:
            said = "" if answer is None else f": {answer.status_code} {' '.join(answer.text.split())[:200]}"
            raise KvctlError(f"--reset-cache: the server does not empty its cache{said}", hint=_HINTS[server.engine])
