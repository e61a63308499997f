"""What engines refuse before a job is made: each line and hint to the letter. What of their keys any engine refuses is
in tests/cli/refused/engines.txt."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.engines import engines
from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.errors import raise_faults
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.data_source import MixedSource
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Command, Data, Experiment, Model
from hpc_gpt.core.settings.model_keys import RopeScaling
from hpc_gpt.core.settings.services import Plan
from tests.core.engines.test_command import PROFILE, SOUND, experiment
from tests.core.engines.trainings import LLAMA as SHAPE
from tests.megatron_lm.test_arguments import settle
from tests.refusals import Row, check_refusal

LLAMA = Model(preset="llama3.1-8b", seq=8192)
ONE_KEY = Model(hidden=64, layers=4, heads=8, kv_heads=1, vocab=256, seq=64)
FIVE_LAYERS = Model(hidden=64, layers=5, heads=2, vocab=256, seq=64)
EXAMPLE = r"for example pattern = 'step (?P<step>\d+) loss (?P<loss>[\d.]+)'"
IN_RUN = """which is neither in the run's folder nor in the work folder | use "{run}/checkpoints/…", a folder that the \
program has as HPC_GPT_CHECKPOINTS, or "out/…" in workdir"""
GROUPS = """step, steps_planned, step_s, step_ms, steps_per_s, loss, loss_eval, lr, grad_norm, tokens_per_s, \
tokens_per_s_gpu, samples_per_s, tflops, mfu, mfu_percent, skipped, memory_allocated_gib, memory_allocated_mib, \
memory_allocated_gb, memory_reserved_gib, memory_reserved_mib, memory_reserved_gb, balance_loss, \
z_loss, expert_load, experts_dead"""
MEGATRON = engines()["megatron-lm"]


def of(facts: Any, name: str, *given: Any) -> Callable[[Path], Any]:
    return lambda at: getattr(facts, name)(*given)


def megatron(**parts: Any) -> Callable[[Path], Any]:
    return lambda at: settle(**parts)


def mixed(**sources: Any) -> Data:
    return Data(source="mix", mix={name: MixedSource(name, each, 1.0) for name, each in sources.items()})


def split(cp: int, tp: int = 1, model: Model = LLAMA, **engine: Any) -> Callable[[Path], Any]:
    """Of Megatron-LM on a node of 16 GPUs."""
    layout = {"tp": tp, "pp": 1, "dp": 1, "cp": cp}
    return lambda at: settle(ClusterProfile("x", gpus_per_node=16), model=model, engine=engine, layout=layout)


def program(**change: Any) -> Callable[[Path], Any]:
    return lambda at: resolve(experiment(replace(SOUND, **change)), PROFILE)


def started(**change: Any) -> Callable[[Path], Any]:
    """A program in a folder of which only the work folder is there."""

    def act(at: Path) -> Any:
        (at / "work").mkdir()
        command = replace(SOUND, workdir=str(at / change.pop("folder", "work")), **change)
        engines()["command"].check_program(resolve(experiment(command), PROFILE), {})

    return act


def planned(at: Path) -> Any:
    raise_faults(engines()["ddp"].table_faults(Command(), Plan(like="fsdp"), Data()))


def training(**more: Any) -> Callable[[Path], Any]:
    return lambda at: Training(SHAPE, **more)


