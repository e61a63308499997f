"""The first cause over all ranks' logs: who failed first, who only followed, what training survived."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.readers.causes import Cause, first_cause
from hpc_gpt.readers.logs import Failure, Part, Place
from hpc_gpt.runs.failures import ENDED
from tests.readers.reading import read_lines

OOM = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
TIME_LIMIT = "slurmstepd: error: *** JOB 7 ON r6i4n5 CANCELLED AT 2021-05-27T21:52:36 DUE TO TIME LIMIT ***"
WORLD = "using world size: 4, data-parallel-size: 1, tensor-model-parallel size: 4, pipeline-model-parallel size: 1 "


def step(number: int, loss: str = "3.2E+00") -> str:
    return (
        f" iteration {number:8}/    1000 | consumed samples: {number * 4} | elapsed time per iteration (ms): 2767.3 | "
        f"learning rate: 1.500E-04 | global batch size: 4 | lm loss: {loss} | loss scale: 16384.0 | grad norm: 9.8 | "
    )


def timeout(rank: int, sequence: int = 12, at: str = "") -> str:
    return (
        f"{at}[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={sequence}, "
        "OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600410 milliseconds before timing out."
    )


def cause_of(*files: tuple[str, list[str]], reached_end: bool = False) -> Cause:
    parts: list[Part] = [part for name, lines in files for part in read_lines(name, lines)]
    return first_cause(parts, reached_end)


def place(cause: Cause) -> str | None:
    return str(cause.failure.place) if cause.failure else None


def test_memory_on_one_rank_is_the_cause_of_everyone_elses_timeouts() -> None:
    lines = [
        *(step(number) for number in range(1, 10)),
        f"[rank3]: {OOM}",
        *(f"{timeout(rank)}" for rank in range(3)),
        "srun: error: r6i4n5: task 3: Exited with exit code 1",
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
        "slurmstepd: error: *** STEP 7.0 ON r6i4n4 CANCELLED AT 2021-05-27T21:52:36 ***",
        "srun: error: r6i4n4: tasks 0-2: Terminated",
    ]
    cause = cause_of(("a.out", lines))
    assert (cause.ended, cause.rank, cause.node, place(cause)) == ("gpu_memory", 3, "r6i4n5", "a.out:10")
    assert cause.words == f"rank 3: {OOM}"
    assert cause.failed_node is None, "memory is not the node's fault"
    assert [failure.ended for failure in cause.ordered[1:4]] == ["collective_timeout"] * 3
    assert len(cause.echoes) == 4
    assert not cause.sure


def test_between_files_without_times_the_class_that_explains_the_others_goes_first() -> None:
    cause = cause_of(
        *((f"rank_{rank}.log", [timeout(rank)]) for rank in (0, 1, 2)),
        ("rank_3.log", ["Traceback (most recent call last):", OOM]),
    )
    assert (cause.ended, cause.rank, place(cause)) == ("gpu_memory", 3, "rank_3.log:2")
    assert "no times to compare" in cause.sure


def test_between_files_with_times_the_first_counts() -> None:
    early, late = "2024-04-06 03:02:12 ", "2024-04-06 03:12:13 "
    cause = cause_of(
        ("rank_0.log", [f"{late}CUDA out of memory. Tried to allocate 1 GiB"]),
        ("rank_1.log", [f"{early}KeyError: 'x'"]),
    )
    assert (cause.ended, cause.rank, cause.sure) == ("error", 1, "")
    assert [failure.rank for failure in cause.ordered] == [1, 0]


def test_clocks_that_may_differ_are_said() -> None:
    cause = cause_of(
        ("rank_0.log", ["2024-04-06 03:02:12 KeyError: 'x'"]),
        ("rank_1.log", ["2024-04-06 03:02:13 CUDA out of memory. Tried to allocate 1 GiB"]),
    )
    assert cause.ended == "gpu_memory"
    assert cause.sure == "error within 2 s of it, by clocks that may differ by as much"


def test_what_else_went_wrong_is_told_in_the_order_of_the_time() -> None:
    files = [(f"log.{n}", [f"2024-04-06 03:0{minute}:00 KeyError: '{minute}'"]) for n, minute in enumerate((3, 1, 2))]
    assert [failure.words for failure in cause_of(*files).ordered] == [
        "KeyError: '1'",
        "KeyError: '2'",
        "KeyError: '3'",
    ]


@pytest.mark.parametrize("first", [f"{timeout(1)}", "[rank1]: KeyError: 'x'"])
def test_what_a_rank_says_of_its_own_later_on_explains_nothing(first: str) -> None:
    assert cause_of(("a.out", [first, f"[rank1]: {OOM}"])).ended in ("collective_timeout", "error")
    assert cause_of(("a.out", [first, f"[rank2]: {OOM}"])).ended == "gpu_memory"


def test_where_all_that_is_known_is_a_plain_error_a_memory_fault_behind_it_is_not_the_cause() -> None:
    assert cause_of(("a.out", ["KeyError: 'x'", OOM])).ended == "error"


def test_a_lost_peer_is_never_the_cause_of_the_one_that_died() -> None:
    lost = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"
    cause = cause_of(("a.out", [f"[rank0]: {lost}", "[rank2]: ValueError: bad sample", f"[rank1]: {lost}"]))
    assert (cause.ended, cause.rank, len(cause.echoes)) == ("error", 2, 2)


def test_where_only_consequences_are_told_the_first_that_names_a_node_is_taken_and_said_to_be_one() -> None:
    cause = cause_of(
        (
            "a.out",
            [
                "RuntimeError: Connection reset by peer",
                "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2021-05-27T21:52:36 ***",
                "srun: error: n2: task 5: Killed",
            ],
        )
    )
    assert (cause.ended, cause.rank, cause.node) == ("error", 5, "n2")
    assert cause.sure.startswith("only its consequences are in the logs; nothing says who killed it")


def test_the_node_that_tells_of_a_failed_one_is_not_the_one_that_failed() -> None:
    """As a real cluster wrote it: n5 lives and says that its step was ended, n6 is gone."""
    told = (
        "slurmstepd-n5: error: *** STEP 3.0 ON n5 CANCELLED AT 2026-11-20T14:39:34 DUE TO NODE FAILURE, SEE SLURMCTLD"
    )
    cause = cause_of(("a.out", [told, "srun: error: Node failure on n6", "srun: got SIGCONT"]))
    assert (cause.ended, cause.failed_node) == ("node_failure", "n6")
    assert cause_of(("a.out", [told])).failed_node is None


def test_a_process_own_end_goes_before_that_of_those_that_were_ended() -> None:
    lines = ["srun: error: n1: tasks 0-1: Terminated", "srun: error: n2: task 5: Killed"]
    assert cause_of(("a.out", lines)).node == "n2"


def test_a_failed_node_is_named() -> None:
    cause = cause_of(
        (
            "a.out",
            [
                "srun: error: Node failure on r6i4n5",
                "slurmstepd: error: *** JOB 7 ON r6i4n4 CANCELLED AT 2021-05-27T21:52:36 DUE TO NODE FAILURE, SEE "
                "SLURMCTLD LOG FOR DETAILS ***",
            ],
        )
    )
    assert (cause.ended, cause.node, cause.failed_node) == ("node_failure", "r6i4n5", "r6i4n5")


def test_the_time_limit_blames_no_node_and_its_sigterms_nothing() -> None:
    cause = cause_of(
        ("a.out", [step(1), step(2), TIME_LIMIT, "srun: error: r6i4n5: task 0: Terminated", "KeyboardInterrupt"])
    )
    assert (cause.ended, cause.node, cause.rank, place(cause)) == ("walltime", None, None, "a.out:3")
    assert len(cause.echoes) == 2


def test_a_task_that_left_is_not_to_blame_for_the_time_limit() -> None:
    cause = cause_of(("a.out", [TIME_LIMIT, "srun: error: r6i4n5: task 3: Exited with exit code 1"]))
    assert (cause.ended, cause.rank, cause.node) == ("walltime", None, None)


def test_a_cancel_right_before_its_reason_gives_way_to_it() -> None:
    plain = TIME_LIMIT.replace(" DUE TO TIME LIMIT", "")
    assert cause_of(("a.out", [plain, "1|gpt|TIMEOUT|0:0"])).ended == "walltime"
    assert cause_of(("a.out", [plain])).ended == "cancelled"


# --- timeouts


def test_the_rank_that_alone_does_not_report_a_timeout_is_to_blame() -> None:
    lines = [WORLD, *(timeout(rank) for rank in (0, 1, 3)), "srun: error: n2: task 2: Killed"]
    cause = cause_of(("a.out", lines))
    assert (cause.ended, cause.rank, cause.node, cause.failed_node) == ("collective_timeout", 2, "n2", "n2")
    assert cause.words.endswith("; rank 2 did not report it, 3 of 4 ranks did")


def test_without_a_world_size_one_silent_rank_below_the_highest_is_still_seen() -> None:
    assert cause_of(("a.out", [timeout(rank) for rank in (0, 1, 3)])).rank == 2
    assert cause_of(("a.out", [timeout(rank) for rank in (0, 1, 2)])).rank == 0


def test_the_node_of_a_silent_rank_is_not_that_of_the_one_that_reports() -> None:
    reports = [Failure("collective_timeout", timeout(rank), Place("a", rank + 1), rank, "n1") for rank in (0, 1, 3)]
    cause = first_cause([Part("a", failures=reports)], False)
    assert (cause.rank, cause.node, cause.failed_node) == (2, None, None)


def test_the_rank_behind_all_others_is_to_blame() -> None:
    cause = cause_of(("a.out", [timeout(0, 14), timeout(1, 14), timeout(2, 12), timeout(3, 14)]))
    assert cause.rank == 2
    assert cause.words.endswith("; rank 2 is at collective 12 (ALLREDUCE), the others at 14")


def test_where_all_report_nobody_is_to_blame() -> None:
    cause = cause_of(("a.out", [WORLD, *(timeout(rank) for rank in range(4))]))
    assert (cause.rank, cause.failed_node) == (0, None)
    assert "did not report" not in cause.words


def test_where_few_report_nobody_is_to_blame() -> None:
    assert "did not report" not in cause_of(("a.out", [WORLD, timeout(0), timeout(1)])).words


def test_a_collective_that_failed_gives_way_to_its_reason_behind_it() -> None:
    lines = [
        "[rank1]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error",
        "[rank1]: ncclUnhandledCudaError: Call to CUDA function failed.",
        "[rank1]: Last error:",
        "[rank1]: Cuda failure 2 'out of memory'",
    ]
    cause = cause_of(("a.out", lines))
    assert (cause.ended, cause.rank, place(cause)) == ("gpu_memory", 1, "a.out:4")
    assert cause.sure == "printed 3 lines after error, which it explains"
    assert cause_of(("a.out", lines[:3])).ended == "error"


def test_a_barrier_names_the_rank_that_did_not_come() -> None:
    cause = cause_of(("a.out", ["RuntimeError: [Rank 0]: Ranks 1 failed to pass monitoredBarrier in 10000 ms"]))
    assert (cause.ended, cause.rank) == ("collective_timeout", 1)


def test_an_error_of_a_separate_file_without_times_is_no_end_of_a_run_that_says_it_is_done() -> None:
    """An error of the preamble in .err: nothing shows that it came after the last step in .out."""
    out = ("job.out", [step(1), step(2), "[after training is done] datetime: 2024-03-05 12:00:00 "])
    errors = ("job.err", ["ModuleNotFoundError: No module named 'apex'"])
    assert cause_of(out, errors, reached_end=True).ended == "done"
    assert cause_of(out, errors).ended == "user_error", "the planned steps were not reached"
    after = (out[0], [*out[1], "OSError: [Errno 28] No space left on device"])
    assert cause_of(after, errors, reached_end=True).ended == "disk_full"


NO_PYTHON = "/var/spool/slurmd/job7/slurm_script: line 31: python: command not found"


@pytest.mark.parametrize(
    "errors",
    [
        [NO_PYTHON],
        ["python: can't open file '/home/me/nodes.py': [Errno 2] No such file or directory"],
        ["sbatch: error: Batch job submission failed: Job dependency problem"],
        ["ModuleNotFoundError: No module named 'nodes'", WORLD],
        [
            "ModuleNotFoundError: No module named 'nodes'",
            "Setting OMP_NUM_THREADS environment variable for each process",
        ],
    ],
)
def test_an_error_before_the_ranks_started_is_no_cause_if_they_trained(errors: list[str]) -> None:
    steps = [step(number) for number in range(1, 9)]
    cause = cause_of(("a.out", steps), ("a.err", errors))
    assert (cause.ended, len(cause.survived)) == ("unknown", 1)
    assert cause_of(("a.out", [WORLD]), ("a.err", errors)).ended == "user_error", "nothing was trained"
    limited = cause_of(("a.out", steps), ("a.err", [*errors, TIME_LIMIT]))
    assert (limited.ended, place(limited)) == ("walltime", f"a.err:{len(errors) + 1}")


def test_an_error_after_the_last_step_or_of_no_known_time_stays_a_cause() -> None:
    steps = [step(number) for number in range(1, 9)]
    assert cause_of(("a.out", [*steps, NO_PYTHON])).ended == "user_error"
    assert cause_of(("a.out", steps), ("a.err", [WORLD, "KeyError: 'x'"])).ended == "error"


def test_the_time_limit_goes_before_what_ranks_print_later_in_the_same_file_of_errors() -> None:
    limit = "slurmstepd: error: *** STEP 4711.0 ON n1 CANCELLED AT 2024-03-05T10:11:12 DUE TO TIME LIMIT ***"
    errors = ("job.err", [limit, "RuntimeError: CUDA error: unspecified launch failure"])
    assert cause_of(("job.out", [step(1), step(2)]), errors).ended == "walltime"


@pytest.mark.parametrize(
    ("line", "ended"),
    [
        ("RuntimeError: Insufficient free space on volume /scratch: 1.2 GiB left", "disk_full"),
        ("2025-03-05 10:11:12,123 ERROR train: Insufficient free space on output volume", "disk_full"),
        ("OSError: Not enough disk space to save iter_0000500", "disk_full"),
        ("UserWarning: Not enough free disk space to download the file.", "unknown"),
    ],
)
def test_a_full_disk_in_other_words(line: str, ended: str) -> None:
    assert cause_of(("a.out", [step(1), line])).ended == ended


def test_a_rank_that_reached_the_barrier_is_not_the_cause() -> None:
    """The words are those of PyTorch's ProcessGroupGloo.cpp: rank 2 waits for rank 0, which names who never came."""
    waits = (
        "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. "
    )
    lines = [
        step(1),
        f"[rank2]: RuntimeError: {waits}Please check rank 0 logs for faulty rank.",
        "[rank0]: RuntimeError: [Rank 0]: Ranks 1, 5 failed to pass monitoredBarrier in 10000 ms",
    ]
    cause = cause_of(("a.out", lines))
    assert (cause.ended, cause.rank, place(cause)) == ("collective_timeout", 1, "a.out:3")
    assert cause.words.startswith("ranks 1, 5 did not reach the barrier; rank 0: ")
    assert cause_of(("a.out", lines[:2])).rank == 2, "alone it is all that is known"


