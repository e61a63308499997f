"""The record of a job script on a real cluster has what `report` reads in the script's own log."""

import json
import time
from collections.abc import Callable

import pytest

from tests.slurm.launcher import Job, Launcher

# Prints lines as a program does, a bar without newlines on stderr; a line `%out` or `%err` changes the stream.
REPLAY = r"""
import sys, time
stream = sys.stdout
for line in open(sys.argv[1], newline="\n"):
    if line.rstrip() in ("%out", "%err"):
        stream = sys.stderr if "err" in line else sys.stdout
        continue
    stream.write(line.replace("\\r", "\r").rstrip("\n") if "\\r" in line else line)
    stream.flush()
    time.sleep(0.02)
"""
SCRIPT = """#!/bin/bash
#SBATCH --job-name={name} -N 1 --ntasks=1 --gres=gpu:2 --time=9 {options}
python3 -I -u replay.py lines
"""
# Keys that say which run it is and when, which a log alone has by its name and clocks.
OF_THE_RUN = {
    "run",
    "name",
    "dialect",
    "engine",
    "job_id",
    "nodes",
    "started",
    "ended_at",
    "attempts",
    "ended",
    "cause",
}
OF_THE_RUN |= {"node_list", "config_hash", "settings", "versions", "flags", "flag_kinds", "sources"}
OF_THE_RUN |= {"gpu_hours", "goodput", "gpu_hours_by"}


def stamp(second: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(1_780_000_000 + second))


