"""What each script does, in order: `main` in bash, each function below the rule and each program a stand-in that prints
its words. main.txt has what is to be printed: of calls without arguments one line, and of what the training's Python is
started with its words and the variables in which that differs from a plain run's."""

import os
import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.settings.cluster import Container, load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Command, Engine, Experiment, Job, LayoutRequest
from hpc_gpt.core.settings.services import Notify
from hpc_gpt.launcher.render import render_script
from tests.golden.test_scripts import MEGATRON_LM, SCRIPTS, _as_it_is, _render
from tests.programs import put, ran

TABLE = dict(re.findall(r"^== (.*)\n((?:(?!== ).*\n)*)", Path(__file__).with_name("main.txt").read_text(), re.M))
PYTHON = (
    'echo "${0##*/} $*"; echo "+ignores" $(trap -p | sed -n "s/.*\'\' SIG//p"); env -u _ -u SHLVL -u in_job | sort |'
)
PYTHON += ' LC_ALL=C comm -3 given - | sed "s/^[^\\t]/-&/; s/^\\t/+/"'
SRUN = 'while [ "$#" != 0 ] && [ "$1" != bash ]; do printf " %s" "$1"; shift; done; echo; exec "$@"'
OWN = """start_attempt() { echo start_attempt; export in_job=$((${in_job:--1} + 1)); overlap=(--overlap); }
find_sound_nodes() { printf "find_sound_nodes"; "${probe[@]}"; sound=n3,n4; return "${UNSOUND:-0}"; }
first_host() { echo "h of $1"; }
run_ranks() { printf "run_ranks"; [ "$1" = srun ] || { printf " $1"; "$@"; return; }; shift; srun "$@"; }
in_visit() { shift; srun "$@"; }
unpack_here() { echo unpack_here; python=(staged-python); }
next_visit() { [ -z "${visit:-}" ] && visit=/v; }
restarts_here() { echo restarts_here; [ "${RESTARTS:-0}" -gt 0 ] && RESTARTS=$((RESTARTS - 1)); }
ask_to_start() { echo ask_to_start; rc=4 n=2; [ -z "${PORT:-}" ] || export MASTER_PORT=$PORT; }
run_script() { echo "run_script ${HPC_GPT_RUN:-no} ${HPC_GPT_ELEMENT:-no} $HPC_GPT_PYTHON ${arguments[*]:-no}"; rc=5; }
die() { echo "die $*"; exit 1; }
fail() { echo "fail $*"; exit 1; }
"""
JOB = {
    "SLURM_JOB_ID": "40009", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "RANK": "77",
    "SLURM_LOCALID": "1", "SLURM_CPUS_PER_TASK": "3", "SLURM_CPU_BIND_LIST": "x", "SLURM_MEM_BIND": "x",
    "HPC_GPT_RUN": "/r", "TORCHELASTIC_RUN_ID": "y", "NODE_RANK": "1", "GROUP_RANK": "1", "ROLE_RANK": "1",
}  # fmt: skip
HERE = {"SUBMITIT_LOCAL_GLOBALID": "6", "SUBMITIT_LOCAL_NTASKS": "8", "SUBMITIT_LOCAL_LOCALID": "2",
        "HPC_GPT_RUN": "/r", "PYTHONPATH": "/mine", "HPC_GPT_ATTEMPT": "2"}  # fmt: skip
