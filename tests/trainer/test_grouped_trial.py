"""Grouped products of experts are tried before the first step: runs whose torch multiplies wrongly go by the loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.reader.runs.own_run import read_own
from hpc_gpt.trainer.engines.grouped_trial import _narrowed, difference
from hpc_gpt.trainer.tokens.build import build_tokens
from tests.trainer.launch import Launch, figures, new_run, settings, train

MIXTURE: dict[str, Any] = {"mlp": "swiglu", "norm": "rmsnorm", "positions": "rope", "bias": "none", "experts": 8,
                           "experts_per_token": 2, "expert_ffn": 32}  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[RunFolder, Launch]]:
    """Trains three steps on two ranks, of which the second may multiply wrongly."""
    folder = tmp_path_factory.mktemp("grouped")
    (folder / "text.txt").write_text("some words of a text. " * 200)
    build_tokens(folder / "text.txt", folder / "text.tokens")
    resolved = settings(folder / "text.tokens", {"tp": 1, "pp": 1, "dp": 2}, Engine("ddp"), MIXTURE, steps=3)
    done: dict[str, tuple[RunFolder, Launch]] = {}

    def run(how: str = "") -> tuple[RunFolder, Launch]:
        if how not in done:
            run = new_run(tmp_path_factory.mktemp("run"), resolved)
            done[how] = (run, train(run, 2, **({"WRONG_PRODUCTS_ON": f"1 {how}"} if how else {})))
            assert done[how][1].ended == ("done", 3, False), done[how][1].log
        return done[how]

    return run


SHOWN = {
    "empty": "the gradient of the weights of an empty group differs by 3, and its largest number is 0",
    "one row": "the product of a group of one row differs by",
    "raise": "it raises RuntimeError: no kernel image for this device",
}


@pytest.mark.parametrize("how", ["empty", *(pytest.param(how, marks=pytest.mark.long) for how in ("one row", "raise"))])
def test_wrong_products_on_one_rank_send_all_to_the_loop(how: str, trained: Any) -> None:
    sound, launch = trained()
    assert "one by one" not in launch.log
    assert not [flag for flag in read_own(sound).record.flags if "one by one" in flag]
    run, launch = trained(how)
    assert figures(run) == figures(sound)
    [note] = [line for line in launch.log.splitlines() if "one by one" in line]
    assert note.startswith("note: experts are multiplied one by one, which is slower: torch's grouped products are not")
    assert f"on rank 1, cpu, torch {torch.__version__}, torch.float32, {SHOWN[how]}" in note
    assert [flag for flag in read_own(run).record.flags if SHOWN[how] in flag]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sound_products_differ_in_nothing(dtype: torch.dtype) -> None:
    assert difference(CPU, dtype, 48, 64) == ""
    outputs, inputs = _narrowed(CPU, dtype, 6144, 4096)
    assert 1 << 12 < outputs * inputs <= 1 << 14
    assert outputs % 64 == inputs % 64 == 0


def test_memory_that_is_not_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = F.grouped_mm

    def unwritten(rows: Any, weight: Any, *, offs: Any) -> Any:
        product = right(rows, weight, offs=offs)
        return torch.cat([product[:-1], torch.full_like(product[-1:], torch.nan)])

    monkeypatch.setattr(F, "grouped_mm", unwritten)
    assert "the product of a group of 129 rows differs by nan" in difference(CPU, torch.float32, 48, 64)
