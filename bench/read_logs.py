"""How fast `report` reads a log, beside a bare loop over the same bytes: `make bench`. Nothing passes or fails here.

    python bench/read_logs.py [--gb GB] [--folders COUNT]

Writes logs of that size into a temporary folder, with the lines that programs print today: Megatron-LM with the
throughput of a GPU, torchtitan in colours, the HF Trainer without and with its bars, ms-swift, OLMo, mmcls, NeMo,
DeepSpeed's pipeline; and Megatron-LM's of 2021 with timers. Each is read by `hpc-gpt report LOG`, the whole command,
and by `re.finditer` with one pattern of seven groups or more over the mapped file, in turn and on one core. The CPU
seconds' ratio is what counts; a machine's speed is in neither. Then CPU seconds a MB of a small log (at most 0.4), peak
memory at two sizes, and reports of many run folders, in every form: 10,000 are to take at most 120 MB and 20 s of CPU.
"""

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

BARE = """
import mmap, re, sys
pattern = re.compile(sys.argv[2].encode())
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
    for match in pattern.finditer(data):
        match.groups()
"""
REPORT = ("-m", "hpc_gpt", "report", "--json")
_STEPS = 40_000_000
_SMALL = 5_000_000  # bytes
_N = r"([\d.eE+-]+)"
_COLOUR = r"(?:\x1b\[[\d;]*m)?"


def _clock(step: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(1_700_000_000 + 4 * step))