def test_our_own_watchdog_names_rank_and_node() -> None:
    silent = "hang: no rank made a step for 312 s; ranks 4-7 on n2 are silent, last seen after step 17; ranks 0-3 wait"
    cause = cause_of(("log", [step(1), silent, "srun: error: n1: task 0: Exited with exit code 1"]))
    assert (cause.ended, cause.rank, cause.node, cause.failed_node) == ("hang", 4, "n2", "n2")
    assert "hang: no rank made a step for 312 s; ranks 4-7 on n2 are silent" in cause.words
    nobody = cause_of(
        ("log", ["hang: no rank made a step for 312 s; ranks 0-3 wait in all_reduce (loop.py:96 in run)"])
    )
    assert (nobody.ended, nobody.rank, nobody.failed_node) == ("hang", None, None)


# --- survived


def test_what_training_went_on_after_ended_nothing() -> None:
    lines = [step(1), "ImportError: no flash_attn", step(2), step(3), TIME_LIMIT]
    cause = cause_of(("a.out", lines))
    assert cause.ended == "walltime"
    assert [failure.words for failure in cause.survived] == ["ImportError: no flash_attn"]
    assert cause.survived[0] in cause.ordered


def test_a_bar_that_went_on_and_a_summary_at_the_end_tell_that_it_was_survived() -> None:
    bars = [f" {n}%|#| {n}/100 [00:{n}<01:00, 1.00s/it]" for n in (10, 20, 30)]
    summary = "{'train_runtime': 919.094, 'train_samples_per_second': 1.088, 'epoch': 1.0}"
    lines = [bars[0], "ImportError: no apex", *bars[1:], "KeyError: 'logged'", summary, "MemoryError"]
    cause = cause_of(("a.out", lines))
    assert cause.ended == "host_memory"
    assert [failure.words for failure in cause.survived] == ["ImportError: no apex", "KeyError: 'logged'"]


