"""A log line by line: what of a step is whole, from which dialect, of which rank; and what went wrong last."""

import pytest

from hpc_gpt.reader.failures.live_lines import LiveLines
from hpc_gpt.trainer.program.process import said_by

TORCHTITAN = "step: 20  loss:  4.2  grad_norm:  1.1  memory: 20.00GiB(25.00%)  tps: 8,000  tflops: 50.00  mfu: 16.00%"


def rows(lines: list[str], pattern: str | None = None) -> list[dict[str, float]]:
    live = LiveLines(pattern)
    return [row for line in lines if (row := live.take(line)) is not None]


def test_lines_of_dialects_give_steps() -> None:
    assert rows(["iter 10: loss 3.5, time 250.00ms, mfu 12.00%"]) == [
        {"step": 10.0, "loss": 3.5, "step_s": 0.25, "mfu": 0.12}
    ]
    assert rows(["\x1b[32mstep 7 loss 2.5\x1b[0m", "no step here"])[0]["loss"] == 2.5


def test_a_line_without_its_number_has_that_of_the_next_bar() -> None:
    lines = [
        "{'loss': '3.9', 'grad_norm': '0.6', 'learning_rate': '0.002', 'epoch': '1.5'}",
        " 80%|████████  | 24/30 [00:01<00:00, 13.50it/s]",
        " 83%|████████▎ | 25/30 [00:01<00:00, 14.14it/s]",
    ]
    assert [(row["step"], row["loss"]) for row in rows(lines)] == [(24.0, 3.9)]


def test_an_evaluation_is_in_the_row_of_the_next_step() -> None:
    lines = ["step 250: train loss 4.1012, val loss 4.2077", "iter 250: loss 4.0, time 10.00ms"]
    assert [(row["step"], row["loss_eval"]) for row in rows(lines)] == [(250.0, 4.2077)]


def test_an_exceptions_message_may_begin_on_the_next_line() -> None:
    frames = ["Traceback (most recent call last):", '  File "train.py", line 9, in get', "    raise Empty"]
    caught = ["queue.Empty", "", "During handling of the above exception, another exception occurred:", "", *frames[:2]]
    for lines, ended, words in (
        (["queue.Empty"], "error", "queue.Empty at `raise Empty`"),
        (["RuntimeError:", "  invalid device function"], "user_error", "RuntimeError: invalid device function"),
        (["RuntimeError:", "  CUDA error: out of memory"], "gpu_memory", "RuntimeError: CUDA error: out of memory"),
        ([*caught, "ValueError: no sample came"], "error", "ValueError: no sample came"),
    ):
        live = LiveLines()
        for line in (*frames, *lines):
            live.take(line)
        assert live.failure is not None
        assert (live.failure.ended, live.failure.message) == (ended, words)


def test_of_ranks_that_all_print_the_first_counts() -> None:
    lines = [f"[rank{rank}]: step {step} loss {step}.{rank}" for step in (1, 2) for rank in (1, 0)]
    assert [(row["step"], row["loss"]) for row in rows(lines)] == [(1.0, 1.1), (2.0, 2.1)]


@pytest.mark.parametrize("line", ["[3] L=2.5 t=200", "\x1b[1m[3] L=2.5 t=200"])
def test_a_pattern_of_ones_own_is_the_only_one(line: str) -> None:
    pattern = r"\[(?P<step>\d+)\] L=(?P<loss>\S+) t=(?P<step_ms>\d+)"
    assert rows(["step 9 loss 9.9", line], pattern) == [{"step": 3.0, "loss": 2.5, "step_s": 0.2}]