def _duration(seconds: int) -> str:
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _megatron(dice: random.Random, step: int, throughput: bool = True) -> str:
    rate = f" throughput per GPU (TFLOP/s/GPU): {dice.gauss(412, 9):.1f} |" if throughput else ""
    return (
        f" [{_clock(step)}] iteration {step:8d}/{_STEPS:8d} | consumed samples: {step * 1024:12d} |"
        f" elapsed time per iteration (ms): {dice.gauss(4000, 200):.1f} |{rate}"
        f" learning rate: {dice.random() * 1e-4:.6E} | global batch size: {1024:5d} |"
        f" lm loss: {dice.uniform(2, 9):.6E} | loss scale: 1.0 | grad norm: {dice.uniform(0.1, 2):.3f} |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


def _timers(dice: random.Random, step: int) -> str:
    names = ("forward-compute", "forward-recv", "backward-compute", "backward-send", "backward-recv", "optimizer")
    figures = " | ".join(f"{name}: {dice.gauss(300, 60):.2f}" for name in names)
    return f"{_megatron(dice, step, throughput=False)}time (ms) | {figures}\n"


def _torchtitan(dice: random.Random, step: int) -> str:
    return (
        f"[rank0]:[titan] {_clock(step)},{dice.randrange(1000):03} - root - INFO - \x1b[31mstep: {step:2}  "
        f"\x1b[32mloss: {dice.uniform(2, 9):7.4f}  \x1b[38;2;180;60;0mgrad_norm: {dice.uniform(0.1, 2):7.4f}  "
        f"\x1b[38;2;54;234;195mmemory: {dice.gauss(41, 0.1):5.2f}GiB({dice.gauss(51, 0.1):.2f}%)  "
        f"\x1b[34mtps: {round(dice.gauss(7100, 40)):,}  \x1b[36mtflops: {dice.gauss(412, 3):,.2f}  "
        f"\x1b[35mmfu: {dice.gauss(41, 0.3):.2f}%\x1b[39m\n"
    )


def _hf_trainer(dice: random.Random, step: int) -> str:
    norm, lr = dice.uniform(0.1, 2), 2e-5 * (1 - step / _STEPS)
    told = {"loss": round(dice.uniform(1, 9), 4), "grad_norm": norm, "learning_rate": lr, "epoch": round(step / 1e5, 2)}
    return f"{told}\n"


def _hf_with_bars(dice: random.Random, step: int) -> str:
    percent = 100 * step // _STEPS
    bar = (
        f"\r{percent:3d}%|{'█' * (percent // 10):10}| {step}/{_STEPS}"
        f" [{_duration(4 * step)}<{_duration(4 * (_STEPS - step))},  {dice.gauss(4, 0.1):.2f}s/it]"
    )
    return f"{bar}\r{' ' * 70}\r{_hf_trainer(dice, step)}{bar}"


def _swift(dice: random.Random, step: int, bars: int = 5) -> str:
    """Named bars that carriage returns join, and a line of metrics with figures of eight decimals."""
    passed = [
        f"\rTrain: {100 * each // _STEPS:3d}%|{'█' * (10 * each // _STEPS):10}| {each}/{_STEPS}"
        f" [{_duration(4 * each)}<{_duration(4 * (_STEPS - each))},  {dice.gauss(4, 0.1):.2f}s/it]"
        for each in range(bars * (step - 1) + 1, bars * step + 1)
    ]
    took = f"{step // 180}h {step // 3 % 60}m {20 * step % 60}s"
    told = {
        "loss": round(dice.uniform(0.3, 2), 8),
        "grad_norm": round(dice.uniform(0.1, 3), 8),
        "learning_rate": float(f"{2e-5 * dice.random():.2e}"),
        "token_acc": round(dice.random(), 8),
        "epoch": round(step / 1e4, 2),
        "global_step/max_steps": f"{bars * step}/{_STEPS}",
        "elapsed_time": took,
        "memory(GiB)": 58.02,
        "train_speed(s/it)": round(dice.uniform(4, 5), 6),
    }
    return f"{''.join(passed)}\r{told}\n"


def _swift_long(dice: random.Random, step: int) -> str:
    """Lines of 16 kB: metrics every 130 steps."""
    return _swift(dice, step, bars=130)


def _olmo(dice: random.Random, step: int) -> str:
    """A step's figures on lines of their own."""
    return (
        f"{_clock(step)}.{dice.randrange(1000):03}\tolmo.train:822\tINFO\t[step={step}/{_STEPS}]\n"
        f"    train/CrossEntropyLoss={dice.uniform(2, 9):.4g}\n    train/Perplexity={dice.uniform(9, 2000):.4g}\n"
        f"    throughput/total_tokens={step * 4_194_304:,}\n"
        f"    throughput/device/tokens_per_second={dice.gauss(9000, 50):,.0f}\n"
        f"    optim/total_grad_norm={dice.uniform(0.1, 2):.4f}\n"
        f"    System/Peak GPU Memory (MB)={dice.gauss(41_000, 3):,.0f}\n"
    )


def _mmcls(dice: random.Random, step: int) -> str:
    """Epochs of 5005 batches, and a time to the end in words."""
    epoch, batch = divmod(10 * step, 5000)
    return (
        f"{_clock(step)},{dice.randrange(1000):03} - mmcls - INFO - Epoch [{epoch + 1}][{batch + 5}/5005]\t"
        f"lr: {dice.random() * 1e-3:.3e}, eta: {dice.randrange(2, 9)} days, {_duration(dice.randrange(86_400))}, "
        f"time: {dice.gauss(0.4, 0.01):.3f}, data_time: {dice.gauss(0.1, 0.01):.3f}, memory: 9876, "
        f"loss: {dice.uniform(2, 7):.4f}, grad_norm: {dice.uniform(0.1, 2):.4f}\n"
    )


def _nemo(dice: random.Random, step: int) -> str:
    lr, loss, step_s = (
        float(f"{each:.4g}") for each in (dice.random() * 1e-4, dice.uniform(1, 12), dice.gauss(6, 0.2))
    )
    return (
        f"Training epoch 0, iteration {step}/{_STEPS - 1} | lr: {lr} | global_batch_size: 512 | global_step: {step} |"
        f" reduced_train_loss: {loss} | train_step_timing in s: {step_s} | consumed_samples: {step * 512}\n"
    )


def _deepspeed(dice: random.Random, step: int) -> str:
    return (
        f"steps: {step} loss: {dice.uniform(1, 9):.4f} iter time (s): {dice.gauss(3, 0.1):.3f}"
        f" samples/sec: {dice.gauss(340, 5):.3f}\n"
    )


_MEGATRON = (
    rf"iteration +(\d+)/ *(\d+) \| consumed samples: +(\d+) \| elapsed time per iteration \(ms\): {_N} \|"
    rf"(?: throughput per GPU \(TFLOP/s/GPU\): {_N} \|)? learning rate: {_N} \| global batch size: +(\d+) \|"
    rf" lm loss: {_N}"
)
_HF = rf"'loss': {_N}, 'grad_norm': {_N}, 'learning_rate': {_N}, 'epoch': {_N}\}}"
# What a program prints of one step, and a bare expression for it.
PROGRAMS: dict[str, tuple[Callable[[random.Random, int], str], str]] = {
    "Megatron-LM": (_megatron, _MEGATRON),
    "torchtitan": (
        _torchtitan,
        rf"step: +(\d+)  {_COLOUR}loss: +{_N}  {_COLOUR}grad_norm: +{_N}  {_COLOUR}memory: +{_N}GiB\({_N}%\)  "
        rf"{_COLOUR}tps: +([\d,]+)  {_COLOUR}tflops: +{_N}  {_COLOUR}mfu: +{_N}%",
    ),
    "HF Trainer": (_hf_trainer, _HF),
    "HF Trainer with bars": (_hf_with_bars, rf"{_HF}|%\|[^|\n]*\| (\d+)/(\d+) \[([\d:]+)<"),
    "ms-swift": (_swift, rf"'loss': {_N}, 'grad_norm': {_N}|%\|[^|\n]*\| (\d+)/(\d+) \[([\d:]+)<"),
    "ms-swift, lines of 16 kB": (_swift_long, rf"'loss': {_N}|%\|[^|\n]*\| (\d+)/(\d+) \[([\d:]+)<"),
    "OLMo": (_olmo, rf"\[step=(\d+)/(\d+)\]|CrossEntropyLoss={_N}|total_tokens=([\d,]+)|tokens_per_second=([\d,]+)"),
    "mmcls": (
        _mmcls,
        rf"Epoch \[(\d+)\]\[(\d+)/(\d+)\]\tlr: {_N}, eta: [^,]+, [^,]+, time: {_N}, data_time: {_N}, memory: (\d+), "
        rf"loss: {_N}",
    ),
    "NeMo": (
        _nemo,
        rf"Training epoch (\d+), iteration (\d+)/(\d+) \| lr: {_N} \| global_batch_size: (\d+) \|"
        rf" global_step: (\d+) \| reduced_train_loss: {_N} \| train_step_timing in s: {_N}",
    ),
    "DeepSpeed's pipeline": (_deepspeed, rf"steps: (\d+) loss: {_N} iter time \(s\): {_N} samples/sec: {_N}"),
    "Megatron-LM of 2021, timers": (_timers, _MEGATRON),
}


def write_log(path: Path, size: int, program: str) -> None:
    """A log of so many bytes at least."""
    dice, print_step = random.Random(0), PROGRAMS[program][0]
    with path.open("w", newline="") as file:
        first = 1
        while file.tell() < size:
            count = 50 if size < 10_000_000 else 10_000
            file.writelines(print_step(dice, step) for step in range(first, first + count))
            first += count


def run(words: tuple[str, ...]) -> tuple[float, float, float]:
    """(CPU seconds, seconds, peak MiB) of one run of `python WORDS` on one core."""
    with tempfile.TemporaryFile() as said:
        began = time.perf_counter()
        child = subprocess.Popen(
            [sys.executable, *words],
            stdout=said,
            stderr=said,
            preexec_fn=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
        )
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        took = time.perf_counter() - began
        if child.returncode not in (0, 1):
            said.seek(0)
            sys.exit(f"{' '.join(words)}: exit {child.returncode}\n{said.read().decode(errors='replace')}")
    return used.ru_utime + used.ru_stime, took, used.ru_maxrss / 1024


def beside_bare(folder: Path, size: int) -> None:
    """The ratio of the command to the bare loop, for the lines of each program."""
    print(f"report beside re.finditer, {size / 1e9:.3g} GB, CPU seconds on one core, the least of 3 rounds in turn")
    print(f"{'log':32} {'finditer':>9} {'report':>9} {'ratio':>6} {'peak MiB':>9}")
    for program, (_, pattern) in PROGRAMS.items():
        log = folder / "run.out"
        write_log(log, size, program)
        run(("-c", BARE, str(log), pattern))
        pairs = [(run(("-c", BARE, str(log), pattern)), run((*REPORT, str(log)))) for _ in range(3)]
        bare, ours = (min(pair[which][0] for pair in pairs) for which in (0, 1))
        print(f"{program:32} {bare:8.2f}s {ours:8.2f}s {ours / bare:6.2f} {pairs[-1][1][2]:9.0f}", flush=True)


def small(folder: Path) -> None:
    """CPU seconds for each MB of a small log, the start of Python and the imports included."""
    for program in PROGRAMS:
        log = folder / "run.out"
        write_log(log, _SMALL, program)
        cpu = min(run((*REPORT, str(log)))[0] for _ in range(3))
        print(f"a log of {_SMALL / 1e6:.0f} MB, {program:30} {cpu / _SMALL * 1e6:.3f} s of CPU a MB", flush=True)


def memory(folder: Path, sizes: tuple[int, ...]) -> None:
    """Peak memory of the command by the log's size."""
    for size in sizes:
        log = folder / "run.out"
        write_log(log, size, "Megatron-LM")
        cpu, _, peak = run((*REPORT, str(log)))
        print(f"peak memory of report, log of {size / 1e6:8.0f} MB: {peak:6.0f} MiB, {cpu:.2f} s", flush=True)


def folders(folder: Path, count: int) -> None:
    """Reports of many folders, each with a log of one program, of 2 to 50 KB, in each form."""
    runs, programs = folder / "runs", list(PROGRAMS)
    for number in range(count):
        (runs / f"run-{number}").mkdir(parents=True)
        write_log(runs / f"run-{number}" / "main.log", 2_000 + number * 37 % 48_000, programs[number % len(programs)])
    for form in ("table", "csv", "json", "jsonl"):
        cpu, took, peak = run((*REPORT[:-1], "--format", form, str(runs)))
        print(f"{count} folders of one log, {form:6}: {took:.2f} s, {cpu:.2f} s of CPU, {peak:.0f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=0.1)
    parser.add_argument("--folders", type=int, default=1000)
    chosen = parser.parse_args()
    size = int(chosen.gb * 1e9)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        beside_bare(folder, size)
        small(folder)
        memory(folder, (1_000_000, size))
        (folder / "run.out").unlink()
        folders(folder, chosen.folders)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