def megatron() -> list[str]:
    arguments = {"global_batch_size": 64, "hidden_size": 768, "micro_batch_size": 4, "num_attention_heads": 12,
                 "num_layers": 12, "padded_vocab_size": 50304, "seq_length": 2048, "train_iters": 30, "world_size": 4,
                 "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "bf16": True}  # fmt: skip
    sizes = "data-parallel size: 2, context-parallel size: 1, tensor-model-parallel size: 2"
    return [
        f"using world size: 4, {sizes}, pipeline-model-parallel size: 1",
        "------------------------ arguments ------------------------",
        *(f"  {key} {'.' * (48 - len(key))} {value}" for key, value in arguments.items()),
        "-------------------- end of arguments ---------------------",
        *(
            f" [{stamp(0.3 * step)}] iteration {step:8d}/{30:8d} | consumed samples: {64 * step:12d} | elapsed time per"
            f" iteration (ms): {300 + step % 7:.1f} | throughput per GPU (TFLOP/s/GPU): 104.{step % 9} | learning rate:"
            f" 1.5E-04 | global batch size:    64 | lm loss: {10 - step / 10:.6E} | loss scale: 1.0 | grad norm: 1.2 |"
            " number of skipped iterations:   0 | number of nan iterations:   0 |"
            for step in range(1, 31)
        ),
    ]


def deepspeed() -> list[str]:
    lines = [
        f"[{stamp(0)}] [INFO] [logging.py:96:log_dist] [Rank 0] DeepSpeed info: version=0.14.2, git-hash=unknown",
        "[INFO] data_parallel_size: 2, parameter_parallel_size: 2",
    ]
    for step in range(10, 310, 10):
        lines += [
            f"[{stamp(2 * step)},054] [INFO] [logging.py:96:log_dist] [Rank 0] step={step}, skipped=0, lr=[0.0003],"
            " mom=[(0.9, 0.95)]",
            f"steps: {step} loss: {7.1 - step / 100:.4f} iter time (s): {1.99 + step % 3 / 100:.3f} samples/sec: 16.0",
            f"[{stamp(2 * step)},054] [INFO] [utils.py:838:see_memory_usage] MA 41.2 GB         Max_MA 54.2 GB"
            "         CA 60.0 GB         Max_CA 61 GB ",
        ]
    return lines


def nanogpt() -> list[str]:
    lines = ["tokens per iteration will be: 491,520", "number of parameters: 123.59M"]
    for step in range(0, 200, 10):
        lines.append(f"iter {step}: loss {9 - step / 50:.4f}, time {251 + step % 3:.2f}ms, mfu {30 + step % 2:.2f}%")
    return lines


def torchtitan() -> list[str]:
    head = "[rank0]:[titan] {} - root - INFO - "
    at = f"{stamp(0)},334"
    lines = [
        head.format(at) + "CUDA capacity: NVIDIA H100 with 79.97GiB memory",
        head.format(at) + "Model llama3 8B size: 8,030,261,248 total parameters",
        head.format(at) + "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=4, cp=1, tp=1, ep=1",
        head.format(at) + "Trainer is initialized with local batch size 2, global batch size 8, gradient accumulation"
        " steps 1, sequence length 8192, total steps 200 (warmup 2)",
    ]
    return lines + [
        head.format(f"{stamp(1.4 * step)},334") + f"step: {step:2}  loss: {8 - step / 100:.4f}  grad_norm:  1.1012"
        f"  memory: 59.79GiB(62.94%)  tps: {11_560 + step % 3:,}  tflops: 578.1  mfu: 58.45%"
        for step in range(10, 210, 10)
    ]


def hf_trainer() -> list[str]:
    """The bar goes to stderr, without newlines; the figures to stdout."""
    lines = ["%err", r"\r  0%|          | 0/60 [00:00<?, ?it/s]"]
    for step in range(1, 61):
        spent, left = step // 2, (60 - step) // 2
        bar = f"{step}/60 [00:{spent:02}<00:{left:02},  1.85it/s]"
        lines += ["%err", rf"\r{100 * step // 60:3}%|{'#' * (step // 6):10}| {bar}"]
        if step % 10 == 0:
            figures = f"'loss': '{5.4 - step / 400:.3f}', 'grad_norm': '1.21', 'learning_rate': '4e-05'"
            lines += ["%out", f"{{{figures}, 'epoch': '{step / 30:.2f}'}}"]
    done = "'train_runtime': '32.4', 'train_samples_per_second': '14.8', 'train_steps_per_second': '1.85'"
    return [*lines, "%out", f"{{{done}, 'train_loss': '5.301', 'epoch': '2'}}"]


PROGRAMS: dict[str, Callable[[], list[str]]] = {
    "megatron": megatron,
    "deepspeed": deepspeed,
    "nanogpt": nanogpt,
    "torchtitan": torchtitan,
    "hf": hf_trainer,
    "hf-apart": hf_trainer,
}


@pytest.mark.timeout(600)
def test_the_record_has_what_report_reads_in_the_log(launcher: Launcher) -> None:
    place = launcher.place("records")
    jobs: dict[str, Job] = {}
    for name, lines in PROGRAMS.items():
        (folder := place / name).mkdir()
        (folder / "replay.py").write_text(REPLAY)
        options = "--output=%x.out --error=%x.err" if name == "hf-apart" else "--output=%x.out"
        (folder / "lines").write_text("\n".join(lines()) + "\n")
        (folder / f"{name}.sh").write_text(SCRIPT.format(name=name, options=options))
        jobs[name] = launcher.submit(f"{name}.sh", cwd=folder)
    for name, job in jobs.items():
        job.wait_end()
        own = record_of(launcher, str(job.run.path))
        of_log = record_of(launcher, *map(str, sorted((place / name).glob("*.[oe][ur][tr]"))))
        stated = {key: value for key, value in of_log.items() if value is not None and key not in OF_THE_RUN}
        assert {key: own[key] for key in stated} == stated, name
        assert own["ended"] == "done", (name, own["cause"])
        assert own["loss_first"] is not None, name
        assert own["step_s"] is not None, name


def record_of(launcher: Launcher, *names: str) -> dict:
    """The record of a run, or of logs that are one run."""
    (record,) = json.loads(launcher.run("report", *names, "--json")[0])["records"]
    return record
