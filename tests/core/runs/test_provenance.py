"""What a plain `sbatch job.sh` leaves out of its run folder is written from resolved.json."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.engines import ds_config_of
from hpc_gpt.core.runs.provenance import complete_run, config_notes
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import list_experiments, load_experiment
from hpc_gpt.core.settings.stored import experiment_text


@pytest.mark.parametrize("name", list_experiments())
@pytest.mark.parametrize("profile", ["local", "generic-slurm", "jean-zay-v100-32g", "h100-80g-8"])
def test_the_experiment_resolves_to_the_same_again(tmp_path: Path, name: str, profile: str) -> None:
    site = replace(load_profile(profile), sbatch=("--wckey=site",), srun=("--mpi=none",))
    sizes = dict.fromkeys(("nodes", "tp", "pp", "dp", "micro_batch", "micro_batches", "global_batch"))
    small = {"layout.gpus": 4, "model.preset": "gpt2", **{f"layout.{key}": size for key, size in sizes.items()}}
    fits = small if profile == "local" else {"job.comment": "a'\"b"}
    first = resolve(load_experiment(name, {**fits, "job.sbatch": ["--mail-user=é"]}), site)
    (path := tmp_path / "again.toml").write_text(experiment_text(first, "again"), encoding="utf-8")
    assert resolve(load_experiment(str(path)), site) == first


def test_what_is_there_is_kept_and_no_secret_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret-token")
    resolved = resolve(load_experiment("demo"), load_profile("local"))
    (tmp_path / "experiment.toml").write_text("# mine\n")
    complete_run(tmp_path, resolved)
    assert (tmp_path / "experiment.toml").read_text() == "# mine\n"
    config = json.loads((tmp_path / "ds_config.json").read_text())
    assert config["train_batch_size"] == resolved.batch.global_batch
    provenance = json.loads((tmp_path / "provenance.json").read_text())
    assert provenance["versions"]["hpc-gpt"] == resolved.version
    assert {"git_sha", "git_dirty", "host", "gpus", "device"} <= set(provenance)
    assert not any("s3cret" in path.read_text() for path in tmp_path.iterdir())


@pytest.mark.parametrize("name", ["deepspeed-3d", "deepspeed-zero", "hf-deepspeed"])
def test_the_run_folders_configuration_is_what_deepspeed_gets(tmp_path: Path, name: str) -> None:
    whole = {"engine.name": name, "engine.zero_stage": None, "layout.tp": 1, "layout.pp": 1}
    resolved = resolve(load_experiment("demo", whole), load_profile("generic-slurm"))
    complete_run(tmp_path, resolved)
    assert json.loads((tmp_path / "ds_config.json").read_text()) == ds_config_of(resolved)
    assert config_notes(tmp_path, resolved) == []

    other = ds_config_of(resolved)
    other["zero_optimization"]["reduce_bucket_size"] = 5
    del other["prescale_gradients"]
    (tmp_path / "ds_config.json").write_text(json.dumps(other))
    [note] = config_notes(tmp_path, resolved)
    bucket = ds_config_of(resolved)["zero_optimization"]["reduce_bucket_size"]
    assert note == (
        f"note: ds_config.json differs from what engine {name} gets: zero_optimization.reduce_bucket_size is 5 there, "
        f"{bucket} now, and 1 other key"
    )


def test_a_folder_without_the_file_has_no_note(tmp_path: Path) -> None:
    assert config_notes(tmp_path, resolve(load_experiment("demo"), load_profile("local"))) == []
