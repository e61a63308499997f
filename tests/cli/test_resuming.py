"""What --resume takes of a run that is done, and of the model that its checkpoint has."""

import re
from dataclasses import replace

import pytest

from hpc_gpt.core.engines import trainers
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.launcher.descent import check_same_training
from tests.cli.command import in_process, profile_of, without_slurm
from tests.made_runs import a_run


@pytest.mark.parametrize("asked", [("--until", "steps=12"), ("--set", "train.steps=12")])
def test_more_steps_are_the_way_on(asked):
    run = a_run(6, saved=[6], train__steps=6, train__warmup_steps=0, data__source="random")
    done = in_process("submit", "--resume", run.run_id, *asked, "--dry-run", "--script", code=0)
    assert '"steps": 12,' in done.stdout
    assert "rate falls (cosine) to the end of 6 steps until step 6, and of 12 steps after it: no" in done.stderr


# --- another engine

DENSE = {"layout__tp": 1, "layout__pp": 1, "layout__dp": 1, "layout__gpus": 1, "layout__micro_batch": 8}
MIXTURE = DENSE | {
    "model__mlp": "swiglu", "model__norm": "rmsnorm", "model__positions": "rope", "model__bias": "none",
    "model__experts": 4, "model__experts_per_token": 2, "model__expert_ffn": 64, "model__norm_topk": True,
}  # fmt: skip
ENGINES = [name for name, facts in trainers().items() if not facts.is_program]


@pytest.mark.parametrize("kind", ["dense", "mixture"])
@pytest.mark.parametrize("before", ENGINES)
def test_a_run_of_each_engine_goes_on_with_each(before, kind):
    """A mixture of ours without balance, which hf-deepspeed has none of; one of hf-deepspeed as it is by default."""
    settings = (DENSE if kind == "dense" else MIXTURE) | {"engine__name": before, "data__source": "random"}
    if kind == "mixture" and before != "hf-deepspeed":
        settings["train__balance"] = "none"
    run = a_run(2, saved=[2], train__steps=6, train__warmup_steps=1, train__dtype="fp32", **settings)
    if kind == "mixture" and before == "hf-deepspeed":
        assert run.resolved().train.balance == "none"
    for after in [name for name in ENGINES if name != before]:
        changes = ("--set", f"engine.name={after}", "--set", "engine.zero_stage=")
        done = in_process("submit", "--resume", run.run_id, *changes, "--dry-run", "--script", code=0)
        assert (f'"name": "{after}"' in done.stdout) is (after != Engine.name), after  # the default is not stored
        assert ('"balance": "none"' in done.stdout) is (kind == "mixture")


def test_a_mixture_of_0_4_without_a_stored_balance_goes_on():
    settings = {"engine__name": "hf-deepspeed", "data__source": "random", "train__dtype": "fp32", **MIXTURE}
    run = a_run(2, "walltime", saved=[2], train__steps=6, train__warmup_steps=1, **settings)
    file = run.path / "resolved.json"
    file.chmod(0o644)
    file.write_text(file.read_text().replace('"balance": "none",', '"balance": null,'))
    assert run.resolved().train.balance is None
    for changes in ((), ("--set", "engine.name=fsdp", "--set", "engine.zero_stage="), ("--set", "train.keep_last=1")):
        in_process("submit", "--resume", run.run_id, *changes, "--dry-run", "--script", code=0)


def test_a_key_that_nobody_gave_is_not_to_be_left_out():
    parent = a_run(None, engine__name="ddp", **MIXTURE).resolved()
    other = replace(parent, train=replace(parent.train, balance="none"))
    for changes, hint in (
        ({"engine.name": "fsdp"}, "keep it with --set train.balance=loss, or submit --branch"),
        ({"train.balance": "none"}, "leave these out, or submit --branch"),
    ):
        with pytest.raises(ConfigError, match=r"train\.balance would be none, but is loss") as refused:
            check_same_training(parent, other, changes=changes)
        assert refused.value.hint.startswith(hint)


# --- a chain of jobs, before there is one


def test_a_singleton_chain_is_sent_as_often_as_was_forecast(tmp_path):
    profile_of("chained", 'extends = "jean-zay-v100-32g"\nchain = "singleton"\n')
    far = ("--until", "tokens=30e9", "--gpus", "64", "--pp", "16", "--time", "20:00:00", "--dry-run", "--script")
    done = in_process("submit", *far, "--cluster", "chained", environment=without_slurm(tmp_path), code=0)
    assert "by singleton jobs" in done.stderr
    assert re.search(r"--job-name=…-RUN --dependency=singleton .* with HPC_GPT_RUN, \d+ times", done.stderr)


def test_render_says_nothing_of_it_and_takes_the_budget():
    done = in_process("render", "demo", "--cluster", "generic-slurm", "--max-gpu-hours", "3", code=0)
    assert '"max_gpu_hours": 3.0' in done.stdout
    assert "forecast" not in done.stderr
