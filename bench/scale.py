"""What grows with ranks, checkpoints, jobs, rows, and bytes: `python bench/scale.py [CASE…] [--times N]`.

Each case is what one process does, with files and messages as so many would leave them, at three sizes that double, N
times those of tests/test_scale.py: seconds of CPU, most memory of Python's, and bytes, of a message to rank 0, on the
disk, or copied, and of the CPU by which power of the size it grows. Nothing passes or fails here.
"""

import argparse
import gc
import io
import json
import os
import pickle
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import log
from pathlib import Path
from random import Random
from struct import pack, unpack
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.sweep import make_stand_ins, sweep_text
from hpc_gpt.core.runs.find_runs import list_runs
from hpc_gpt.core.runs.run_folder import RunFolder

# A checkpoint of this step has a longer name than the one before.
LONGER_NAME = 100_000_000


@dataclass(frozen=True)
class Case:
    """`prepare` makes what is there, in an empty folder and of a size, and gives the work, which returns its bytes."""

    of: str
    first: int
    prepare: Callable[[Path, int], Callable[[], int]]

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.first, 2 * self.first, 4 * self.first


def cpu_of(case: Case, size: int) -> tuple[float, int]:
    """(seconds of CPU, bytes) of the work. What was there before is no part of it: a search of Python's for cycles in
    all that a session of tests holds takes longer than some of these, and comes at one size or another."""
    with tempfile.TemporaryDirectory() as name:
        work = case.prepare(Path(name), size)
        gc.collect()
        gc.freeze()
        try:
            began = time.process_time()
            done = work()
            return time.process_time() - began, done
        finally:
            gc.unfreeze()


def memory_of(case: Case, size: int) -> int:
    """The most bytes that Python has had during the work."""
    with tempfile.TemporaryDirectory() as name:
        work = case.prepare(Path(name), size)
        tracemalloc.start()
        work()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


# --- the cases


def gpu_readings(folder: Path, ranks: int) -> Callable[[], int]:
    """The end of an attempt on rank 0: what every rank sends after a day, and the figures of all."""
    from hpc_gpt.trainer.supervision.gpus import GpuSums, summarise

    day = GpuSums(8_640, 97.5 * 8_640, 97.5**2 * 8_640, 1700.0 * 8_640, 640.0 * 8_640)
    messages = [pickle.dumps(day) for _ in range(ranks)]

    def work() -> int:
        assert summarise(map(pickle.loads, messages))["gpu_util_mean"] == 97.5
        return sum(map(len, messages))

    return work


