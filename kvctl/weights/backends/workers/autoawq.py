"""AWQ by AutoAWQ, in the process that main.py is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def run(request: dict[str, Any], tell: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Quantize request["source"] on token ids request["ids"] into folder request["out"]."""
    tell("load", 0, 1)
    import torch
    from awq import AutoAWQForCausalLM
    from awq.quantize import quantizer

    torch.manual_seed(request["seed"])

    def counted(layers: Iterable[Any], **_: Any) -> Iterator[Any]:
        every = list(layers)
        for number, one in enumerate(every):
            tell("layer", number, len(every))
            yield one
        tell("layer", len(every), len(every))

    class Restored(quantizer.AwqQuantizer):  # type: ignore[misc]
        """Its search keeps the weights with .cpu(), which on a CPU is no copy: every try would scale them once more, and
        what comes out is far worse than rounding to nearest (llm-awq issue 28 has such figures)."""

        def _compute_best_scale(
            self, x: Any, w_mean: Any, x_mean: Any, module2inspect: Any, *rest: Any, **more: Any
        ) -> Any:
            own = module2inspect.state_dict
            module2inspect.state_dict = lambda: {name: tensor.clone() for name, tensor in own().items()}
            try:
                return super()._compute_best_scale(x, w_mean, x_mean, module2inspect, *rest, **more)
            finally:
                del module2inspect.state_dict

    quantizer.tqdm = counted
    # Everything at once on a GPU; on a CPU float16 has no fast loops, and its sums would be rougher than the search's.
    cuda = torch.cuda.is_available()
    model = AutoAWQForCausalLM.from_pretrained(
        request["source"], torch_dtype=torch.float16 if cuda else torch.float32, use_cache=False, safetensors=True,
        device_map=None, trust_remote_code=False, low_cpu_mem_usage=True,
    )  # fmt: skip
    tell("load", 1, 1)
    ids = request["ids"]
    model.quantize(
        None,
        quant_config={"zero_point": True, "q_group_size": request["group"], "w_bit": 4, "version": "GEMM"},
        calib_data=ids, max_calib_samples=len(ids), max_calib_seq_len=len(ids[0]),
        n_parallel_calib_samples=request["batch"], quantizer_cls=Restored,
    )  # fmt: skip
    tell("save", 0, 1)
    if not cuda:
        model.model.to(torch.float16)  # codes are integers, and stay
    model.save_quantized(request["out"], safetensors=True)
    tell("save", 1, 1)
    return {"device": "cuda" if cuda else "cpu"}
