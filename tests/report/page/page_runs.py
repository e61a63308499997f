"""Runs for the page, made as the readers would give them: several programs, restarts, NaN, failures, hostile names."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from hpc_gpt.core.runs.record import ON_CPU, Flag, Record
from hpc_gpt.reader.lines.part import Failure, Place
from hpc_gpt.reader.runs.run_read import RunRead
from tests.report.step_tables import step_table

HOSTILE = (
    "<script>window.hacked=1</script>", '"><img src=x onerror="window.hacked=2">',
    "</style></script><svg onload=window.hacked=3>", "javascript:window.hacked=4", "' onmouseover='window.hacked=5",
    "{{ 7 * 7 }}{% raw %}", "]]><!--",
)  # fmt: skip


def curve(steps: int = 100, attempts: int = 1, seed: int = 0, nan: tuple[int, ...] = (), skipped: tuple[int, ...] = ()):
    """A loss that falls from 12 towards 6 with noise; each later attempt starts five steps before the last end."""
    noise = np.random.default_rng(seed)
    own = max(1, steps // attempts)
    numbers, which = [], []
    for attempt in range(attempts):
        first = max(1, attempt * own + 1 - (5 if attempt else 0))
        last = steps if attempt == attempts - 1 else (attempt + 1) * own
        numbers += range(first, last + 1)
        which += [attempt + 1] * (last + 1 - first)
    step, attempt_of = np.array(numbers, float), np.array(which)
    loss = 6 + 6 * np.exp(-4 * step / steps) + noise.normal(0, 0.05, len(step))
    seconds = 120 + noise.normal(0, 2, len(step))
    starts = np.flatnonzero(np.diff(attempt_of, prepend=0))
    seconds[starts] *= 1.6
    loss[np.isin(step, nan)] = np.nan
    latest = dict(zip(numbers, which, strict=True))
    counts = np.array([latest[number] == attempt for number, attempt in zip(numbers, which, strict=True)])
    evaluated = np.arange(max(1, steps // 5), steps + 1, max(1, steps // 5), dtype=float)
    steady = np.ones(len(step), bool)
    steady[starts] = False
    return step_table(
        step=step, step_s=seconds, loss=loss, grad_norm=1 + noise.random(len(step)), attempt=attempt_of, steady=steady,
        counts=counts, skipped=np.isin(step, skipped), eval_step=evaluated,
        eval_loss=6.1 + 6 * np.exp(-4 * evaluated / steps),
    )  # fmt: skip


def megatron(**changes) -> Record:
    """Megatron-DeepSpeed's 52 B run on 64 GPUs."""
    record = Record(
        run="1587010", name="meg_gpt2_perf_n16", dialect="megatron", engine="megatron-lm", job_id="1587010", gpus=64,
        nodes=16, device="v100-32g", tp=4, pp=16, dp=1, micro_batch=4, micro_batches=256, global_batch=1024, seq=1024,
        hidden=8192, layers=64, heads=32, vocab=50432, params=51_970_000_000, recompute="full", dtype="fp16",
        started="2021-05-27T04:02:02Z", step_s=128.96, step_s_p10=127.1, step_s_p90=131.4, steps_used=98,
        warmup_steps=1, tokens_per_s=8131.0, tflops_seed=52.8, tflops_hardware=54.2, tflops_model=40.9, mfu=0.327,
        hfu=0.43, memory_allocated_gib=[22.1, *[20.4] * 2, *[20.3] * 2, *[20.2] * 2, *[20.1] * 3, *[20.0] * 5, 24.9],
        loss_first=12.79, loss_last=6.01, skipped_steps=0, nan_steps=0, gpu_hours=228.3, ended="done",
        sources={
            "tp": "meg_gpt2_perf_n16.out:35", "pp": "meg_gpt2_perf_n16.out:36",
            "step_s": "meg_gpt2_perf_n16.out:210-308, median of 98 of 99 steps (1 warm-up, 0 set apart)",
            "params": "from the shape, the tied embedding once", "tokens_per_s": "global_batch x seq / step_s",
        },
    )  # fmt: skip
    return replace(record, **changes)


