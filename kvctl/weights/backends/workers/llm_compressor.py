"""FP8, INT8, NVFP4 and MXFP4 by llm-compressor, in the process that main.py is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_SCHEMES = {"fp8": "FP8_DYNAMIC", "fp8-static": "FP8", "int8-w8a8": "INT8", "nvfp4": "NVFP4", "mxfp4": "MXFP4"}
_CALIBRATED = ("fp8-static", "nvfp4")


def run(request: dict[str, Any], tell: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Quantize request["source"] on token ids request["ids"] into folder request["out"]."""
    tell("load", 0, 1)
    import torch
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    torch.manual_seed(request["seed"])
    model = AutoModelForCausalLM.from_pretrained(request["source"], dtype="auto", trust_remote_code=False)
    tell("load", 1, 1)
    wanted = set(request["linear"])
    beside = [
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and name not in wanted
    ]
    recipe = QuantizationModifier(targets="Linear", scheme=_SCHEMES[request["format"]], ignore=beside)
    more: dict[str, Any] = {}
    if request["format"] in _CALIBRATED:
        ids = torch.tensor(request["ids"])
        batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(request["batch"])]
        done = [0]

        def count(*_: Any) -> None:
            tell("sample", min(done[0], len(batches)), len(batches))
            done[0] += 1

        model.register_forward_pre_hook(count)
        more = {
            "dataset": DataLoader(batches, batch_size=None),
            "pipeline": "basic",
            "num_calibration_samples": len(ids),
        }
    oneshot(model=model, recipe=recipe, **more)
    tell("save", 0, 1)
    model.save_pretrained(request["out"], save_compressed=True)
    tell("save", 1, 1)
    return {"device": "cuda" if torch.cuda.is_available() else "cpu"}
