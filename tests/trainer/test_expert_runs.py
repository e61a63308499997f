"""Runs whose ranks divide the experts (ep): branched, also to another ep, exported, and begun again from that."""

from pathlib import Path

import pytest
import torch

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.trainer.export import export_hf
from tests.trainer.launch import figures, lines, new_run, settings
from tests.trainer.test_branches import branched, trained, weights

pytestmark = pytest.mark.xdist_group("train-experts")

# Of Mixtral's class.
SHAPE = {"experts": 4, "experts_per_token": 2, "expert_ffn": 32, "kv_heads": 2, "mlp": "swiglu", "norm": "rmsnorm",
         "norm_topk": True, "positions": "rope", "bias": "none", "tied": False}  # fmt: skip
EP2, ALONE = {"tp": 1, "pp": 1, "dp": 2, "ep": 2}, {"tp": 1, "pp": 1, "dp": 1, "micro_batches": 4}
WSD = {"decay": "wsd", "decay_steps": 2, "warmup_steps": 1, "min_lr": 1e-4, "save_every": 3}


@pytest.mark.parametrize(("name", "other"), [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_a_run_at_ep_branches_and_goes_out_and_in(tmp_path: Path, tokens: Path, name: str, other: str) -> None:
    transformers = pytest.importorskip("transformers")
    long, short = (
        trained(new_run(tmp_path, settings(tokens, EP2, Engine(name), SHAPE, steps=steps, **WSD)), 2)
        for steps in (8, 6)
    )
    assert figures(long)[4:6] != figures(short)[4:]
    again = trained(branched(long, 3, 6), 2)
    assert again.resolved().layout.ep == 2
    assert figures(again) == figures(short)[3:]
    for (key, weight), (_, expected) in zip(weights(again), weights(short), strict=True):
        assert torch.equal(weight, expected), key
    at_ep1 = trained(branched(long, 3, 6, layout__ep=1), 2)
    assert [one["loss"] for one in lines(at_ep1)] == pytest.approx([one["loss"] for one in lines(again)], abs=2e-6)

    folder = tmp_path / "out"
    assert export_hf(again, folder).step == 6
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.config.model_type == "mixtral"
    assert theirs.num_parameters() == again.resolved().model.params
    first = []
    for engine, layout in ((name, ALONE), (other, EP2)):
        resolved = settings(tokens, layout, Engine(engine), SHAPE, steps=2, init=str(folder))
        first.append([one["loss"] for one in lines(trained(new_run(tmp_path, resolved), layout["dp"]))])
    assert first[1] == pytest.approx(first[0], abs=2e-6)
    assert first[0][0] < figures(long)[0][1]  # it has learnt
