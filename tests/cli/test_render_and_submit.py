"""render and submit as commands: precedence, what goes to stdout, what a dry run leaves."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.cli.command import hpc_gpt, in_process, profile_of, resolved_of, without_slurm
from tests.conftest import REPOSITORY


def test_render_prints_a_script_and_nothing_else():
    done = hpc_gpt("render", "demo")
    assert done.stdout.startswith("#!/bin/bash\n")
    assert done.stderr == "not predicted: profile generic-slurm names no device\n"
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0


def test_an_option_wins_over_the_experiment_over_the_profile(tmp_path):
    assert resolved_of(in_process("render", "demo"))["job"]["time"] == "01:00:00"  # the profile's
    (tmp_path / "timed.toml").write_text(f'extends = "{REPOSITORY}/experiments/demo.toml"\n[job]\ntime = "2:00:00"\n')
    given = ("render", str(tmp_path / "timed.toml"))
    assert resolved_of(in_process(*given))["job"]["time"] == "2:00:00"
    by_set = (*given, "--set", "job.time=3:30:00")
    assert resolved_of(in_process(*by_set))["job"]["time"] == "3:30:00"
    assert resolved_of(in_process(*by_set, "-t", "4:00:00"))["job"]["time"] == "4:00:00"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (("--set", "train.steps=5"), 5),
        (("--until", "tokens=40000"), 10),  # of 4,096 each
        (("--smoke",), 1),
    ],
)
def test_a_warm_up_is_cut_to_the_command_lines_steps_and_said(given, kept):
    done = in_process("submit", "demo", "--cluster", "local", "--dry-run", "--script", *given)
    assert resolved_of(done)["train"]["warmup_steps"] == kept
    assert done.stderr.count("warmup_steps") == done.stderr.count(f"train.warmup_steps is cut from 20 to {kept}\n") == 1


def test_given_steps_may_hold_a_warm_up_that_the_files_cannot(tmp_path):
    path = tmp_path / "long.toml"
    demo = (REPOSITORY / "experiments" / "demo.toml").read_text()
    path.write_text(demo.replace("\nsteps = 200\n", "\nsteps = 10\n"))
    done = in_process("render", str(path))
    assert (done.code, "train.warmup_steps is 20, longer than the run" in done.stderr) == (2, True)
    done = in_process("submit", str(path), "--cluster", "local", "--dry-run", "--script", "--until", "steps=30")
    assert resolved_of(done)["train"]["warmup_steps"] == 20
    assert "is cut" not in done.stderr


def test_the_profile_comes_from_flag_variable_default_fallback(tmp_path):
    assert resolved_of(in_process("render", "demo"))["cluster"]["name"] == "generic-slurm"
    profile_of("mine", 'extends = "a100-80g-8"\npartition = "p"\n', default=True)
    assert resolved_of(in_process("render", "demo"))["job"]["partition"] == "p"
    variable = {"HPC_GPT_CLUSTER": "jean-zay-v100-16g"}
    assert resolved_of(in_process("render", "demo", environment=variable))["cluster"]["name"] == "jean-zay-v100-16g"
    done = in_process("render", "demo", "--cluster", "local", environment=variable)
    assert resolved_of(done)["cluster"]["name"] == "local"
    profile_of("generic-slurm", 'extends = "generic-slurm"\naccount = "mine"\n')
    own = in_process("render", "demo", "--cluster", "generic-slurm")
    assert resolved_of(own)["job"]["account"] == "mine", "a user's wins over the shipped one of its name"


def test_sbatchs_letters():
    letters = {"account": ("-A", "a@v100"), "partition": ("-p", "gpu"), "qos": ("-q", "dev"), "nodelist": ("-w", "n7"),
               "constraint": ("-C", "v100-32g"), "exclude": ("-x", "n[1-3]"), "dependency": ("-d", "afterok:5"),
               "name": ("-J", "it's"), "cpus_per_task": ("-c", 6), "reservation": ("--reservation", "r")}  # fmt: skip
    words = [word for pair in letters.values() for word in pair]
    job = resolved_of(in_process("render", "demo", "--exclusive", *words))["job"]
    assert {key: job[key] for key in letters} == {key: value for key, (_, value) in letters.items()}
    assert job["exclusive"] is True


def test_nodes_settle_the_gpus_and_megatrons_names_the_layout():
    resolved = resolved_of(in_process("render", "-N", "8", "--pipeline-model-parallel-size", "8",
                                   "--tensor-model-parallel-size", "4", "--global-batch-size", "64",
                                   "--micro-batch-size", "2", "--seq-length", "2048"))  # fmt: skip
    assert (resolved["gpus"], resolved["layout"]) == (32, {"tp": 4, "pp": 8, "dp": 1})
    assert resolved["batch"] == {"micro_batch": 2, "micro_batches": 32, "global_batch": 64}
    assert resolved["model"]["seq"] == 2048
    model = resolved_of(in_process("render", "demo", "--model", "gpt2"))["model"]
    sizes = [model[key] for key in ("hidden", "layers", "heads", "vocab", "seq")]
    assert sizes == [768, 12, 12, 256, 128], "a preset brings its sizes and keeps the vocabulary"


def test_any_value_can_be_set_and_taken_back():
    settings = ("train.lr=2e-4", "job.time=90", 'job.sbatch=["--nice=5"]', "train.warmup_steps=")
    done = in_process("render", "demo", *(word for setting in settings for word in ("--set", setting)))
    resolved = resolved_of(done)
    assert (resolved["train"]["lr"], resolved["train"]["warmup_steps"]) == (2e-4, 0)
    assert resolved["job"]["time"] == "90"
    assert "#SBATCH --nice=5\n" in done.stdout


def test_every_key_that_help_lists_can_be_set():
    keys = json.loads(in_process("help", "keys", "--json").stdout)["keys"]
    assert len(keys) > 50
    settings = [word for row in keys if row["default"] is not None and not isinstance(row["default"], list)
                and not row["key"].startswith(("model.rope_scaling.", "data.mix."))  # only with keys without a default
                for word in ("--set", f"{row['key']}={json.dumps(row['default'])}")]  # fmt: skip
    in_process("render", "demo", *settings, code=0)


def test_a_dry_run_prints_the_script_and_writes_nothing(tmp_path):
    bare = without_slurm(tmp_path)
    done = hpc_gpt("submit", "demo", "--dry-run", "--script", cwd=tmp_path, environment=bare)
    assert done.stdout == in_process("render", "demo").stdout
    assert "nothing was written" in done.stderr
    assert not Path(os.environ["HPC_GPT_LOGS"]).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin"]
