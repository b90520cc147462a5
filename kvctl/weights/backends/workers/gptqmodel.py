"""AWQ and GPTQ by GPTQModel, in the process that main.py is."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def run(request: dict[str, Any], tell: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Quantize request["source"] on token ids request["ids"] into folder request["out"]."""
    tell("load", 0, 1)
    # Its pool of threads refuses machines with two cores, where it takes one and then wants two.
    if (os.cpu_count() or 1) <= 2:
        os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    import torch
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.quantization import FORMAT, METHOD, QuantizeConfig

    torch.manual_seed(request["seed"])
    cuda = torch.cuda.is_available()
    awq = request["format"] == "awq"
    options = {"bits": 4, "group_size": request["group"], "device": "cuda" if cuda else "cpu"}
    if awq:
        options |= {"quant_method": METHOD.AWQ, "format": FORMAT.GEMM, "sym": False}
    else:
        options |= {"quant_method": METHOD.GPTQ, "format": FORMAT.GPTQ, "sym": True, "desc_act": False}
    model = GPTQModel.load(request["source"], QuantizeConfig(**options), trust_remote_code=False)
    tell("load", 1, 1)
    _count(model, tell)
    samples = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in request["ids"]]
    backend = {} if cuda else {"backend": BACKEND.AWQ_TORCH if awq else BACKEND.GPTQ_TORCH}
    model.quantize(samples, batch_size=request["batch"], **backend)
    tell("save", 0, 1)
    model.save(request["out"])
    tell("save", 1, 1)
    return {"device": "cuda" if cuda else "cpu"}


def _count(model: Any, tell: Callable[[str, int, int], None]) -> None:
    """Layers are told as their first linear module is run: the library has no hook of its own for it."""
    layers = model.model.model.layers
    seen = [-1]

    def hook(index: int) -> Callable[..., None]:
        def heard(*_: Any) -> None:
            if index > seen[0]:
                seen[0] = index
                tell("layer", index, len(layers))

        return heard

    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(hook(index))
