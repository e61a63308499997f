"""Compares our model of train.init with transformers': `python -m hpc_gpt.trainer.compare_init < resolved.json`.

`hpc-gpt doctor` starts it. Both compute the logits of 64 tokens in fp32 on the CPU, at positions spread over
`model.seq`: a rotation that is scaled wrongly shows at the far ones alone. Prints `level`, `words` and `hint` as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpc_gpt.core.errors import UserError
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.weights.folder import read_folder
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.initial_weights import GivenWeights
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel

TOKENS = 64
LIMIT = 1e-4  # of the largest number compared


def compare_logits(resolved: Resolved) -> dict[str, str]:
    """The result of the comparison. Raises UserError for a folder that cannot be read."""
    from transformers import AutoModelForCausalLM

    shape, folder = resolved.model, Path(str(resolved.train.init))
    given = GivenWeights(read_folder(folder), shape)
    count = min(TOKENS, shape.seq)
    positions = torch.linspace(0, shape.seq - 1, count).round().long()
    tokens = torch.randint(0, shape.vocab, (1, count), generator=torch.Generator().manual_seed(1))
    model = Gpt(shape, 1, TensorParallel(given=given))
    place_at(model, positions)
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    body = theirs.base_model
    pairs = list(zip(model.blocks, body.h if hasattr(body, "h") else body.layers, strict=True))
    outputs: dict[tuple[int, bool], Tensor] = {}
    for number, (own, other) in enumerate(pairs):
        _keep(own, outputs, (number, True))
        _keep(other, outputs, (number, False))
    with torch.no_grad():
        ours = model.logits(tokens)[..., : shape.vocab]
        # Without a mask transformers takes jumps of the positions for the beginnings of other texts.
        expected = theirs(tokens, position_ids=positions[None], attention_mask=torch.ones_like(tokens)).logits
    far = distance(ours, expected)
    if far <= LIMIT:
        message = f"logits of {count} tokens over {shape.seq} positions are transformers' to {far:.1g} of their scale"
        return {"level": "ok", "words": message, "hint": ""}
    layers = (n for n in range(len(pairs)) if distance(outputs[n, True], outputs[n, False]) > LIMIT)
    first = next(layers, None)
    where = "after the layers" if first is None else f"first in layer {first}"
    message = f"logits differ from transformers' by {far:.1g} of their scale, {where}"
    return {"level": "fail", "words": message, "hint": "do not train from it; is config.json that of these weights?"}


def place_at(model: Gpt, positions: Tensor) -> None:
    """Makes the model take its first inputs as those at the given positions."""
    if model.position is not None:
        with torch.no_grad():
            model.position.weight[: len(positions)] = model.position.weight[positions]
    blocks: Any = model.blocks
    for block in blocks:
        if block.attention.rotation is not None:
            block.attention.rotation = block.attention.rotation.at(positions)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference over the largest number; inf for NaN."""
    far = float((ours - theirs).abs().max() / theirs.abs().max())
    return far if far == far else float("inf")


def _keep(layer: nn.Module, outputs: dict[tuple[int, bool], Tensor], key: tuple[int, bool]) -> None:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs[key] = output[0] if isinstance(output, tuple) else output

    layer.register_forward_hook(hook)


def main() -> int:
    try:
        found = compare_logits(Resolved.from_json(sys.stdin.read()))
    except UserError as fault:
        found = {"level": "fail", "words": " ".join(str(fault).split()), "hint": fault.hint}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
