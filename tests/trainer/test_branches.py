"""Runs that branch from a checkpoint of another run: to the last digit what an unbroken run is, or other data."""

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_gpt.core.checkpoints.find_checkpoints import list_complete
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.launcher.branching import Way, prepare_new_run
from hpc_gpt.launcher.request import Request
from hpc_gpt.launcher.submission import write_run
from hpc_gpt.launcher.until import Until
from hpc_gpt.trainer.engines.protocol import read_weights
from hpc_gpt.trainer.export import export_hf
from hpc_gpt.trainer.tokens.build import build_tokens
from tests.trainer.launch import Launch, figures, lines, new_run, settings, train
from tests.trainer.test_saves import sums

pytestmark = pytest.mark.xdist_group("train-branches")

WSD = {"decay": "wsd", "decay_steps": 4, "warmup_steps": 2, "min_lr": 1e-4, "lr": 1e-2}
ENGINES = {
    "ddp": (Engine(name="ddp"), {"tp": 1, "pp": 1, "dp": 1}),
    "deepspeed-3d": (Engine(), {"tp": 2, "pp": 2, "dp": 1}),
    "fsdp": (Engine(name="fsdp"), {"tp": 1, "pp": 1, "dp": 2}),
    "ddp, sharded": (Engine(name="ddp", sharded_optimizer=True), {"tp": 1, "pp": 1, "dp": 2}),
    "ZeRO-3": (Engine(name="deepspeed-zero", zero_stage=3), {"tp": 1, "pp": 1, "dp": 2}),
}
ALONE = {"tp": 1, "pp": 1, "dp": 1}
DDP = Engine(name="ddp")


def branched(run: RunFolder, step: int | None, steps: int, **changes: Any) -> RunFolder:
    """The folder of a branch that is to train up to `steps`, beside its parent's."""
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    request = Request("", None, None, {}, given=keys, until=Until(steps=steps))
    branch = prepare_new_run(run, request, Way.BRANCH, step)
    return write_run(branch.prepared, run.path.parent.parent, {}, parent=branch.parent)


def trained(run: RunFolder, ranks: int = 1) -> RunFolder:
    launch = train(run, ranks)
    assert launch.ended == ("done", run.resolved().train.steps, False), launch.log
    return run


def weights(run: RunFolder) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a run's newest checkpoint."""
    resolved = run.resolved()
    yield from read_weights(list_complete(run.checkpoints)[0], resolved)


@pytest.mark.long(but="first")
@pytest.mark.parametrize("name", ["ddp", "deepspeed-3d", "fsdp"])
def test_20_steps_branched_at_8_are_12_to_the_last_digit(tmp_path, tokens, name):
    engine, layout = ENGINES[name]
    ranks = layout["tp"] * layout["pp"] * layout["dp"]
    more = {"eval_every": 5, "save_every": 4, **WSD}
    long = trained(new_run(tmp_path, settings(tokens, layout, engine, steps=20, **more)), ranks)
    short = trained(new_run(tmp_path, settings(tokens, layout, engine, steps=12, **more)), ranks)
    assert figures(long)[:8] == figures(short)[:8]
    assert figures(long)[8:12] != figures(short)[8:12]
    own = trained(branched(long, 8, 12), ranks)
    assert (figures(own), len(figures(own))) == (figures(short)[8:], 4)
    for (key, weight), (_, expected) in zip(weights(own), weights(short), strict=True):
        assert torch.equal(weight, expected), key
    assert sums(own)["step-00000012"] == sums(short)["step-00000012"]
    assert "resumed after step 8 of 12" in own.attempts()[0].log.read_text()


