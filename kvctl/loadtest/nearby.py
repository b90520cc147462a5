"""Servers on this machine, where engines listen unless they are told otherwise."""

from __future__ import annotations

import socket

from kvctl.errors import KvctlError
from kvctl.loadtest import target
from kvctl.record import Record

PLACES = ((8000, "vLLM, transformers"), (30000, "SGLang"), (8080, "llama.cpp"), (11434, "Ollama"), (1234, "LM Studio"))
"""Ports of 127.0.0.1, and whose they are by default."""
_SECONDS = 0.5


class Nearby(Record):
    """A server that answers."""

    place: target.Place
    models: tuple[str, ...]
    """Empty where it does not say without a key."""


def find() -> list[Nearby]:
    """Those that speak the protocol: /v1/models lists models, or wants a key."""
    out = []
    for port, _ in PLACES:
        place = target.Place(False, "127.0.0.1", port, "")
        try:
            with socket.create_connection((place.name, port), timeout=_SECONDS):
                pass
            client = target.Client(place, target.Trust(), {})
        except OSError:
            continue
        try:
            found = client.get("/v1/models")
        except KvctlError:
            continue
        finally:
            client.close()
        if found is not None and found.status_code in (401, 403):
            out.append(Nearby(place, ()))
        elif found is not None and target.lists_models(found):
            out.append(Nearby(place, tuple(str(entry["id"]) for entry in target.entries(found))))
    return out