def test_one_late_step_of_another_rank_does_not_make_a_failure_survived() -> None:
    assert cause_of(("a.out", [step(1), f"[rank3]: {OOM}", step(2)])).ended == "gpu_memory"


def test_a_run_that_reached_its_end_is_done_though_its_ranks_part_noisily() -> None:
    lines = [step(1), "KeyError: 'x'", step(2), "RuntimeError: Connection reset by peer"]
    cause = cause_of(("a.out", lines), reached_end=True)
    assert (cause.ended, cause.words, cause.failure) == ("done", "", None)
    assert len(cause.ordered) == 2


def test_a_failure_after_the_last_step_counts_even_so() -> None:
    lines = [step(1), step(2), "OSError: [Errno 28] No space left on device: 'ckpt.pt'"]
    assert cause_of(("a.out", lines), reached_end=True).ended == "disk_full"


STEP = "step:{}/100 train_time:{}ms step_avg:50.00ms"


def test_no_error_before_the_last_step_is_the_cause() -> None:
    """A container's preamble: nvidia-smi is missing, an import is tried; then the run trains."""
    preamble = ["ModuleNotFoundError: No module named 'apex'", "RuntimeError: no NVIDIA driver"]
    assert cause_of(("a.out", [*preamble, STEP.format(1, 50)])).ended == "unknown"
    late = cause_of(("a.out", [*preamble, STEP.format(1, 50), "KeyError: 'input_ids'"]))
    assert (late.ended, late.words) == ("error", "KeyError: 'input_ids'")
    # By time of day the error log of the same run is older than its last step.
    titan = "[titan] 2025-07-21 15:57:43,242 - root - INFO - step: {}  loss:  4.6  grad_norm:  2.5  "
    titan += "memory:  1.00GiB(1.00%)  tps: 35,051  tflops: 3.59  mfu: 0.36%"
    files = ("a.out", [titan.format(1), titan.format(2)]), ("a.err", ["2025-07-21 15:40:00,001 RuntimeError: retrying"])
    assert cause_of(*files).ended == "unknown"


