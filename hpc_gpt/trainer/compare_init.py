"""Compares our model with transformers' own, both with the weights of train.init.

`hpc-gpt doctor` starts `python -m hpc_gpt.trainer.compare_init < resolved.json`. Both compute the logits of 64 tokens
in fp32 on the CPU, at positions spread over `model.seq`: a wrongly scaled rotation shows only at far positions. If some
layers have a window, the first layers, up to one of each kind, also get 64 tokens more than the window has. Prints
`level`, `words` and `hint` as JSON.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hpc_gpt.core.errors import UserError
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.weights.folder import read_folder
from hpc_gpt.trainer.model.attention import Rotation
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.initial_weights import FolderWeights
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel

TOKENS = 64
LIMIT = 1e-4  # of the largest number compared
MOST_FLIPS = 0.01  # the largest share of routing decisions that may differ; in fp32 about 1 in 10,000 does
HINT = "do not train from it; does config.json belong to these weights?"


def compare_logits(resolved: Resolved) -> dict[str, str]:
    """Compares the logits; returns `level`, `words` and `hint`. Raises UserError for a folder that cannot be read."""
    from transformers import AutoModelForCausalLM

    shape, folder = resolved.model, Path(str(resolved.train.init))
    weights = FolderWeights(read_folder(folder), shape)
    model = Gpt(shape, 1, TensorParallel(given=weights))
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    blocks: Any = model.blocks
    rotations = [block.attention.rotation for block in blocks]
    found = _compare(model, theirs, rotations, min(TOKENS, shape.seq))
    if found["level"] == "ok" and shape.window is not None:
        first = 1 + max(shape.letters.find("S"), shape.letters.find("L"))
        model.blocks = blocks[:first]
        body = theirs.base_model
        body.layers, body.config.num_hidden_layers = body.layers[:first], first
        count, where = min(shape.window + TOKENS, shape.seq), f"beyond the window of {shape.window:,}, "
        beyond = _compare(model, theirs, rotations, count, where)
        if beyond["level"] != "ok":
            return beyond
        found["words"] += f"; those of layers 0 to {first - 1} also beyond the window of {shape.window:,}"
    return found


def _compare(
    model: Gpt, theirs: Any, rotations: Sequence[Rotation | None], count: int, where: str = ""
) -> dict[str, str]:
    """Compares the logits of `count` tokens, spread over the positions; with `where`, which begins a line on a
    difference, only the outputs of the layers. `rotations`: our layers' of all positions."""
    shape, body = model.shape, theirs.base_model
    positions = torch.linspace(0, shape.seq - 1, count).round().long()
    tokens = torch.randint(0, shape.vocab, (1, count), generator=torch.Generator().manual_seed(1))
    place_at(model, rotations, positions)
    pairs = list(zip(model.blocks, body.h if hasattr(body, "h") else body.layers, strict=True))
    outputs: dict[tuple[int, bool], Tensor] = {}
    chosen: dict[tuple[int, bool], Tensor] = {}
    hooks = []
    for number, (our_layer, their_layer) in enumerate(pairs):
        hooks += [_keep_output(our_layer, outputs, (number, True), follow=shape.is_mixture)]
        hooks += [_keep_output(their_layer, outputs, (number, False))]
        if (router := getattr(our_layer, "router", None)) is not None:
            hooks += [_keep_choice(router, chosen, (number, True))]
            hooks += [_keep_choice(their_layer.mlp.gate, chosen, (number, False))]
    with torch.no_grad():
        # Without a mask transformers takes a jump in the positions for the beginning of another text.
        placed = {"position_ids": positions[None], "attention_mask": torch.ones_like(tokens)}
        ends = []
        if where:
            body(tokens, **placed)
            model.hidden(tokens)
        else:
            ends = [theirs(tokens, **placed).logits, model.logits(tokens)[..., : shape.vocab]]
    for hook in hooks:
        hook.remove()
    # Of experts with equal scores rounding chooses; such a token says nothing about the weights.
    flipped = {number: (chosen[number, True] != chosen[number, False]).any(-1) for number, is_ours in chosen if is_ours}
    flips, decisions = sum(int(one.sum()) for one in flipped.values()), count * len(flipped)
    for number, tokens_flipped in flipped.items():
        outputs[number, True][:, tokens_flipped] = outputs[number, False][:, tokens_flipped]
    if flips > max(1, MOST_FLIPS * decisions):
        message = f"{where}routers choose other experts than transformers' in {flips} of {decisions} decisions"
        return {"level": "fail", "words": message, "hint": HINT}
    # In a mixture each layer has begun from transformers' output.
    layers = range(len(pairs)) if shape.is_mixture or where else ()
    apart = [distance(outputs[n, True], outputs[n, False]) for n in layers]
    far = max([*([distance(ends[1], ends[0])] if ends else []), *apart])
    if far <= LIMIT:
        message = f"logits of {count} tokens over {shape.seq} positions equal transformers' to {far:.1g} of their scale"
        if flips:
            message += (
                f"; {flips} of {decisions} routing decisions fell otherwise, between scores that rounding decides"
            )
        return {"level": "ok", "words": message, "hint": ""}
    first = next((n for n in range(len(pairs)) if distance(outputs[n, True], outputs[n, False]) > LIMIT), None)
    layer = "after the layers" if first is None else f"first in layer {first}"
    what = "outputs of layers" if where else "logits"
    message = f"{where}{what} differ from transformers' by {far:.1g} of their scale, {layer}"
    return {"level": "fail", "words": message, "hint": HINT}


def place_at(model: Gpt, rotations: Sequence[Rotation | None], positions: Tensor) -> None:
    """Makes the model treat its first inputs as the tokens at `positions`. Learned positions are placed once."""
    if model.position is not None:
        with torch.no_grad():
            model.position.weight[: len(positions)] = model.position.weight[positions]
    blocks: Any = model.blocks
    for block, rotation in zip(blocks, rotations, strict=False):
        block.attention.rotation = None if rotation is None else rotation.at(positions)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference divided by the largest of `theirs`; inf for NaN."""
    far = float((ours - theirs).abs().max() / theirs.abs().max())
    return far if far == far else float("inf")


def _keep_output(
    layer: nn.Module, outputs: dict[tuple[int, bool], Tensor], key: tuple[int, bool], follow: bool = False
) -> RemovableHandle:
    """Records the layer's output. With `follow` the next layer gets transformers' instead: a routing decision that
    rounding turns would change all that follows."""

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        outputs[key] = output[0] if isinstance(output, tuple) else output
        return outputs[key[0], False] if follow else None

    return layer.register_forward_hook(hook)


def _keep_choice(router: nn.Module, chosen: dict[tuple[int, bool], Tensor], key: tuple[int, bool]) -> RemovableHandle:
    """Records the numbers of the experts of each token, sorted: [tokens, experts per token]."""

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        chosen[key] = output[-1].flatten(0, -2).sort(-1).values

    return router.register_forward_hook(hook)


def main() -> int:
    try:
        result = compare_logits(Resolved.from_json(sys.stdin.read()))
    except UserError as fault:
        result = {"level": "fail", "words": " ".join(str(fault).split()), "hint": fault.hint}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