@pytest.mark.long(but="first")
@pytest.mark.parametrize("name", ENGINES)
def test_another_weight_decay_is_that_of_the_branch(tmp_path, tokens, name):
    """AdamW takes lr x weight_decay of each matrix away, besides what its moments do (Loshchilov and Hutter 2019)."""
    engine, layout = ENGINES[name]
    ranks = layout["tp"] * layout["pp"] * layout["dp"]
    start = trained(new_run(tmp_path, settings(tokens, layout, engine, steps=4, decay="constant")), ranks)
    runs = [trained(branched(start, 4, 5, train__weight_decay=decay), ranks) for decay in (0.0, 0.5)]
    before, without, decayed = (dict(weights(run)) for run in (start, *runs))
    matrices = [key for key, weight in before.items() if weight.dim() == 2]
    assert len(matrices) > 8
    for key in matrices:
        taken = (without[key] - decayed[key]).double()
        assert torch.allclose(taken, 1e-3 * 0.5 * before[key].double(), rtol=1e-2, atol=2e-8), key


@pytest.fixture(scope="module")
def other_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(__file__).resolve().parents[2] / "hpc_gpt" / "trainer" / "model"
    return build_tokens(source, tmp_path_factory.mktemp("tokens") / "other.tokens").path


def losses(run: RunFolder) -> list[float]:
    return [line["loss"] for line in lines(run)]


def text_folder(folder: Path, words: str) -> str:
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.txt").write_text("".join(f"{words} {number} {word}\n" for word in range(400)))
    return str(folder)


@pytest.mark.long(but="first")
@pytest.mark.parametrize("source", ["tokens", "stream"])
def test_other_data_begin_at_their_first_sample_once(tmp_path, tokens, other_tokens, source):
    """With a learning rate of 0 every loss is that of its samples under the first weights."""
    paths = [str(tokens), str(other_tokens)]
    if source == "stream":
        paths = [text_folder(tmp_path / words, words) for words in ("one", "other")]

    def fresh(path: str, steps: int) -> RunFolder:
        resolved = settings(tokens, ALONE, DDP, lr=0.0, steps=steps, save_every=2)
        data = {"source": source, "path": path, "eval_fraction": 0.2}
        return new_run(tmp_path, type(resolved).from_json(json.dumps(_with_data(resolved, data))))

    first, second = trained(fresh(paths[0], 6)), trained(fresh(paths[1], 6))
    assert losses(first) != losses(second)
    assert branched(first, 4, 6).resolved().data_from == 0
    other = trained(branched(first, 4, 8, data__path=paths[1]))
    assert other.resolved().data_from == 4
    assert losses(other) == losses(second)[:4]
    assert "warning: the data differ" not in other.attempts()[0].log.read_text()
    # A later attempt of the branch and a run that resumes it go on after these.
    shutil.rmtree(other.checkpoints / "step-00000008")
    trained(other)
    assert losses(other)[4:] == losses(second)[2:4]
    further = prepare_new_run(other, Request("", None, None, {}, until=Until(steps=10)), Way.RESUME)
    assert losses(trained(write_run(further.prepared, tmp_path, {}, parent=further.parent))) == losses(second)[4:]
    # Data once more others are new to it.
    assert losses(trained(branched(other, 6, 8, data__path=paths[0]))) == losses(first)[:2]


def _with_data(resolved: Any, data: dict[str, Any]) -> dict[str, Any]:
    tables: dict[str, Any] = json.loads(resolved.to_json())
    tables["data"] |= data
    return tables


def test_the_parents_time_counts(tmp_path, tokens):
    start = trained(new_run(tmp_path, settings(tokens, ALONE, DDP, steps=4, decay="constant")))
    marker = start.checkpoints / "step-00000004" / "complete.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"train_s": 3600.0}))
    own = branched(start, 4, 400, train__minutes=60.0001)
    launch = train(own, 1)
    ended, step, _ = launch.ended
    assert (ended, step < 400) == ("done", True), launch.log
    assert json.loads((own.checkpoints / f"step-{step:08d}" / "complete.json").read_text())["train_s"] > 3600