def test_the_time_limit_goes_before_what_ranks_print_while_they_are_ended() -> None:
    torn = ["[rank3]: RuntimeError: NCCL communicator was aborted", "ValueError: I/O operation on closed file"]
    assert cause_of(("a.out", [STEP.format(9, 450), *torn, TIME_LIMIT])).ended == "walltime"
    assert cause_of(("a.out", [STEP.format(9, 450), *torn]), ("a.err", [TIME_LIMIT])).ended == "walltime"
    assert cause_of(("a.out", [STEP.format(9, 450), OOM, TIME_LIMIT])).ended == "gpu_memory"


# What ranks print while Slurm ends them, each as PyTorch, Python or srun prints it.
ENDED_BY_SLURM = (
    ["WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 4714 closing signal SIGTERM"],
    ["torch.distributed.elastic.multiprocessing.api.SignalException: Process 4710 got signal: 15"],
    ["ChildFailedError: ", "  rank      : 3 (local_rank: 3)", "  exitcode  : -15 (pid: 4712)"],
    ["BrokenPipeError: [Errno 32] Broken pipe"],
    ["KeyboardInterrupt"],
    ["RuntimeError: DataLoader worker (pid 77) is killed by signal: Terminated. "],
    ["[rank3]: RuntimeError: NCCL communicator was aborted on rank 3."],
    ["[rank1]: torch.distributed.DistNetworkError: Connection reset by peer"],
    ["AttributeError: 'NoneType' object has no attribute 'close'"],
    ["srun: error: n1: task 0: Terminated"],
)
EXPLAINS_ITSELF = (
    (f"[rank3]: {OOM}", "gpu_memory"),
    ("[rank3]: KeyError: 'input_ids'", "error"),
    ("TypeError: forward() got an unexpected keyword argument 'position_ids'", "error"),
    ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x768 and 1024x768)", "error"),
    ("ModuleNotFoundError: No module named 'apex'", "user_error"),
)


