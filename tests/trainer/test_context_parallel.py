"""Real trainings of ranks that share each sample: the loop gives them the same samples, as it gives one process."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.experiment import Data, Engine
from hpc_gpt.trainer.checkpoints.training_state import read_positions
from hpc_gpt.trainer.export import export_hf
from tests.made_runs import read_run
from tests.trainer.launch import figures, new_run, settings, train
from tests.trainer.tokens.shard_folders import write_shard

STEPS, SAVED = 6, 3
ALONE, SHARED = {"tp": 1, "pp": 1, "dp": 1}, {"tp": 1, "pp": 1, "dp": 1, "cp": 2}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This repository's own sources."""
    (folder := tmp_path_factory.mktemp("text") / "shards").mkdir()
    sources = sorted((Path(__file__).resolve().parents[2] / "hpc_gpt" / "trainer" / "tokens").glob("*.py"))
    for number, source in enumerate(sources[:6]):
        write_shard(folder / f"{number}.jsonl.gz", source.read_text())
    return folder


def trained(folder: Path, shards: Path, layout: dict[str, int], resumed: RunFolder | None = None) -> RunFolder:
    """A run to its end; from a checkpoint of another run's, with other layouts, after SAVED steps."""
    steps = {"eval_every": SAVED, "eval_batches": 1, "save_every": SAVED, "deterministic": True}
    resolved = settings(Path("unused"), layout, Engine(name="ddp"), steps=STEPS, **steps)
    data = Data("stream", str(shards), eval_fraction=0.2, workers=1)
    run = new_run(folder, replace(resolved, data=data))
    if resumed is not None:
        name = f"step-{SAVED:08d}"
        shutil.copytree(resumed.checkpoints / name, run.checkpoints / name)
    launch = train(run, resolved.gpus)
    assert launch.ended == ("done", STEPS, False), launch.log
    return run


def check_alike(run: RunFolder, one: RunFolder, steps: range) -> None:
    found, expected = figures(run), [line for line in figures(one) if line[0] in steps]
    assert [line[0] for line in found] == list(steps)
    for (_, loss, loss_eval, norm, rate), (_, *plain) in zip(found, expected, strict=True):
        assert [loss, rate] == pytest.approx([plain[0], plain[3]], abs=2e-6)
        assert (loss_eval is None) == (plain[1] is None)
        assert loss_eval is None or loss_eval == pytest.approx(plain[1], abs=2e-6)
        assert norm == pytest.approx(plain[2], rel=1e-5)


def check_exports(run: RunFolder, one: RunFolder, folder: Path) -> None:
    files = [export_hf(each, folder / name).files for name, each in (("ours", run), ("plain", one))]
    assert files[0] == files[1]
    for name in files[0]:
        ours, plain = folder / "ours" / name, folder / "plain" / name
        if name == "model.safetensors":
            weights, expected = load_file(ours), load_file(plain)
            assert weights.keys() == expected.keys()
            assert max(float((weights[one] - expected[one]).abs().max()) for one in expected) <= 1e-5
        else:
            assert ours.read_bytes() == plain.read_bytes()


def test_two_ranks_of_a_replica_are_one_process_in_everything(tmp_path: Path, shards: Path):
    one = trained(tmp_path / "one", shards, ALONE)
    shared = trained(tmp_path / "shared", shards, SHARED)
    check_alike(shared, one, range(1, STEPS + 1))
    # The replica's position in its shards is saved once, and is that of the one process.
    kept, saved = (read_positions(run.checkpoints / f"step-{SAVED:08d}") for run in (one, shared))
    assert saved == kept
    assert kept.keys() == {0}
    records = [read_run(run) for run in (one, shared)]
    assert [record.tokens_total for record in records] == [STEPS * 4 * 32] * 2
    assert (records[1].gpus, records[1].cp, records[1].dp) == (2, 2, 1)
    check_exports(shared, one, tmp_path)
    check_alike(trained(tmp_path / "wide", shards, SHARED, one), one, range(SAVED + 1, STEPS + 1))