def checkpoints(folder: Path, count: int) -> Callable[[], int]:
    """keep_last = 3 among so many, half of them with a longer name."""
    from hpc_gpt.core.checkpoints.find_checkpoints import checkpoint_folder_name
    from hpc_gpt.core.checkpoints.retention import Retention

    steps = range(LONGER_NAME - count // 2, LONGER_NAME + count // 2)
    for step in steps:
        (place := folder / checkpoint_folder_name(step)).mkdir()
        (place / "weights").write_bytes(b"weights")
        marker = {"schema": 1, "step": step, "files": {"weights": {"bytes": 7, "crc32": 0}}}
        (place / "complete.json").write_text(json.dumps(marker))

    def work() -> int:
        assert len(Retention(keep_last=3).apply(folder, steps[-1])) == count - 3
        return sum(len(name) for name in os.listdir(folder))

    return work


def jobs(folder: Path, count: int) -> Callable[[], int]:
    """status of so many open jobs that the queue has forgotten, by an accounting that knows them, and of an array."""
    from hpc_gpt.launcher.watch.status import _slurm_states

    answers = {"squeue": "exit 0", "sacct": 'tr , "\\n" <<<"${@: -1}" | sed "s/$/|FAILED/"'}
    for name, line in answers.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    ids = [*(str(LONGER_NAME + number) for number in range(count)), *(f"7_{number}" for number in range(count))]

    def work() -> int:
        with variables(PATH=f"{folder}:{os.environ['PATH']}"):
            words, silence = _slurm_states(ids, lambda client: client.answer(300), None)
        assert (len(words or ()), silence) == (2 * count + 1, ""), "with each element, and the array"
        return sum(map(len, ids))

    return work


def rows(folder: Path, count: int) -> Callable[[], int]:
    """submit --sweep of so many rows, each with 4 kB of remarks, with stand-ins for Slurm."""
    from tests.cli.command import in_process

    make_stand_ins(folder / "bin")
    (folder / "many.toml").write_text(sweep_text(count) + f"# {'remark ' * 600}\n" * count)
    own = {f"HPC_GPT_{key}": str(folder / key.lower()) for key in ("LOGS", "CONFIG", "STATE", "DATA")}
    own |= {"HPC_GPT_CLUSTER": "generic-slurm", "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}

    def work() -> int:
        in_process("submit", "--sweep", "many.toml", cwd=folder, environment=own, code=0)
        found = [Path(top, name).lstat() for top, _, names in os.walk(folder / "logs") for name in names]
        return sum({each.st_ino: each.st_size for each in found}.values())

    return work


def _log(folder: Path, kib: int) -> Path:
    line = b"step %08d | loss 3.2100 | grad norm 0.81 | 12,345 tokens/s | 1.50 s a step ".ljust(127, b".") + b"\n"
    (folder / "log").write_bytes(line * (8 * kib))
    return folder / "log"


def whole_log(folder: Path, kib: int) -> Callable[[], int]:
    """logs: all of it, thirty times, to where it costs nothing."""
    from hpc_gpt.launcher.watch.logs import copy_tail

    log = _log(folder, kib)

    def work() -> int:
        with open(os.devnull, "wb") as out:
            return max(copy_tail(log, None, out) for _ in range(30))

    return work


def tail_of_log(folder: Path, kib: int) -> Callable[[], int]:
    """logs --tail: the last hundred lines, a hundred times."""
    from hpc_gpt.launcher.watch.logs import copy_tail

    log = _log(folder, kib)

    def work() -> int:
        for _ in range(100):
            copy_tail(log, 100, out := io.BytesIO())
        return len(out.getvalue())

    return work


def last_step(folder: Path, sources: int) -> Callable[[], int]:
    """The last metrics of a mixture of so many sources, of a thousand lines."""
    from hpc_gpt.core.runs.run_folder import Attempt

    line = json.dumps({"step": 7, "loss_eval_by": {f"source-{number}": 2.5 for number in range(sources)}}) + "\n"
    attempt = Attempt(folder)
    attempt.metrics.write_text(line * 100)

    def work() -> int:
        for _ in range(20):
            assert attempt.last_metrics()["step"] == 7
        return len(line)

    return work


def long_run(folder: Path, steps: int) -> RunFolder:
    """A run that has trained so many steps, in lines as our trainer writes them."""
    from tests.made_runs import STARTED, add_attempt, make_run

    run, random = make_run(folder / "logs"), Random(0)
    attempt = add_attempt(run, [], "error", cause="rank 0: boom")
    memory = {"memory_allocated_gib": [31.5, 30.25], "memory_reserved_gib": [35.5, 34.5]}
    with open(attempt.metrics, "w") as file:
        for step in range(1, steps + 1):
            loss, norm = unpack("2f", pack("2f", 2 + 4 / step + random.random() / 10, random.random()))
            step_s = round(0.5 + random.random() / 50, 6)
            saved, at = None if step % 1000 else 3.25, round(STARTED + step * 0.51, 3)
            line = {"step": step, "loss": loss, "loss_eval": None, "grad_norm": norm, "lr": 1e-3 * random.random(),
                    "step_s": step_s, "tokens_per_s": round(8192 / step_s, 1), "tokens": 8192, "skipped": False,
                    **memory, "save_s": saved, "time": at}  # fmt: skip
            file.write(json.dumps(line) + "\n")
    return run


def first_report(folder: Path, steps: int) -> Callable[[], int]:
    """report of a run of so many steps."""
    from tests.made_runs import read_run

    run = long_run(folder, steps)

    def work() -> int:
        assert read_run(run).steps_used
        return run.attempts()[0].metrics.stat().st_size

    return work


def why(folder: Path, steps: int) -> Callable[[], int]:
    """why of it, ten times."""
    from hpc_gpt.report.why import explain

    run = long_run(folder, steps)

    def work() -> int:
        for _ in range(10):
            assert explain(str(run.path), folder).ended == "error"
        return run.attempts()[0].metrics.stat().st_size

    return work


def many_runs(folder: Path, count: int) -> Callable[[], int]:
    """report of a folder of so many runs that ended long ago, of 200 steps each, the first time."""
    run = long_run(folder, 200)
    for path in run.path.rglob("*"):
        os.utime(path, (run.path.stat().st_mtime - 86_400,) * 2)
    for number in range(1, count):
        shutil.copytree(run.path, run.path.with_name(f"20260101-000000-{number:04x}"))

    return partial(_report_of_many, folder, count)


def _report_of_many(folder: Path, count: int) -> int:
    from hpc_gpt.report.gather import gather_paths

    gathered = gather_paths([str(folder / "logs")], folder / "logs", records_only=True)
    assert len(gathered.records) == count
    return sum(path.stat().st_size for path in (folder / "logs").rglob("*") if path.is_file())


_MEGATRON_HEAD = (
    "using world size: 64, data-parallel-size: 8, tensor-model-parallel size: 4, pipeline-model-parallel size: 2 \n"
    "using torch.bfloat16 for parameters ...\n"
    " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 807207963\n"
)


def foreign_logs(folder: Path, count: int) -> None:
    """So many logs, of nanoGPT, Megatron-LM and DeepSpeed's pipeline in turn, of 200 steps each."""
    for number in range(count):
        random = Random(number)
        step_s, kind = 0.2 + random.random(), number % 3
        lines = ["number of parameters: 124.00M\n"] if kind == 0 else [_MEGATRON_HEAD] if kind == 1 else []
        for step in range(1, 201):
            loss, took_s = 2 + 8 / step + random.random() / 10, step_s + random.random() / 50
            if kind == 0:
                lines.append(f"iter {step}: loss {loss:.4f}, time {1000 * took_s:.2f}ms, mfu 34.78%\n")
            elif kind == 1:
                lines.append(
                    f" [2024-05-01 22:{step // 60:02}:{step % 60:02}] iteration {step:8d}/     200 | consumed samples:"
                    f" {512 * step:12d} | elapsed time per iteration (ms): {1000 * took_s:.1f} | learning rate:"
                    f" 1.5E-04 | global batch size:   512 | lm loss: {loss:.6E} | grad norm: 0.813 | number of skipped"
                    " iterations:   0 | number of nan iterations:   0 |\n"
                )
            else:
                lines.append(f"steps: {step} loss: {loss:.4f} iter time (s): {took_s:.3f} samples/sec: 340.122\n")
        (place := folder / "logs" / f"run-{number:05}").mkdir(parents=True)
        (place / "main.log").write_text("".join(lines))
        os.utime(place / "main.log", (1_700_000_000 + number,) * 2)


def many_logs(folder: Path, count: int) -> Callable[[], int]:
    """report of so many logs of other programs."""
    foreign_logs(folder, count)
    return partial(_report_of_many, folder, count)


def many_states(folder: Path, count: int) -> Callable[[], int]:
    """status --all of them."""
    from hpc_gpt.launcher.watch.status import read_status

    many_runs(folder, count)

    def work() -> int:
        rows = read_status(list_runs(folder / "logs"))
        assert {row.state for row in rows} == {"error"}
        return len(rows)

    return work


def preflight(folder: Path, nodes: int) -> Callable[[], int]:
    """The judge of a preflight of nodes of 8 ranks, in a layout with each axis, by what its ranks say."""
    from hpc_gpt.core.settings.layout import Layout
    from hpc_gpt.trainer.preflight.nodes import Preflight
    from hpc_gpt.trainer.preflight.transfers import plan_transfers
    from hpc_gpt.trainer.preflight.verdict import encode
    from tests.trainer.preflight.test_nodes import new_run

    names, layout = [f"node{number:05}" for number in range(nodes)], Layout(8, 4, nodes // 4)
    run = new_run(folder, nodes, 8, tp=8, pp=4, dp=nodes // 4, hidden=256, heads=8, layers=4)
    own: list[int] = [0] * layout.gpus
    for together in plan_transfers(layout, [name for name in names for _ in range(8)]):
        for each in together:
            for rank in each.ranks:
                own[rank] += 1
    sound = {"device": "NVIDIA H100 80GB HBM3", "devices": 8, "judged": True, "matmul_tflops": 600.0,
             "host_to_device_gb_s": 50.0, "memory_free_gib": 78.0, "versions": {"python": "3.11.7", "torch": "2.13.0",
             "deepspeed": "0.18.2", "numpy": "2.3.4", "cuda": "12.8", "nccl": "2.27.5"}}  # fmt: skip
    of_node = {"sees_run_folder": True, "write_mb_s": 400.0, "free_gib": 1e6}
    ranks = [(name, local) for name in names for local in range(8)]
    with open(folder / "figures", "w") as said:
        said.writelines(encode(name, local) for name, local in ranks)
        for name, local in ranks:
            figures = sound | (of_node if local == 0 else {})
            said.write(encode(name, local, figures=figures, port=None if local else 29500))
    with open(folder / "rates", "w") as said:
        for at, (name, local) in enumerate(ranks):
            rates = [3.0 if at // 8 == 1 else 20.0] * own[at]
            said.write(encode(name, local, network="NCCL uses ib0, gloo eth0"))
            said.write(encode(name, local, rates=rates, done=True))
    attempt = run.new_attempt()
    script = f'cat "{folder}/figures" && read -r plan && cat "{folder}/rates"'

    def work() -> int:
        judged = Preflight(run, attempt.number, names, ["bash", "-c", script])
        for name in names:
            (attempt.folder / "preflight" / f"node-{name}").touch()
        judged.judge()
        judged.write_table(io.StringIO())
        judged.write_figures()
        assert list(judged.bad) == ["node00001"]
        return (folder / "figures").stat().st_size + (folder / "rates").stat().st_size

    return work


def plan(folder: Path, gpus: int) -> Callable[[], int]:
    """plan of a model on so many GPUs: all layouts that fit, and the best."""
    from hpc_gpt.core.settings.presets import preset
    from hpc_gpt.planner.question import Question
    from hpc_gpt.planner.search import search
    from tests.planner.machines import machine_named

    machine = machine_named("h100-80g", 8, "infiniband 8x400G")
    question = Question(preset("llama3.1-405b"), gpus, 8, "bf16", 16_384)

    def work() -> int:
        assert search(question, machine).candidates
        return 0

    return work


def first_save(folder: Path, ranks: int) -> Callable[[], int]:
    """fsdp's first save on rank 0: the places of 20 tensors of each rank, until the index is written."""
    import torch

    from hpc_gpt.trainer.checkpoints.rank_files import RankFiles
    from hpc_gpt.trainer.checkpoints.states import INDEX, WEIGHT, Held, SavedIndex, Share, put_states
    from hpc_gpt.trainer.ranks import Peers

    about = {"step": 1, "optimizer": {}, "settings": {"layout.tp": 1}}
    names, sent = [f"blocks.{number}" for number in range(20)], list[int]()

    def held(rank: int) -> list[Held]:
        shares = [Share(name, (8 * ranks, 64), None, 0, 1, 512 * rank, 512, 8 * ranks) for name in names]
        return [Held(share, WEIGHT, torch.zeros(8, 64)) for share in shares]

    class One(Peers):
        """A rank, which keeps what it would send."""

        is_first = False

        def gather(self, value: Any) -> list[Any]:
            self.value = value
            return []

        def broadcast(self, value: Any) -> Any:
            return False if isinstance(value, bool) else value

    def sends(rank: int) -> Any:
        peer = One()
        peer.rank = rank
        put_states(RankFiles(peer), held(rank), about, SavedIndex())
        return pickle.dumps(peer.value)

    texts = [sends(rank) for rank in range(ranks)]

    class First(Peers):
        """Rank 0, which the others send what they have."""

        size = ranks

        def gather(self, value: Any) -> list[Any]:
            if isinstance(value[0], bool):
                return [value] * ranks
            sent.append(sum(map(len, texts)))
            return list(map(pickle.loads, texts))

    def save() -> int:
        sent.clear()
        put_states(files := RankFiles(First()), held(0), about, SavedIndex())
        files.write(folder)
        size = (folder / INDEX).stat().st_size
        for path in folder.iterdir():
            path.unlink()
        return sum(sent) + size

    return save


def watch_of_a_hang(folder: Path, ranks: int) -> Callable[[], int]:
    """One look of a watch for hangs: the heartbeats of nodes of 8 ranks, one of which is late, and the verdict."""
    from dataclasses import replace

    from hpc_gpt.core.processes.heartbeats import RankHeartbeat, line_of, read_heartbeats, write_heartbeat
    from hpc_gpt.trainer.supervision.heartbeat import LastHeartbeat, judge_heartbeats

    any_rank = RankHeartbeat(
        0, "n", 4711, 9, 40, "training", 310.0, 300.0, 1e9, True, "all_reduce", "loop.py:96 in run"
    )
    for first in range(0, ranks, 8):
        own, *others = (
            replace(any_rank, rank=rank, host=f"n{first // 8}", step=39 if rank == 5 else 40)
            for rank in range(first, first + 8)
        )
        write_heartbeat(folder, own, map(line_of, others))

    def work() -> int:
        seen = {rank: LastHeartbeat(last, 0.0) for rank, last in read_heartbeats(folder).items()}
        verdict = judge_heartbeats(seen, 33.0, 310.0)
        assert verdict is not None
        assert (verdict.rank, len(seen)) == (5, ranks)
        return sum(path.stat().st_size for path in folder.iterdir())

    return work


def again(prepare: Callable[[Path, int], Callable[[], int]]) -> Callable[[Path, int], Callable[[], int]]:
    """The same work for a second time, with what the first one has kept."""

    def prepared(folder: Path, size: int) -> Callable[[], int]:
        work = prepare(folder, size)
        work()
        return work

    return prepared


CASES = {
    "plan": Case("GPUs", 32_768, plan),
    "watch": Case("ranks", 1024, watch_of_a_hang),
    "first save": Case("ranks", 32, first_save),
    "preflight": Case("nodes", 128, preflight),
    "gpu readings": Case("ranks", 2_000, gpu_readings),
    "checkpoints": Case("checkpoints", 60, checkpoints),
    "status": Case("open jobs", 5_000, jobs),
    "sweep": Case("rows", 6, rows),
    "logs": Case("KiB", 4 << 10, whole_log),
    "logs --tail": Case("KiB", 1 << 10, tail_of_log),
    "report": Case("steps", 4_000, first_report),
    "why": Case("steps", 4_000, why),
    "report of many": Case("runs", 12, many_runs),
    "many again": Case("runs", 100, again(many_runs)),
    "logs of many": Case("logs", 12, many_logs),
    "status of many": Case("runs", 40, many_states),
    "last step": Case("sources", 250, last_step),
}


@contextmanager
def variables(**given: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(given)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--times", type=int, default=10)
    asked = parser.parse_args()
    for name in asked.cases or CASES:
        case = CASES[name]
        first = 0.0
        for size in case.sizes:
            size *= asked.times
            seconds, done = min(cpu_of(case, size) for _ in range(2))
            memory = memory_of(case, size) / 2**20
            first = seconds if size == case.first * asked.times else first
            law = f"  n^{log(seconds / first) / log(size / case.first / asked.times):.1f}" if seconds != first else ""
            what = f"{name:14} {size:>9,} {case.of:12} {seconds:8.3f} s"
            print(f"{what}  {memory:8.1f} MiB of memory  {done:>13,} bytes{law}", flush=True)


if __name__ == "__main__":
    main()