@pytest.mark.parametrize("lines", ENDED_BY_SLURM, ids=lambda lines: lines[0][:20])
def test_an_error_that_slurm_caused_gives_way_to_the_limit_printed_after_it(lines: list[str]) -> None:
    """One file of errors without times, and the same lines in the log of steps."""
    out, errors = ("job.out", [step(1), step(2)]), [*lines, TIME_LIMIT]
    for files in ((out, ("job.err", errors)), (("job.err", errors), out), (("job.out", [*out[1], *errors]),)):
        assert cause_of(*files).ended == "walltime"


@pytest.mark.parametrize(("line", "ended"), EXPLAINS_ITSELF)
def test_a_failure_that_explains_itself_before_the_limit_is_the_cause(line: str, ended: str) -> None:
    """The other ranks waited for it until the limit; an error printed after the limit is its consequence."""
    out, traceback = ("job.out", [step(1), step(2)]), "Traceback (most recent call last):"
    for files in (
        (out, ("job.err", [traceback, line, TIME_LIMIT])),
        (("a.out", [*out[1], traceback, line, TIME_LIMIT]),),
    ):
        cause = cause_of(*files)
        assert (cause.ended, line.split(": ")[-1] in cause.words) == (ended, True)
    if ended == "error":
        assert cause_of(out, ("job.err", [TIME_LIMIT, traceback, line])).ended == "walltime"