def usual_runs() -> list[RunRead]:
    """What a researcher has in a folder: good runs of several programs, and what went wrong with others."""
    failure = Failure("gpu_memory", "RuntimeError: CUDA out of memory. Tried to allocate 2.50 GiB (GPU 3)",
                      Place("n16/slurm-1587011.out", 812), 51, "r7i6n2")  # fmt: skip
    echo = Failure(
        "collective_timeout", "Watchdog caught collective operation timeout", Place("n16/err.txt", 4), echo=True
    )
    small = {"params": 124_439_808, "hidden": 768, "layers": 12, "heads": 12, "gpus": 8, "nodes": 1,
             "device": "h100-80g", "tp": 1, "pp": 1, "dp": 8, "global_batch": 480, "micro_batch": 12,
             "micro_batches": 5, "dtype": "bf16",
             "recompute": "none", "tflops_seed": 410.0, "tflops_hardware": 433.0, "tflops_model": 455.1, "mfu": 0.46,
             "gpu_hours": 3.1, "sources": {}}  # fmt: skip
    return [
        RunRead(megatron(), curve(), files=[Path("/data/logs/n16/meg_gpt2_perf_n16.out")]),
        RunRead(
            megatron(
                run="1587042", name="meg_ds_3d_restarts", engine="deepspeed-3d", step_s=146.0, step_s_p10=139.8,
                step_s_p90=153.9, tokens_per_s=7182.0, pp=8, dp=2, skipped_steps=3, attempts=[
                    {"attempt": 1, "job_id": "1587042", "started": "2021-05-27T04:02:02Z", "ended": "node_failure",
                     "first_step": 1, "last_step": 33, "cause": "node r7i6n2 did not answer"},
                    {"attempt": 2, "job_id": "1587042", "started": "2021-05-27T06:02:02Z", "ended": "requeued",
                     "first_step": 29, "last_step": 66, "cause": None},
                    {"attempt": 3, "job_id": "1587042", "started": "2021-05-27T09:02:02Z", "ended": "done",
                     "first_step": 62, "last_step": 100, "cause": None}],
                memory_allocated_gib=[25.0, 23.1, 23.1, 23.0, 23.0, 22.9, 22.9, 28.4], tflops_printed=44.1,
            ),
            curve(attempts=3, seed=1, skipped=(4, 5, 70)),
            files=[Path("/data/logs/n16/slurm-1587042.out")],
        ),
        RunRead(
            megatron(run="1587011", name="meg_oom", ended="gpu_memory", cause=failure.message, gpu_hours=1.2,
                     **dict.fromkeys(("step_s", "step_s_p10", "step_s_p90", "tokens_per_s", "tflops_seed", "mfu",
                                      "tflops_hardware", "tflops_model", "loss_first", "loss_last",
                                      "memory_allocated_gib"))),
            failures=[failure, echo],
            files=[Path("/data/logs/n16/slurm-1587011.out")],
        ),
        RunRead(
            megatron(run="1587100", name="meg_nan", ended="nan", cause="12 steps in a row with a NaN loss",
                     nan_steps=12, tp=8, pp=8, micro_batch=2,
                     flags=[Flag("12 steps with a loss that is not a number, the first at out:300", "nan")]),
            curve(seed=2, nan=tuple(range(89, 101))),
        ),
        RunRead(
            megatron(run="1832555", name="hf_ds_gpt2_base_n4", engine="hf-deepspeed", gpus=16, nodes=4, tp=1, pp=1,
                     dp=16, zero_stage=3, params=1_500_000_000, step_s=57.44, step_s_p10=None, step_s_p90=None,
                     tokens_per_s=18254.0, memory_allocated_gib=None, memory_reserved_gib=[21.5], gpu_hours=4.1,
                     flags=["step_s is runtime / steps, warm-up included"]),
            step_table(step=np.arange(1.0, 17), step_s=np.full(16, np.nan), loss=np.full(16, np.nan),
                  attempt=np.ones(16, int), steady=np.zeros(16, bool), counts=np.ones(16, bool),
                  skipped=np.zeros(16, bool)),
        ),
        RunRead(
            megatron(**small, run="20261119-080102-ab12", name="gpt2-124m-fsdp", dialect="hpc-gpt", engine="fsdp",
                     step_s=0.412, step_s_p10=0.401, step_s_p90=0.731, tokens_per_s=1_193_000.0,
                     memory_allocated_gib=[41.2], loss_first=10.99, loss_last=3.28, loss_eval=3.3, ended="walltime"),
            curve(4000, 2, seed=3),
        ),
        RunRead(
            megatron(**small, run="20261119-090102-cd34", name="gpt2-124m-ddp", dialect="hpc-gpt", engine="ddp",
                     step_s=0.388, step_s_p10=0.381, step_s_p90=0.4, tokens_per_s=1_266_000.0,
                     memory_allocated_gib=[48.8], loss_first=10.99, loss_last=3.27, loss_eval=3.29),
            curve(4000, 1, seed=4),
        ),
    ]  # fmt: skip