GIVEN = {"MASTER_PORT": "8", "PORT": "7", "HPC_GPT_MASTER_ADDR": "a", "OMP_NUM_THREADS": "5", "NCCL_DEBUG": "INFO",
         "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "PYTORCH_ALLOC_CONF": "x", "HPC_GPT_PYTHON": "python"}  # fmt: skip
ONE = {"data.source": "random", "layout.gpus": 1, "layout.tp": 1, "layout.pp": 1}
BOUND = ("--gpus-per-task=1", "--gpu-bind=closest", "--mpi=none")
# The variables of a rank of Slurm as they most often are; of one here the first five.
USUAL = TABLE["usual"].split()


def beside(profile: str, **changes: Any) -> str:
    asked = {"notify.command": "true", "layout.gpus": 16}
    return _render(profile, overrides=asked | changes.pop("overrides", {}), **changes)


CASES: dict[str, tuple[Callable[[], str], dict[str, str], tuple[str, ...]]] = {
    **{name: (SCRIPTS[name], JOB, ()) for name in (
        "demo-slurm", "stage-tar", "stage-warm-slurm", "preflight-apptainer", "preflight-pyxis",
        "command-job-preflight", "command-job-alone", "command-node-slurm",
    )},
    "given": (SCRIPTS["demo-slurm"], JOB | GIVEN, ()),
    "a restart in the job": (SCRIPTS["preflight-apptainer"], JOB | {"RESTARTS": "1"}, ()),
    "all beside": (lambda: beside("h100-80g-8", preflight=True, chain="singleton"), JOB, ()),
    "one and no preflight": (
        lambda: beside("h100-80g-8", chain="none", overrides=ONE, stage="/x.tar"), JOB, ()
    ),
    "unsound": (lambda: _render(preflight=True), JOB | {"UNSOUND": "1"}, ()),
    "modules": (
        lambda: _render(modules=("a/1", "b 2"), environment={"A": "it's", "PYTORCH_CUDA_ALLOC_CONF": "b"}), JOB, ()
    ),
    "modules kept": (lambda: _render(modules=("a/1",), purge_modules=False, python="python"), JOB, ()),
    "setup": (
        lambda: _render(
            setup=("SITE=one; module use /sw", "export TREE=$SITE # and"), modules=("a/1",),
            environment={"CACHE": "/tmp/${TREE}-${NONE}$TREE$(echo x)`echo y`${A:-b}"},
        ), JOB, (),
    ),
    "setup that fails": (lambda: _render(setup=("echo one", "cat /nowhere/file", "echo never")), JOB, ()),
    "setup that bash cannot read": (lambda: _render(setup=("if true", "echo never")), JOB, ()),
    "one GPU a task": (lambda: _render(srun=BOUND), JOB, ()),
    "one task a node": (
        lambda: render_script(resolve(
            Experiment("a", engine=Engine("command"), layout=LayoutRequest(gpus=8), job=Job(srun=BOUND),
                       command=Command("a", per="node", workdir="/w")),
            load_profile("h100-80g-8"),
        )), JOB, (),
    ),
    "AMD": (lambda: _render(device="mi300x", fabric="Slingshot-11 4x200G"), JOB, ()),
    "hsn of a user": (lambda: _render(fabric="slingshot 4x200G"), JOB | {"NCCL_SOCKET_IFNAME": "hsn1"}, ()),
    "hsn of a profile": (
        lambda: _render(fabric="slingshot 4x200G", environment={"NCCL_SOCKET_IFNAME": "hsn2"}), JOB, ()
    ),
    "EDF": (lambda: _render("h100-80g-8", container=Container("environment", "a's.toml"), preflight=True), JOB, ()),
    "no module": (lambda: _render(modules=("bad",), purge_modules=False), JOB, ()),
    "no venv": (lambda: _render(venv="/opt/none"), JOB, ()),
    "megatron-lm-slurm": (SCRIPTS["megatron-lm-slurm"], JOB, ()),
    "own megatron": (SCRIPTS["megatron-lm-slurm"], JOB | {"MEGATRON_LM": "/mine"}, ()),
    "no megatron": (lambda: _render(overrides=MEGATRON_LM), JOB, ()),
    "no megatron here": (SCRIPTS["megatron-lm-local"], HERE, ()),
    **{f"{name}, by hand": (SCRIPTS[name], {"HPC_GPT_LOGS": "/l"}, ()) for name in ("demo-local", "stage-tar-local")},
    "no python": (lambda: _render("local", python="/nowhere/python"), {}, ()),
    **{name: (SCRIPTS[name], HERE, ()) for name in ("demo-local", "stage-tar-local")},
    "script": (SCRIPTS["job-script-slurm"], JOB, ()),
    "script of an element": (
        lambda: _as_it_is("generic-slurm"), {**JOB, "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"},
        ("/proc", "the-python", "--x=y"),
    ),
    "script again": (lambda: _as_it_is("generic-slurm", "singleton"), JOB, ("/s", "the-python", "--x=y")),
    "script on sound nodes": (
        lambda: _as_it_is("generic-slurm", job=Job(preflight=True), notify=Notify("true")), JOB, ()
    ),
    "script on no sound node": (
        lambda: _as_it_is("generic-slurm", job=Job(preflight=True)), JOB | {"UNSOUND": "1"}, ()
    ),
    "script here, by hand": (SCRIPTS["job-script-local"], {"HPC_GPT_LOGS": "/l"}, ()),
    "script here": (SCRIPTS["job-script-local"], {**HERE, "HPC_GPT_GIVEN": "g"}, ()),
}  # fmt: skip


def played(folder: Path, script: str, words: tuple[str, ...], variables: dict[str, str]) -> str:
    """All that a script prints, and its exit code, with a folder that stands for /opt."""
    head, _, rest = script.replace("/opt/", f"{folder}/opt/").partition("# === do not edit below")
    names = re.findall(r"^(\w+)\(\) [{(]", rest.partition("\n# --- settings")[0], re.MULTILINE)
    stand_ins = [f'{name}() {{ echo "{name}${{*:+ $*}}"; }}' for name in names]
    (folder / "job.sh").write_text("\n".join([head, *stand_ins, OWN, "main"]))
    for name in ("python3", "python", "staged-python", "apptainer", "the-python"):
        put(folder / "bin" / name, f"#!/bin/bash\n{PYTHON}\n")
    for name, text in (("srun", SRUN), ("scontrol", "echo n1; echo n2"), ("nproc", "echo 8"), ("date", "echo now")):
        put(folder / "bin" / name, f"#!/bin/bash\n{text}\n")
    put(folder / "opt/venv/bin/activate", "echo activate; export VIRTUAL_ENV=/e\n")
    put(folder / "modules/init/bash", 'module() { echo "module $*"; [ "$2" != bad ]; }\n')
    own = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "MODULESHOME": f"{folder}/modules", "HOSTNAME": "n1",
           "GOMP_SPINCOUNT": "9", **variables}  # fmt: skip
    (folder / "given").write_text("".join(f"{name}={value}\n" for name, value in {**own, "PWD": folder}.items()))
    ran("sort", "-o", folder / "given", folder / "given", env={"PATH": own["PATH"]}, code=0)
    # A test may be started by a shell that ignores some signals.
    done = ran("env", "--default-signal", "bash", "job.sh", *words, cwd=folder, env=own)
    said = f"{done.stdout}{done.stderr}exit={done.returncode}\n".replace(str(folder), "")
    return re.sub(r"(GIVEN=H4sI|now-)\S+", r"\1…", said)