def test_what_python_ignores_is_no_failure() -> None:
    ignored = [
        "Exception ignored in: <function _ConnectionBase.__del__ at 0x7f5fa2867e80>",
        "Traceback (most recent call last):",
        '  File "/usr/lib/python3.10/multiprocessing/connection.py", line 132, in __del__',
        "    self._close()",
        "OSError: [Errno 9] Bad file descriptor",
    ]
    done = "[after training is done] datetime: 2026-01-16 08:01:12 "
    assert cause_of(("a.out", [STEP.format(9, 450), done, *ignored])).ended == "done"
    assert cause_of(("a.out", [STEP.format(9, 450), *ignored])).ended == "unknown"
    assert cause_of(("a.out", [STEP.format(9, 450), *ignored, "KeyError: 'x'"])).words == "KeyError: 'x'"


def test_nothing_said_is_unknown() -> None:
    cause = cause_of(("a.out", [step(1), step(2)]))
    assert (cause.ended, cause.failure, cause.ordered) == ("unknown", None, [])
    assert first_cause([], False).ended == "unknown"


# --- the rest


def test_a_bar_that_is_drawn_again_after_the_traceback_is_no_step() -> None:
    bar = " 67%|██████▋   | 20/30 [00:13<00:06,  1.46it/s]"
    full = "OSError: [Errno 28] No space left on device"
    assert cause_of(("a.out", [bar, full, bar])).ended == "disk_full"
    survived = [bar, full, *(bar.replace("20/30", f"{number}/30") for number in (21, 22))]
    assert cause_of(("a.out", survived)).ended != "disk_full"


