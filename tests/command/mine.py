"""Four programs of others' kind, with the experiments that start them: a bash loop, the same in Python that hides its
environment, nanoGPT's manner of train.py under torchrun, and transformers' Trainer under accelerate."""

import json
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_gpt.core.process import start_time
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.tables import toml_value
from tests.processes import command_of, send, started_with

PROGRAMS = Path(__file__).parent / "programs"
_LOOP = {"per": "job", "resume": "{checkpoint}", "checkpoints": "out/ckpt-*", "complete": "{checkpoint}/.done"}
_MEETING = "--nnodes={nodes} --nproc-per-node=$GPUS_PER_NODE --node-rank=$NODE_RANK --master-addr=$MASTER_ADDR"
COMMANDS: dict[str, dict[str, Any]] = {
    "loop": {"run": "bash loop.sh", **_LOOP},
    # By its whole path it can be found when its environment cannot.
    "titled": {"run": f"exec {sys.executable} {{run}}/work/titled.py", **_LOOP},
    "nano": {
        "run": f"{sys.executable} -m torch.distributed.run {_MEETING} --master-port=$MASTER_PORT "
        "train.py --out_dir={run}/checkpoints --max_iters=$STEPS --step_s=$STEP_S",
        "per": "node",
        "resume": "--init_from={checkpoint}",
        "checkpoints": "{run}/checkpoints/ckpt-*.pt",
    },
    "hf": {
        "run": f"{sys.executable} -m accelerate.commands.launch --cpu --num_processes={{gpus}} "
        "--num_machines={nodes} --machine_rank=$NODE_RANK --main_process_ip=$MASTER_ADDR "
        "--main_process_port=$MASTER_PORT --mixed_precision=no --num_cpu_threads_per_process=1 "
        "hf_train.py --output_dir={run}/checkpoints --max_steps=$STEPS --step_s=$STEP_S",
        "per": "node",
        "resume": "--resume_from_checkpoint {checkpoint}",
        "checkpoints": "{run}/checkpoints/checkpoint-*",
        "complete": "{checkpoint}/trainer_state.json",
    },
}


def experiment(
    folder: Path, name: str, changes: Mapping[str, Any] | None = None, tables: Mapping[str, Any] | None = None
) -> Path:
    """The experiment of one program, beside a folder with a copy of all. `changes` are of [command]."""
    work = folder / "work"
    if not work.is_dir():
        shutil.copytree(PROGRAMS, work)
    command = {"workdir": "work", **COMMANDS.get(name, {}), **(changes or {})}
    everything = {"engine": {"name": "command"}, "command": command, **(tables or {})}
    lines = [f'name = "{name}"']
    for table, keys in everything.items():
        lines += [f"[{table}]", *(f"{key} = {toml_value(value)}" for key, value in keys.items() if value is not None)]
    (path := folder / f"{name}.toml").write_text("\n".join(lines) + "\n")
    return path


def loss_of_loop(step: int) -> float:
    """What loop.sh prints: awk's six digits."""
    return float(f"{4 / step:.6g}")


def losses(run: RunFolder) -> dict[int, float]:
    """Step -> loss over all attempts. A step that was made twice must have had the same loss."""
    merged: dict[int, float] = {}
    for attempt in run.attempts():
        text = attempt.metrics.read_text() if attempt.metrics.exists() else ""
        for line in map(json.loads, text.splitlines()):
            assert merged.setdefault(line["step"], line["loss"]) == line["loss"], f"step {line['step']} differs"
    return merged


def processes(run: RunFolder, *words: str) -> dict[int, str]:
    """{pid: start time} of the run's processes whose command line has the words, and is not a supervisor's."""
    ours = {pid: start_time(pid) for pid in started_with(*words, HPC_GPT_RUN=str(run.path))}
    return {pid: started for pid, started in ours.items() if started and "hpc_gpt.trainer" not in command_of(pid)}


def kill(run: RunFolder, *words: str) -> None:
    """SIGKILL to those processes."""
    for pid in processes(run, *words):
        send(pid, signal.SIGKILL)
