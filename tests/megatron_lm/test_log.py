"""Megatron's lines as metrics.jsonl, in every dress; what a program's last words say of its failure."""

import json
import re
import signal
import subprocess
import sys
from platform import node

import pytest

from hpc_gpt.reader.runs.attempt_cause import read_cause
from hpc_gpt.trainer.engines.megatron_lm import MegatronRank, read_iteration
from hpc_gpt.trainer.program.process import ForeignLog
from hpc_gpt.trainer.supervision.signals import Signals
from tests.made_runs import unsubmitted_run
from tests.waiting import wait_for

KILLED = "was ended by SIGKILL, by hand or by the kernel's memory killer"

# As printed by Megatron-LM of 2021, v1.1.5, DeepSpeed's fork, BLOOM's, Megatron-LM of 2024, and GPT-NeoX; and srun -l.
LINES = {
    " iteration       30/    1000 | consumed samples:          120 | elapsed time per iteration (ms): 2767.3 | learning"
    " rate: 1.500E-04 | global batch size:     4 | lm loss: 3.282511E+01 | loss scale: 16384.0 | grad norm: 9.804 |"
    " number of skipped iterations:   1 | number of nan iterations:   0 |": (30, 2.7673, 1.5e-4, 32.82511, 9.804, 4, 1),
    " iteration        1/    1000 | elapsed time per iteration (ms): 150471.3 | learning rate: 1.875E-05 | lm loss:"
    " 1.279022E+01 | loss scale: 1024.0 | number of skipped iterations:   0 | number of nan iterations:   0 |": (
        1, 150.4713, 1.875e-5, 12.79022, None, None, 0,
    ),
    " iteration        2/    1000 | consumed samples:         2048 | elapsed time per iteration (ms): 141096.8 |"
    " learning rate: 3.750E-05 | global batch size:  1024 | lm-loss: 1.244502E+01 | loss scale: -1.0 | grad norm: 0.000"
    " | num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 |": (
        2, 141.0968, 3.75e-5, 12.44502, 0.0, 1024, 0,
    ),
    " [default7]: iteration    12695/  115311 | consumed samples:      9841584 | consumed tokens:  20155564032 |"
    " elapsed time per iteration (s): 105.22 | learning rate: 5.969E-05 | global batch size:  2048 | lm loss:"
    " 2.463556E+00 | grad norm: 0.174 | num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:"
    "   0 | samples per second: 19.463 | TFLOPs: 149.02 |": (12695, 105.22, 5.969e-5, 2.463556, 0.174, 2048, 0),
    "12:  [2024-04-06 03:02:12] iteration       71/     100 | consumed samples:         9088 | elapsed time per"
    " iteration (ms): 5361.6 | throughput per GPU (TFLOP/s/GPU): 243.6 | learning rate: 1.420000E-05 | global batch"
    " size:   128 | lm loss: 1.818812E+00 | load_balancing_loss: 1.013377E+00 | loss scale: 1.0 | grad norm: 1.300 |"
    " num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 |": (
        71, 5.3616, 1.42e-5, 1.818812, 1.3, 128, 0,
    ),
    " samples/sec: 7.799 | iteration       34/   10000 | elapsed time per iteration (ms): 4103.1 | learning rate:"
    " 2.111E-06 | approx flops per GPU: 112.9TFLOPS | lm_loss: 1.118665E+01 | number of skipped iterations:   0 |"
    " number of nan iterations:   0 |": (34, 4.1031, 2.111e-6, 11.18665, None, None, 0),
    " iteration        1/    1000 | elapsed time per iteration (ms): 20.0 | learning rate: 0.000E+00 | global batch"
    " size:     4 | loss scale: 4096.0 | grad norm: inf | number of skipped iterations:   1 | number of nan iterations:"
    "   0 |": (1, 0.02, 0.0, None, float("inf"), 4, 1),
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_an_iteration_in_every_dress(line):
    found = read_iteration(line)
    names = ("step", "step_s", "lr", "loss", "grad_norm", "global_batch", "skipped")
    assert tuple(map(found.get, names)) == pytest.approx(LINES[line])
    assert ("balance_loss" in found) == ("load_balancing_loss" in line)
    assert read_iteration(line[: line.index("elapsed") + 35]) is None, "it is cut off before its time"


def test_other_lines_are_none():
    for line in (
        "",
        "time (ms) | forward-compute: 148.03 | optimizer: 87.67",
        " validation loss at iteration 20 | lm loss value: 6.2E+00 | lm loss PPL: 4.9E+02 |",
        "  successfully saved checkpoint at iteration      20 to /run",
        "(iteration 3/10)",
    ):
        assert read_iteration(line) is None


def line(iteration: int, skipped: int = 0) -> str:
    return (
        f" iteration {iteration:8d}/     100 | elapsed time per iteration (ms): 100.0 | learning rate: 1.0E-04 | "
        f"lm loss: 2.0E+00 | number of skipped iterations: {skipped:3d} |"
    )


@pytest.fixture
def rank(monkeypatch):
    run = unsubmitted_run(engine__name="megatron-lm", train__log_every=5, train__steps=100)
    for name, value in (("RANK", 1), ("LOCAL_RANK", 1), ("WORLD_SIZE", run.resolved().tasks)):
        monkeypatch.setenv(name, str(value))
    return MegatronRank(run, run.new_attempt(), Signals())


@pytest.fixture
def log(rank):
    return rank.log(7)


def metrics(log: ForeignLog) -> list[dict]:
    return [json.loads(text) for text in log._attempt.metrics.read_text().splitlines()]


def test_a_line_stands_for_the_iterations_since_the_one_before(log):
    # After a resume at 7 Megatron tells of 8, which it counts again into the mean of 8 to 10.
    for text in (line(8), line(10, skipped=1), line(15), line(15), line(20, skipped=5)):
        log.take(text)
    step_tokens = 32 * 128
    found = [(entry["step"], entry["tokens"] // step_tokens, entry["skipped"]) for entry in metrics(log)]
    assert found == [(10, 3, 1), (15, 5, 0), (20, 5, 5)]
    assert metrics(log)[0]["tokens_per_s"] == step_tokens / 0.1


def test_that_it_trains_is_seen_in_its_words(log):
    mark = log._attempt.folder / ForeignLog.TRAINS
    log.take("> building train, validation, and test datasets ...")
    assert not mark.exists()
    log.take("[before the start of training step] datetime: 2026-11-20 11:11:00")
    assert mark.exists()


LOST = "RuntimeError: [../gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:2"
FULL = "OSError: [Errno 122] Disk quota exceeded: 'a'"
HOST = "RuntimeError: [enforce fail] . DefaultCPUAllocator: not enough memory"
NAN = "RuntimeError: found NaN in local forward loss calculation"
MEMORY = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
TIMEOUT = "DistBackendError: NCCL communicator: Watchdog timeout"


@pytest.mark.parametrize(
    ("last_words", "code", "said"),
    [
        (f"[rank3]: torch.{MEMORY}", 1, ("gpu_memory", MEMORY, False)),
        (f"torch.distributed.{TIMEOUT}", 1, ("collective_timeout", TIMEOUT, False)),
        (f"3: {LOST}", 1, ("error", LOST, True)),
        (FULL, 1, ("disk_full", FULL, False)),
        (HOST, 1, ("host_memory", HOST, False)),
        (NAN, 1, ("nan", NAN, False)),
        ("AssertionError", 1, ("error", "AssertionError", False)),
        (
            "pretrain_gpt.py: error: unrecognized arguments: --x",
            2,
            ("user_error", "unrecognized arguments: --x", False),
        ),
        ("> setting tensorboard ...", -11, ("error", f"pretrain_gpt.py on {node()} was ended by SIGSEGV", True)),
        ("> setting tensorboard ...", 137, ("error", f"pretrain_gpt.py on {node()} {KILLED}", True)),
        ("> setting tensorboard ...", 7, ("error", "pretrain_gpt.py ended with exit code 7", True)),
    ],
)
def test_what_its_last_words_say(rank, log, last_words, code, said):
    for text in ("Traceback (most recent call last):", '  File "x.py", line 3', last_words):
        log.take(text)
    assert rank.failure(code) == said


def test_a_program_that_is_aborted_writes_its_stacks_and_ends(rank, log):
    def_hear = "def hear():\n    print('waits', flush=True)\n    input()\nhear()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen([sys.executable, "-X", "faulthandler", "-c", def_hear], **pipes) as process:
        log.follow(process)
        wait_for("its line", lambda: rank._lines.find(re.compile("waits")))
        stacks = rank.stacks(process, log)
    assert stacks.startswith("Fatal Python error: Aborted")
    assert "in hear" in stacks
    assert process.returncode in (-signal.SIGABRT, -signal.SIGKILL)


def raises(*given):
    raise TypeError("no such figure")


def test_a_reader_that_fails_at_the_end_leaves_the_exit_code(rank, monkeypatch, capsys):
    monkeypatch.setattr(rank, "failure", raises)
    assert rank._report_failure(3) == 3
    end = rank._attempt.ended()
    assert (end["ended"], end["cause"]) == ("error", "rank 1: the program ended with exit code 3")
    assert "TypeError: no such figure (test_log.py:" in capsys.readouterr().err


def test_a_reader_that_fails_leaves_no_attempt_unjudged(rank, monkeypatch):
    monkeypatch.setattr("hpc_gpt.reader.failures.causes.first_cause", raises)
    assert read_cause(rank._attempt).ended == "unknown"