def test_torchelastics_block_is_one_failure_with_rank_node_and_exit_code() -> None:
    block = [
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2021-05-28_22:29:50",
        "  host      : r6i4n5",
        "  rank      : 3 (local_rank: 3)",
        "  exitcode  : -11 (pid: 4711)",
        "  error_file: <N/A>",
    ]
    cause = cause_of(("a.out", block))
    assert (cause.ended, cause.rank, cause.node) == ("error", 3, "r6i4n5")
    assert cause.words == "rank 3 was ended by signal 11 (SIGSEGV), the first that its launcher saw fail"
    found = cause_of(("a.out", [f"[rank3]: {OOM}", *block]))
    assert (found.ended, found.node) == ("gpu_memory", "r6i4n5")


def test_of_torchelastics_ranks_those_that_it_ended_itself_did_not_leave() -> None:
    ended = ["  host      : localhost", "  rank      : 0 (local_rank: 0)", "  exitcode  : -15 (pid: 1)"]
    left = ["  host      : localhost", "  rank      : 1 (local_rank: 1)", "  exitcode  : 1 (pid: 2)"]
    cause = cause_of(("a.out", ["KeyError: 'x'", *ended, *left]))
    assert (cause.rank, cause.node) == (1, None), "localhost names no node"


def test_lines_of_cut_off_blocks_are_neither_lost_nor_mixed() -> None:
    host = "  host      : n{}"
    far = cause_of(("a.out", [host.format(1), *[""] * 20, "KeyError: 'x'"]))
    assert len(far.ordered) == 2
    lines = [host.format(1), host.format(2), "  rank      : 3 (local_rank: 3)", "  exitcode  : 1 (pid: 2)"]
    assert cause_of(("a.out", lines)).node == "n2"


def test_a_block_that_was_cut_off_is_told_as_far_as_it_goes() -> None:
    cause = cause_of(
        ("a.out", ["Root Cause (first observed failure):", "  host      : n5", "  rank      : 3 (local_rank: 3)"])
    )
    assert (cause.ended, len(cause.ordered)) == ("error", 3)
    assert cause.node == "n5"


def test_of_chained_exceptions_the_first_raised_is_the_cause() -> None:
    lines = [
        "KeyError: 'tokens'",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "RuntimeError: batch 12 cannot be made",
    ]
    assert cause_of(("a.out", lines)).words == "KeyError: 'tokens'"


def test_the_words_are_one_plain_line_without_secrets() -> None:
    line = "ValueError: \x07 no such \x85 model, HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz given"
    assert cause_of(("a.out", [line])).words == "ValueError: no such model, HF_TOKEN=[removed] given"


def test_words_of_two_schedulers_and_a_program_agree_on_the_one_that_explains() -> None:
    files = (("a.out", ["ValueError: something torn down"]), ("sacct.txt", ["7|gpt|NODE_FAIL|1:0"]))
    assert cause_of(*files).ended == "node_failure"
    files = (("a.out", [OOM]), ("sacct.txt", ["7|gpt|TIMEOUT|0:0"]))
    assert cause_of(*files).ended == "gpu_memory"