def shortened(said: str) -> str:
    """Calls that follow each other on one line; after a program its own variables, and the usual that it lacks."""
    lines: list[str] = []
    for kind, group in groupby(said.splitlines(), lambda line: "+" if line[:1] in ("+", "-") else " " in line):
        found = list(group)
        if kind == "+":
            most = USUAL if "-RANK=77" in found else USUAL[:5]
            own, lacks = [each for each in found if each not in most], [each for each in most if each not in found]
            lines[-1] += (
                " " + " ".join(own) + " lacks" * bool(lacks) + "".join(f" {each.partition('=')[0]}" for each in lacks)
            )
        else:
            lines += found if kind else [" ".join(found)]
    return "".join(f"{line}\n" for line in lines)


@pytest.mark.parametrize("name", CASES)
def test_a_script_does_this_in_order(name: str, tmp_path: Path) -> None:
    render, variables, words = CASES[name]
    assert shortened(played(tmp_path, render(), words, variables)) == TABLE[name]


def test_a_script_asks_for_what_its_site_and_experiment_say() -> None:
    asked = [line.removeprefix("#SBATCH ") for line in SCRIPTS["site-of-its-own"]().splitlines() if "#SBATCH" in line]
    assert asked == [
        "--job-name=demo", "--account=abc@v100", "--partition=gpu_p13", "--qos=qos_gpu-t3", "--constraint=v100-16g",
        "--reservation=school", "--dependency=afterok:12", "--nodes=1", "--ntasks-per-node=4", "--gres=gpu:v100:4",
        "--cpus-per-task=5", "--mem=0", "--time=02:00:00", "--exclusive", "--no-requeue", "--open-mode=append",
        "--signal=USR2@120", "--output=%x-%j.out", "--hint=nomultithread",
    ]  # fmt: skip