# fmt: off
ROWS: dict[str, Row] = {
    # Megatron-LM
    "tokens of ours": (megatron(data=Data(source="tokens", path="a.tokens")),
     'data.source is tokens, but Megatron-LM reads only its own token files | set data.source = "megatron" and '
     'data.path to the path before .bin and .idx, or data.path = "stdlib"'),
    "a mixture of others": (megatron(data=mixed(b="tokens", a="stream", c="megatron")),
     "data.mix.a.source is stream, but Megatron-LM reads only its own token files | make one: hpc-gpt data SOURCE "
     '-o PREFIX --format megatron, then data.mix.a.source = "megatron"'),
    "phases of a mixture": (megatron(data=replace(mixed(a="megatron"), phases=(1,))),
     "data.phases is given, but Megatron-LM has one set of weights for a run | leave data.phases out, or use "
     "another engine"),
    "a base that is no whole number": (megatron(model=replace(LLAMA, rope_theta=10000.5)),
     "engine megatron-lm cannot train this model: model.rope_theta is 10000.5, and --rotary-base takes a whole "
     "number | use --engine deepspeed-3d or deepspeed-zero or fsdp or ddp or hf-deepspeed"),
    "another scaling": (megatron(model=replace(LLAMA, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 4096))),
     "engine megatron-lm cannot train this model: it scales a rotation only by low 1, high 4 and 8192 positions | "
     "use --engine deepspeed-3d or deepspeed-zero or fsdp or ddp or hf-deepspeed"),
    "more ranks than heads of keys": (megatron(model=replace(LLAMA, kv_heads=4), layout={"tp": 8, "gpus": 8}),
     "tp 8 is more than the 4 kv_heads, which Megatron-LM does not divide | use --tp 4 or less, or engine "
     "deepspeed-3d"),
    "stages that are unequal": (megatron(model=FIVE_LAYERS, layout={"tp": 1, "pp": 3, "gpus": 3}),
     "pp 3 does not divide the 5 layers: Megatron-LM needs stages of equal depth | use --pp 1, or model.layers = 6"),
    "a warm-up of all steps": (megatron(train={"steps": 10, "warmup_steps": 10}),
     "train.warmup_steps is 10 of 10 steps, but Megatron-LM needs fewer | use train.warmup_steps = 9 or less"),
    "no last save": (megatron(train={"save_last": False}),
     "train.save_last is false, but Megatron-LM saves whenever it ends | leave it out"),
    "an end at a loss": (megatron(train={"until_loss": 2.5}),
     "train.until_loss is 2.5, but Megatron-LM stops at a step, not at a loss | leave it out"),
    "keys that would be repeated": (split(8, 2, replace(LLAMA, heads=16, head_dim=256)),
     "cp 8 does not divide 8 kv_heads / tp 2 = 4, and Megatron-LM's a2a does not repeat them | use --cp 4, or "
     'engine.cp_exchange = "ring" or "keys"'),
    "keys of one head": (split(4, model=ONE_KEY),
     "cp 4 does not divide 1 kv_heads / tp 1 = 1, and Megatron-LM's a2a does not repeat them | "
     'use engine.cp_exchange = "ring" or "keys"'),
    "samples that do not divide": (split(4, model=replace(LLAMA, seq=8196)),
     "2 x cp 4 = 8 does not divide model.seq 8196: 8196 / 8 = 1024.50 | use --seq 8192"),
    "local attention over cp": (split(4, megatron_args=("--transformer-impl", "local")),
     "cp is 4, but engine.megatron_args has --transformer-impl local, whose attention has no context parallelism | "
     "leave it out, or use --cp 1"),
    "an option that follows": (megatron(engine={"megatron_args": ("--num-layers=3", "--lr", "1")}),
     "engine.megatron_args holds --lr, --num-layers, which follows from the experiment's other keys | set those "
     "keys (hpc-gpt help keys), so that the record says what ran"),
    "no checkout": (of(MEGATRON, "check_program", settle(), {}),
     "engine megatron-lm runs a checkout of Megatron-LM, but neither MEGATRON_LM nor profile test names one | "
     'export MEGATRON_LM=/path/to/Megatron-LM, or megatron_lm = "/path/to/Megatron-LM" in the cluster profile'),
    "a checkout that is elsewhere": (of(MEGATRON, "check_program", settle(), {"MEGATRON_LM": "Megatron-LM"}),
     "the checkout of Megatron-LM is Megatron-LM, but a job starts in another folder | give an absolute path"),
    "a folder that is none": (lambda at: MEGATRON.check_program(settle(), {"MEGATRON_LM": str(at)}),
     "HERE is not a Megatron-LM checkout: it has no pretrain_gpt.py | git clone "
     "https://github.com/NVIDIA/Megatron-LM, and name that folder"),
    # a program of one's own
    "a name that is misspelt": (program(run="x {gpu}"),
     "command.run has {gpu}, which is not known; did you mean gpus? | known: {gpus}, {nodes}, {tp}, {run}, "
     "{attempt}; write {{gpu}} to pass {gpu} to the program"),
    "a name in a word": (program(run=("x", "{nope}")),
     "command.run[1] has {nope}, which is not known | known: {gpus}, {nodes}, {tp}, {run}, "
     "{attempt}; write {{nope}} to pass {nope} to the program"),
    "a checkpoint before there is one": (program(run="x {checkpoint}"),
     "command.run has {checkpoint}, which is known only in command.resume, which is added once there is one | known "
     "here: {gpus}, {nodes}, {tp}, {run}, {attempt}"),
    "a NUL": (program(run="x\0y"), "command.run holds a NUL, which no command line can carry | take it out"),
    "a secret": (program(run="x --api_key=hunter2secret"),
     "command.run holds what looks like a secret, and the run folder would keep it: x --api_key=[removed] | export "
     "it in the shell that submits, and use its variable: $NAME"),
    "a secret before it": (program(setup=("export HF_TOKEN=hf_0123456789abcdefghij",)),
     "command.setup[0] holds what looks like a secret, and the run folder would keep it: export HF_TOKEN=[removed] "
     "| export it in the shell that submits, and use its variable: $NAME"),
    "a name to resume": (program(resume="--from {step}"),
     "command.resume has {step}, which is not known | known: {gpus}, {nodes}, {tp}, {run}, "
     "{attempt}, {checkpoint}; write {{step}} to pass {step} to the program"),
    "resuming from nowhere": (program(checkpoints=None, complete=None),
     'command.resume is given without command.checkpoints | set checkpoints = "out/ckpt-*"'),
    "complete without checkpoints": (program(checkpoints=None, resume=None),
     'command.complete is given without command.checkpoints | set checkpoints = "out/ckpt-*"'),
    "checkpoints elsewhere": (program(checkpoints="/scratch/ckpt-*"),
     f"command.checkpoints is '/scratch/ckpt-*', {IN_RUN}"),
    "checkpoints above the run": (program(checkpoints="{run}/../x"),
     f"command.checkpoints is '{{run}}/../x', {IN_RUN}"),
    "checkpoints at home": (program(checkpoints="~/ckpt-*"), f"command.checkpoints is '~/ckpt-*', {IN_RUN}"),
    "checkpoints of each GPU": (program(checkpoints="out/{gpus}"),
     "command.checkpoints has {gpus}, which is known only elsewhere | known here: {run}"),
    "a name in what completes": (program(complete="{gpus}/done"),
     "command.complete has {gpus}, which is known only elsewhere | known here: {run}, {checkpoint}"),
    "no pattern": (program(pattern="("),
     f"command.pattern is not a regular expression: missing ), unterminated subpattern at position 0 | {EXAMPLE}"),
    "a pattern without steps": (program(pattern=r"loss (?P<loss>\S+)"),
     f"command.pattern has no group step, so no line counts as a step | {EXAMPLE}"),
    "a group that is not known": (program(pattern=r"(?P<step>\d+) (?P<cat>.)"),
     f"command.pattern has a group cat, which is not known | use one of {GROUPS}"),
    "no seconds to hang": (program(hang_s=0.0),
     "command.hang_s is 0.0, but must be above 0 | leave it out for no limit"),
    "a script and a command": (program(script="job.sh"),
     "command.run and command.script are given: a script runs as it is | leave one of them out"),
    "arguments of no script": (program(args=("a",)),
     "command.args has arguments for command.script, which is not given | put them into command.run"),
    "values that cannot be": (program(values={"run": 1, "step": 2, "unused": 3, "a-b": 4}),
     "command.values has run, which hpc-gpt itself fills in\n"
     "command.values has step, but no text of [command] uses {step}\n"
     "command.values has unused, but no text of [command] uses {unused}\ncommand.values has 'a-b', which is not "
     "made of letters, digits and _ | give it another name; take it out, or use it"),
    "a folder that is not there": (started(folder="nowhere"),
     "command.workdir is HERE/nowhere, which is not a folder here | name the program's folder"),
    "a link to nothing": (started(link=("data",)),
     "command.link has data, which is not in HERE/work | correct its name"),
    "a program for another engine": (lambda at: resolve(Experiment(model=Model(preset="gpt2"), command=SOUND), PROFILE),
     "the table [command] is given, but engine deepspeed-3d does not start a program of yours | set engine.name = "
     '"command", or leave [command] out'),
    "a plan for another engine": (planned,
     "the table [plan] is given, but plan already knows engine ddp | leave [plan] out, which is for engine "
     "command; for Megatron-LM set engine.megatron_args"),
    # a training as it is planned
    "tp of other heads": (training(tp=3), "tp 3 does not divide the 32 heads | use a tp that divides 32"),
    "stages without layers": (training(pp=8, vp=5),
     "pp 8 x vp 5 needs as many layers, but the model has 32 | use a pp x vp of 32 or fewer"),
    "cp of another length": (training(cp=3),
     "cp 3 does not divide the 8192 tokens of a sequence | use a cp that divides 8192"),
    "cp of other heads": (training(cp=16, tp=4),
     "cp 16 does not divide the 8 heads of a rank, which it exchanges for tokens | use a cp that divides 8"),
    "a kernel that is not known": (training(attention="fa5"),
     "attention is 'fa5', which is not known | use one of unfused, triton, fa2, fa3, cudnn, cudnn-fp8, te, sdpa, flex"),
}
# fmt: on


@pytest.mark.parametrize("name", ROWS)
def test_it_is_refused_so(name: str, tmp_path: Path) -> None:
    check_refusal(ROWS[name], tmp_path)