@pytest.mark.parametrize("words", ["task 5: Exited with exit code 1", "task 5: Exited with exit code 137"])
def test_a_traceback_without_a_rank_is_that_of_the_only_task_that_left(words: str) -> None:
    cause = cause_of(
        ("a.out", ["KeyError: 'x'", f"srun: error: n2: {words}", "srun: error: n1: tasks 0-3: Terminated"])
    )
    assert (cause.words, cause.rank, cause.node) == ("rank 5: KeyError: 'x'", 5, "n2")
    assert "the launcher says" in cause.sure
    both = cause_of(("a.out", ["KeyError: 'x'", "srun: error: n1: tasks 0-3: Exited with exit code 1"]))
    assert (both.rank, both.node) == (None, None)


def test_who_sent_a_sigkill_is_not_made_up() -> None:
    cause = cause_of(("a.out", ["srun: error: n2: task 5: Killed"]))
    assert cause.ended == "error"
    assert "most often the kernel, out of memory" in cause.sure
    oom = "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0. Some of your processes may have been killed"
    assert cause_of(("a.out", ["srun: error: n2: task 5: Killed", oom])).ended == "host_memory"


@pytest.mark.parametrize("echo", [False, True])
def test_many_failures_take_no_square_of_time(echo: bool) -> None:
    """A square of 40,000 would take minutes."""
    failures = [Failure("error", f"KeyError: {n}", Place("a", n), n % 64, None, None, echo) for n in range(1, 40_001)]
    parts = [Part(f"log_{rank}.txt", failures=failures[rank::64]) for rank in range(64)]
    assert len(first_cause(parts, False).ordered) == 40_000


_FAILURES = st.builds(
    Failure,
    st.sampled_from(ENDED),
    st.text(max_size=60)
    | st.sampled_from(["rank     : 3 (local_rank: 3)", "exitcode  : 1 (pid: 2)", "host      : n1"]),
    st.builds(Place, st.just("x"), st.integers(1, 40)),
    st.none() | st.integers(0, 10**9),
    st.none() | st.sampled_from(["n1", "n2"]),
    st.none() | st.floats(0, 5e9) | st.integers(0, 5).map(float),
    st.booleans(),
)


@given(
    st.lists(st.tuples(st.sampled_from(["a.log", "rank_1.log"]), st.lists(_FAILURES, max_size=12)), max_size=3),
    st.booleans(),
)
def test_whatever_failures_there_are_each_is_told_once_the_cause_first(files, reached_end: bool) -> None:
    parts = [
        Part(name, failures=[replace(failure, place=Place(f"{name}{n}", failure.place.line)) for failure in failures])
        for n, (name, failures) in enumerate(files)
    ]
    cause = first_cause(parts, reached_end)
    places = [str(failure.place) for failure in cause.ordered]
    assert cause.ended in ENDED
    assert len(places) == len(set(places))
    assert {*places} <= {str(failure.place) for part in parts for failure in part.failures}
    assert cause.failure is None or cause.ordered[0] == cause.failure
    assert cause.words.isprintable()
    # A line that one pattern takes for a failure and another for a consequence is a consequence.
    told = [failure for part in parts for failure in part.failures]
    echoed = {str(failure.place) for failure in told if failure.echo}
    assert {str(failure.place) for failure in told} <= echoed or cause.failure is not None


def test_where_all_report_no_node_is_left_out_next_time() -> None:
    lines = [WORLD, *(timeout(rank) for rank in range(4)), "srun: error: n1: task 0: Exited with exit code 1"]
    cause = cause_of(("a.out", lines))
    assert (cause.ended, cause.rank, cause.node) == ("collective_timeout", 0, "n1")
    assert cause.failed_node is None


def test_a_barrier_names_those_that_never_came_before_the_one_that_waited() -> None:
    """NVIDIA/nccl/issues/849."""
    line = "RuntimeError: [Rank 0]: Ranks 4, 5, 6, 7 failed to pass monitoredBarrier in 2000000 ms"
    cause = cause_of(("a.out", [f"[rank0]: {line}"]))
    assert cause.words.startswith("ranks 4, 5, 6, 7 did not reach the barrier; ")
    assert (cause.ended, cause.rank) == ("collective_timeout", 4)