def test_the_last_lines_first_failure_that_no_other_caused() -> None:
    live = LiveLines()
    live.take("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    for number in range(300):
        live.take(f"step {number} loss 1.0")
    assert live.failure is None, "it trained on after that"
    live.take("MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD")
    live.take("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    live.take("ValueError: something")
    assert live.failure is not None
    assert (live.failure.ended, live.failure.echo) == ("gpu_memory", False)


def test_a_secret_in_a_failure_is_hidden() -> None:
    live = LiveLines()
    live.take("ValueError: no access with hf_0123456789abcdefghij")
    assert live.failure is not None
    assert "hf_0123456789" not in live.failure.message


@pytest.mark.parametrize(
    ("lines", "planned"),
    [
        (["step 3/30 loss 2.5", "  7%|▋         | 7/100 [00:01<00:13,  7.00it/s]"], 30),
        (["***** Running training *****", "  Total optimization steps = 1,200"], 1200),
        (["{'loss': 3.9, 'epoch': 1.5}", " 80%|████████  | 24/30 [00:01<00:00, 13.50it/s]"], 30),
        (["  7%|▋         | 7/100 [00:01<00:13,  7.00it/s]", "step 3 loss 2.5"], 0),
        (["Epoch 1, step 3/30, loss 2.5"], 0),
    ],
)
def test_how_many_steps_there_are_is_what_the_lines_of_steps_say(lines: list[str], planned: int) -> None:
    live = LiveLines()
    for line in lines:
        live.take(line)
    assert live.planned == planned


def test_a_program_says_that_a_limit_of_its_own_ends_it() -> None:
    live = LiveLines()
    live.take("[exiting program after 1180.5 minutes] datetime: 2021-05-26 03:20:38 ")
    assert live.limit == "exiting program after 1180.5 minutes"


@pytest.mark.parametrize(
    ("lines", "loss"),
    [
        (["epoch 1, loss: 2.5", "epoch 2, loss: 2.25"], 2.25),
        (["Loss=0.51 lr=1e-3", "val loss: 9.0"], 0.51),
        (["{'loss': '3.9', 'grad_norm': '0.6', 'learning_rate': '0.002', 'epoch': '1.5'}"], 3.9),
        (["the loss is high", "no figure"], None),
    ],
)
def test_a_loss_without_a_step_is_no_row_and_is_known(lines: list[str], loss: float | None) -> None:
    live = LiveLines()
    assert [live.take(line) for line in lines] == [None] * len(lines)
    assert live.loss == loss


TRAINS = [f"step {number} loss 1.0" for number in (1, 2, 3)]
KEY, EXIT = "KeyError: 'x'", "srun: error: n1: task 3: Exited with exit code 1"
SCRIPT, RESET = ["job ends"] * 24, "RuntimeError: Connection reset by peer"


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([*TRAINS, KEY], KEY),
        ([*TRAINS, EXIT, KEY], KEY),
        ([*TRAINS, KEY, OOM := "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"], KEY),
        ([*TRAINS, OOM, KEY], OOM),
        ([KEY, *TRAINS], None),
        ([KEY, *TRAINS, EXIT], EXIT),
        ([*TRAINS, RESET], None),  # a consequence that does not say that a process failed
        ([*TRAINS, *SCRIPT, KEY, *SCRIPT, *SCRIPT], KEY),
        ([*TRAINS, "bash: line 3: nvidia: command not found"], None),
        (["bash: line 3: nvidia: command not found"], "nvidia: command not found"),
        ([KEY, *SCRIPT], KEY),
        ([KEY, *SCRIPT, "and one line more"], KEY),  # seconds count, not lines
        ([*TRAINS, "Exception ignored in: <function x>", KEY], None),
        ([*TRAINS, KEY, "  7%|▋         | 7/100 [00:01<00:13,  7.00it/s]"], None),
        (
            ["  7%|▋         | 7/100 [00:01<00:13,  7.00it/s]", KEY, "  7%|▋         | 7/100 [00:02<00:13,  7.00it/s]"],
            KEY,
        ),
    ],
)
def test_why_a_program_ended(lines: list[str], why: str | None) -> None:
    """What went wrong after its last step; a script may print some lines after its program."""
    live = LiveLines()
    for line in lines:
        live.take(line)
    failed = said_by(live).failed
    assert (failed and failed.cause) == why
