"""What a program does is said by Megatron's arguments, or of one's own by [plan]; and what a plan makes of it."""

import json
from dataclasses import replace

import pytest

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.core.settings.resolved import config_hash
from hpc_gpt.core.settings.services import Plan
from hpc_gpt.planner.training import traits_of
from tests.cli.command import error_of, in_process

RUN = Training(
    preset("llama3.1-70b"),
    tp=4,
    pp=4,
    dp=8,
    micro_batches=8,
    flash=True,
    sharded_optimizer=True,
    sequence_parallel=True,
)
TRAITS = {
    "--overlap-grad-reduce": {"dp_overlap": True, "gathers_wait": True},
    "--overlap-grad-reduce --overlap-param-gather": {"dp_overlap": True, "gathers_wait": False},
    "--tp-comm-overlap": {"tp_overlap": True},
    "--grad-reduce-in-bf16": {"grad_sum": "bf16"},
    "--cross-entropy-loss-fusion": {"fused_loss": "jit"},
    "--cross-entropy-loss-fusion --cross-entropy-fusion-impl=te": {"fused_loss": "kernel"},
    "--attention-backend unfused": {"flash": False, "attention": "unfused"},
    "--attention-backend=flash": {"attention": "fa2"},
    "--transformer-impl local": {"flash": False, "attention": "unfused"},
    "--cpu-offloading-num-layers 8": {"offloaded_layers": 8},
    "--swiglu": {},
}


@pytest.mark.parametrize("words", TRAITS)
def test_what_megatrons_arguments_say_is_read(words):
    engine = Engine(name="megatron-lm", megatron_args=tuple(words.split()))
    plain = traits_of(replace(engine, megatron_args=()), "megatron-lm", "h100-80g")
    assert traits_of(engine, "megatron-lm", "h100-80g") == plain | TRAITS[words]
    assert traits_of(engine, "fsdp", "h100-80g") == traits_of(replace(engine, megatron_args=()), "fsdp", "h100-80g")


RECOMPUTED = {
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": "full",
    "--recompute-granularity=selective --recompute-modules moe_act layernorm": "moe_act,layernorm",
    "--recompute-activations": "selective",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 2": None,  # a share of each stage
    "--swiglu": None,
}


@pytest.mark.parametrize("words", RECOMPUTED)
def test_what_megatrons_arguments_compute_again_is_read(words):
    engine = Engine(name="megatron-lm", megatron_args=tuple(words.split()))
    assert engine_named("megatron-lm").stated_recompute(engine) == RECOMPUTED[words]


def test_a_recomputation_of_megatrons_arguments_is_planned():
    words = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    of_arguments = planned(*ASKED, "--set", f"engine.megatron_args={json.dumps(words)}")["candidates"][0]
    of_key = planned(*ASKED, "--recompute", "full")["candidates"][0]
    assert of_arguments["figures"] == of_key["figures"]


def planned(*words):
    done = in_process("plan", *words, "--cluster", "h100-80g-8", "--json", code=0)
    return json.loads(done.stdout)


ASKED = ("--model", "llama3.1-70b", "--gpus", "128", "--engine", "megatron-lm")


def test_the_best_is_shown_again_with_hidden_communication():
    page = planned(*ASKED)
    shown, best = page["overlapped"], page["candidates"][0]
    expected = ["--overlap-grad-reduce", "--overlap-param-gather"] + ["--tp-comm-overlap"] * (best["tp"] > 1)
    assert shown["arguments"] == expected
    assert shown["figures"]["step_s"] < best["figures"]["step_s"]
    assert "--overlap-grad-reduce" not in page["next"]
    assert all(word in shown["next"] for word in (*expected, f"--tp {best['tp']} "))
    done = in_process("plan", *ASKED, "--cluster", "h100-80g-8")
    assert "times the best, if the checkout has these arguments" in " ".join(done.stdout.split())
    assert done.stderr.splitlines()[-1] == f"with them: {shown['next']}"
    rows = [line for line in done.stdout.splitlines() if line.startswith("tp")]
    assert rows[0].split()[0] == rows[1].split()[0] == best["layout"]
    # What is given already is not proposed again, and what changes the arithmetic never is.
    given = planned(*ASKED, "--set", f"engine.megatron_args={json.dumps(expected)}")
    assert "overlapped" not in given
    assert given["candidates"][0]["figures"]["step_s"] <= shown["figures"]["step_s"]
    assert "--grad-reduce-in-bf16" not in json.dumps(page)
    assert engine_named("fsdp").overlaps(RUN) == ((), {})


def test_init_names_them_in_a_comment(tmp_path):
    in_process("init", "mine", *ASKED, "--cluster", "h100-80g-8", "-o", tmp_path, code=0)
    text = (tmp_path / "mine.toml").read_text()
    assert '# "--overlap-grad-reduce", "--overlap-param-gather"' in text


PROGRAM = """
name = "mine"
[engine]
name = "command"
[command]
run = "python train.py"
[model]
preset = "llama3.1-8b"
[layout]
gpus = 64
global_batch = 512
"""


def experiment(tmp_path, more=""):
    (path := tmp_path / "mine.toml").write_text(PROGRAM + more)
    return path


def test_a_program_of_ones_own_is_planned_as_its_engine_like(tmp_path):
    refused = in_process("plan", experiment(tmp_path), "--cluster", "h100-80g-8", code=2)
    assert "hpc-gpt help keys plan" in error_of(refused)[1]
    like = '[plan]\nlike = "megatron-lm"\n'
    plain, told = (
        planned(experiment(tmp_path, like + more))
        for more in ("", 'grad_sum = "bf16"\ntp_overlap = true\ndp_overlap = true\nattention = "fa3"\n')
    )
    assert {each["engine"] for each in plain["candidates"]} == {"megatron-lm"}
    assert plain["next"] == ""
    steps = [page["candidates"][0]["figures"]["step_s"] for page in (plain, told)]
    assert steps[1] < steps[0]
    wrong = in_process(
        "plan", experiment(tmp_path, '[plan]\nlike = "fsdp"\nattention = "fa9"\n'), "--cluster", "h100-80g-8"
    )
    assert wrong.code == 2
    assert "plan.attention" in error_of(wrong)[0]


def test_the_table_decides_nothing_beside_another_engine(tmp_path):
    profile = load_profile("h100-80g-8")
    plain, told = (
        resolve(load_experiment(str(experiment(tmp_path, more)), {}), profile)
        for more in ("", '[plan]\nlike = "fsdp"\ngrad_sum = "bf16"\n')
    )
    assert told.plan == Plan(like="fsdp", grad_sum="bf16")
    assert config_hash(plain) == config_hash(told)
    assert replace(told, plan=Plan()) == plain
    with pytest.raises(ConfigError, match=r"the table \[plan\] is given, but plan already knows engine fsdp"):
        resolve(
            load_experiment("demo", {"engine.name": "fsdp", "layout.pp": 1, "layout.tp": 1, "plan.grad_sum": "bf16"}),
            profile,
        )


def test_every_key_of_the_table_is_listed():
    listed = json.loads(in_process("help", "keys", "plan", "--json").stdout)["keys"]
    assert [each["key"] for each in listed] == [f"plan.{name}" for name in vars(Plan())]
    assert all(each["means"] for each in listed)