def test_a_run_that_trains_keeps_the_checkpoint_for_its_branch(tmp_path, tokens):
    more = {"steps": 24, "save_every": 4, "keep_last": 1, "save_in_background": False, **WSD}
    run = new_run(tmp_path, settings(tokens, ALONE, DDP, **more))
    launch = Launch(run, 1, HOLD_AT_LINE="10")  # after the save of step 8
    launch.await_hold()
    own = branched(run, None, 12)
    eighth = run.checkpoints / "step-00000008"
    assert not (own.checkpoints / "step-00000008").exists()
    launch.signal(signal.SIGCONT)
    launch.wait()
    assert sorted(path.name for path in run.checkpoints.glob("step-*")) == ["step-00000008", "step-00000024"]
    assert [line["step"] for line in lines(trained(own))] == [9, 10, 11, 12]
    train(run, 1)  # has nothing to train, and tidies
    assert not eighth.exists()


# Of Mixtral's class.
SHAPE = {"experts": 4, "experts_per_token": 2, "expert_ffn": 32, "kv_heads": 2, "mlp": "swiglu", "norm": "rmsnorm",
         "norm_topk": True, "positions": "rope", "bias": "none", "tied": False}  # fmt: skip
EP2 = {"tp": 1, "pp": 1, "dp": 2, "ep": 2}


@pytest.mark.long(but="first")
@pytest.mark.parametrize(("name", "other"), [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_a_run_at_ep_branches_and_goes_out_and_in(tmp_path: Path, tokens: Path, name: str, other: str) -> None:
    """Branched, also to another ep, exported, and begun again from that."""
    transformers = pytest.importorskip("transformers")
    keys = {"decay": "wsd", "decay_steps": 2, "warmup_steps": 1, "min_lr": 1e-4, "save_every": 3}
    whole = trained(new_run(tmp_path, settings(tokens, EP2, Engine(name), SHAPE, steps=6, **keys)), 2)
    again = trained(branched(whole, 3, 6), 2)
    assert again.resolved().layout.ep == 2
    assert figures(again) == figures(whole)[3:]
    for (key, weight), (_, expected) in zip(weights(again), weights(whole), strict=True):
        assert torch.equal(weight, expected), key
    at_ep1 = trained(branched(whole, 3, 6, layout__ep=1), 2)
    assert [one["loss"] for one in lines(at_ep1)] == pytest.approx([one["loss"] for one in lines(again)], abs=2e-6)

    folder = tmp_path / "out"
    assert export_hf(again, folder).step == 6
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.config.model_type == "mixtral"
    assert theirs.num_parameters() == again.resolved().model.params
    first = []
    for engine, layout in ((name, ALONE | {"micro_batches": 4}), (other, EP2)):
        resolved = settings(tokens, layout, Engine(engine), SHAPE, steps=2, init=str(folder))
        first.append([one["loss"] for one in lines(trained(new_run(tmp_path, resolved), layout["dp"]))])
    assert first[1] == pytest.approx(first[0], abs=2e-6)
    assert first[0][0] < figures(whole)[0][1]  # it has learnt


@pytest.mark.long
@pytest.mark.parametrize("engine", [DDP, Engine(name="fsdp")], ids=["ddp", "fsdp"])
def test_another_optimizers_states_begin_at_zero(tmp_path: Path, tokens: Path, engine: Engine) -> None:
    """The first step of the branch moves each weight as the first of a new AdamW does, by the rate alone."""
    layout = ALONE if engine is DDP else {"tp": 1, "pp": 1, "dp": 2}
    one = trained(new_run(tmp_path, settings(tokens, layout, engine, steps=2, decay="constant", lr=1e-3)), layout["dp"])
    own = branched(one, 2, 3, train__optimizer="sgd", train__weight_decay=0.0)
    back = branched(trained(own, layout["dp"]), 3, 4, train__optimizer="adamw")
    before, after = (dict(weights(run)) for run in (own, trained(back, layout["dp"])))
    moved = torch.cat([(after[name] - weight).abs().flatten() for name, weight in before.items()])
    assert moved.median() == pytest.approx(1e-3, rel=1e-3)