def hostile_runs() -> list[RunRead]:
    """Every text of a run is markup that would run if it were one."""
    runs = []
    for place, text in enumerate(HOSTILE):
        failure = Failure("error", text, Place(text, 3), node=text)
        attempts = [{"attempt": 1, "job_id": text, "cause": text, "ended": text}, {"attempt": 2, "started": text}]
        record = megatron(
            run=f"{text}{place}", name=text, engine=text, dialect=text, device=text, dtype=text, cause=text, ended=text,
            node_list=text, failed_node=text, flags=[text, f"{text} is wrong"], attempts=attempts, started=text,
            versions={text: text}, sources={"step_s": text, "tp": text, text: text},
            settings={"token": "hf_" + "a" * 30, "sweep": {"name": HOSTILE[0], "row": text}, "train": {"lr": place}},
        )  # fmt: skip
        runs.append(RunRead(record, curve(attempts=2), failures=[failure], files=[Path("/data") / text]))
    return runs


def many_runs(count: int = 1000) -> list[RunRead]:
    """A sweep: curves of 500 steps, a few layouts, some of each thing that goes wrong."""
    line = curve(500, 2)
    ends = ["done"] * 7 + ["gpu_memory", "walltime", "node_failure"]
    runs = []
    for place in range(count):
        tp, pp = 2 ** (place % 3), 2 ** (place % 5)
        record = megatron(
            run=f"2026{place:06d}", name=f"sweep-{place % 40}", tp=tp, pp=pp, dp=64 // tp // pp, ended=ends[place % 10],
            step_s=100 + place % 97, step_s_p10=99.0, step_s_p90=104.0 + place % 97,
            tokens_per_s=1e6 / (100 + place % 97),
            sources=dict.fromkeys(("tp", "pp", "dp", "gpus", "params"), f"log-{place}.out:12")
            | {"tokens_per_s": "global_batch x seq / step_s"}
            | {"step_s": f"log-{place}.out:99, median of 98 of 99 steps; {'the rule in words ' * 12}"},
            flags=[Flag("no dense fp16 peak known for device v100-32g", "no_peak")] if place % 2 else [],
        )  # fmt: skip
        runs.append(RunRead(record, line, files=[Path(f"/data/sweep/log-{place}.out")]))
    return runs


def swept_runs() -> list[RunRead]:
    """A sweep of four learning rates of a small model, on this machine's CPUs but the first, and one run beside it."""
    runs = []
    for place, rate in enumerate((1e-4, 3e-4, 1e-3, 3e-3)):
        record = megatron(
            run=f"20261120-08000{place}-00a{place}", name="lr-demo", engine="ddp", dialect="hpc-gpt", params=845_000,
            gpus=2, seq=256, device=None, mfu=None, gpu_hours=None if place else 0.01, loss_last=3.0 - 100 * rate,
            step_s=0.2, tokens_per_s=5000.0 + place, started=f"2026-11-20T08:00:0{place}Z",
            settings={"sweep": {"name": "lr-demo", "row": f"lr-{rate:g}"}, "train": {"lr": rate, "seed": 1}},
            sources={"device": f"attempts/1/trainer.json: {ON_CPU}"} if place else {},
        )  # fmt: skip
        runs.append(RunRead(record, curve(200, seed=place)))
    return [RunRead(megatron(), curve()), *runs]
