"""Which logs are one run: ranks, streams, attempts, wrappers; and which are not."""

import pytest

from hpc_gpt.report.gather import gather_paths
from tests.readers.made_logs import dump, iteration, iterations, write_log

NCCL = "[rank3]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1, unhandled system error"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 31.75 GiB"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "lab"


def runs_of(folder, tmp_path):
    gathered = gather_paths([str(folder)], tmp_path / "logs")
    return {str(run.record.run): run for run in gathered.runs}


def only(folder, tmp_path):
    runs = runs_of(folder, tmp_path)
    assert len(runs) == 1, sorted(runs)
    return next(iter(runs.values()))


def files(run):
    return sorted(path.name for path in run.files)


@pytest.mark.parametrize(
    "names",
    [
        ["rank_0.log", "rank_1.log", "rank_2.log"],
        ["train.rank0.log", "train.rank1.log"],
        ["node0/train.log", "node1/train.log"],
        ["attempt_0/0/stdout.log", "attempt_0/1/stdout.log"],
        ["log.0.out", "log.1.out", "log.2.out"],
        ["gpt-4711-0.out", "gpt-4711-1.out"],
    ],
)
def test_ranks_by_their_names_are_one_run(folder, tmp_path, names):
    write_log(folder / names[0], dump(), iterations(1, 10))
    for name in names[1:]:
        write_log(folder / name, "> compiling and loading fused kernels ...", OOM)
    run = only(folder, tmp_path)
    assert run.record.run in ("lab", "train", "log", "gpt-4711")
    assert len(run.files) == len(names)
    assert len(run.steps["step"]) == 10
    assert run.failures


@pytest.mark.parametrize("other", ["job.err", "job.log", "job.stderr"])
def test_the_streams_of_a_job_are_one_run(folder, tmp_path, other):
    write_log(folder / "job.out", dump(), iterations(1, 10))
    write_log(folder / other, OOM)
    run = only(folder, tmp_path)
    assert run.record.ended == "gpu_memory"
    assert str(folder / other) in run.record.cause


def test_a_rank_that_prints_the_same_steps_is_counted_once(folder, tmp_path):
    for rank in range(2):
        write_log(folder / f"log.{rank}.out", dump(), [iteration(s, 1000 + rank + s % 3) for s in range(1, 11)])
    run = only(folder, tmp_path)
    assert len(run.steps["step"]) == 10


def test_numbers_behind_a_word_for_runs_are_runs(folder, tmp_path):
    for number in range(2):
        write_log(folder / f"run_{number}.log", dump(), [iteration(s, 1000 + number) for s in range(1, 11)])
    assert sorted(runs_of(folder, tmp_path)) == ["run_0", "run_1"]


def test_an_arrays_tasks_are_runs(folder, tmp_path):
    for task in range(3):
        write_log(folder / f"slurm-4711_{task}.out", dump(), [iteration(s, 1000 + task) for s in range(1, 11)])
    assert len(runs_of(folder, tmp_path)) == 3


def test_the_same_log_in_many_folders_is_as_many_runs(folder, tmp_path):
    for number in range(5):
        write_log(folder / f"{number}" / "train.log", dump(), iterations(1, 10))
    assert sorted(runs_of(folder, tmp_path)) == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    "changed",
    [
        {"micro_batch_size": 2},
        {"hidden_size": 512},
        {"tensor_model_parallel_size": 4, "data_parallel_size": 1},
        {"global_batch_size": 32},
    ],
)
def test_what_contradicts_is_never_merged(folder, tmp_path, changed):
    write_log(folder / "rank_0.log", dump(), iterations(1, 10))
    write_log(folder / "rank_1.log", dump(**changed), iterations(1, 10, batch=changed.get("global_batch_size", 16)))
    assert len(runs_of(folder, tmp_path)) == 2


def test_a_requeue_in_the_same_file_is_another_attempt(folder, tmp_path):
    write_log(folder / "gpt-47110.out", dump(), iterations(1, 30), dump(), iterations(21, 40))
    run = only(folder, tmp_path)
    record = run.record
    assert [(each["first_step"], each["last_step"]) for each in record.attempts] == [(1, 30), (21, 40)]
    assert run.steps.attempt.tolist() == [1] * 30 + [2] * 20
    assert run.steps.counts.tolist() == [True] * 20 + [False] * 10 + [True] * 20
    assert record.attempts[0]["ended"] == "requeued"
    # 20 of the first attempt and 20 of the second count; the first of each is warm-up.
    assert (record.steps_used, record.warmup_steps, record.step_s) == (38, 2, 1.0)


def test_a_requeue_in_a_file_of_its_own_is_another_attempt(folder, tmp_path):
    write_log(folder / "gpt-10001.out", dump(), iterations(1, 30))
    write_log(folder / "gpt-10002.out", dump(), iterations(31, 50))
    run = only(folder, tmp_path)
    assert [each["job_id"] for each in run.record.attempts] == ["10001", "10002"]
    assert run.record.job_id == "10002"
    assert files(run) == ["gpt-10001.out", "gpt-10002.out"]
    assert run.steps.counts.all()


def test_the_same_job_run_again_from_its_first_step_is_another_run(folder, tmp_path):
    write_log(folder / "gpt-10001.out", dump(), iterations(1, 30))
    write_log(folder / "gpt-10002.out", dump(), iterations(1, 30))
    assert sorted(runs_of(folder, tmp_path)) == ["gpt-10001", "gpt-10002"]


def test_a_start_that_came_to_no_step_belongs_to_the_one_after_it(folder, tmp_path):
    write_log(folder / "gpt-10001.out", dump(save="/ckpt/a"), OOM)
    write_log(folder / "gpt-10002.out", dump(save="/ckpt/a"), iterations(1, 30))
    run = only(folder, tmp_path)
    assert [each["ended"] for each in run.record.attempts] == ["gpu_memory", "unknown"]


def test_attempts_of_torchrun(folder, tmp_path):
    write_log(folder / "attempt_0" / "0" / "stderr.log", dump(), iterations(1, 30))
    write_log(folder / "attempt_0" / "1" / "stderr.log", OOM)
    write_log(folder / "attempt_1" / "0" / "stderr.log", dump(), iterations(26, 40))
    run = only(folder, tmp_path)
    assert [each["ended"] for each in run.record.attempts] == ["gpu_memory", "unknown"]
    assert [each["first_step"] for each in run.record.attempts] == [1, 26]


def test_a_rotated_log_is_one_run_in_the_order_of_its_steps(folder, tmp_path):
    write_log(folder / "train.log.2", dump(), iterations(1, 10))
    write_log(folder / "train.log.1", iterations(11, 20))
    write_log(folder / "train.log", iterations(21, 30))
    run = only(folder, tmp_path)
    assert run.steps["step"].tolist() == list(range(1, 31))
    assert run.record.gpus == 8


def test_several_runs_in_one_file_of_which_the_last_was_done(folder, tmp_path):
    write_log(
        folder / "all.out",
        *(dump(micro_batch_size=8), OOM),
        *(dump(micro_batch_size=4), iterations(1, 10)),
        *(dump(micro_batch_size=2), iterations(1, 20, of=20)),
    )
    runs = runs_of(folder, tmp_path)
    assert sorted(runs) == ["all", "all#2", "all#3"]
    assert [runs[name].record.micro_batch for name in sorted(runs)] == [8, 4, 2]
    assert [runs[name].record.ended for name in sorted(runs)] == ["gpu_memory", "unknown", "done"]


def test_a_finished_run_and_the_same_one_again_in_one_file_are_two(folder, tmp_path):
    write_log(folder / "a.out", dump(), iterations(1, 10, of=10), dump(), iterations(1, 10, of=10))
    assert sorted(runs_of(folder, tmp_path)) == ["a", "a#2"]


def test_what_a_scheduler_wrote_beside_is_of_the_run_of_that_job(folder, tmp_path):
    write_log(folder / "gpt-10001.out", dump(), iterations(1, 10))
    write_log(folder / "other-10002.out", dump(), iterations(1, 10))
    end = "slurmstepd: error: *** JOB 10002 ON r6i4n5 CANCELLED AT 2021-05-27T21:52:36 DUE TO TIME LIMIT ***"
    write_log(folder / "slurm-10002.out", end)
    runs = runs_of(folder, tmp_path)
    assert {name: run.record.ended for name, run in runs.items()} == {"gpt-10001": "unknown", "other-10002": "walltime"}


def test_a_launchers_log_beside_the_only_run_is_of_it(folder, tmp_path):
    write_log(folder / "train.log", dump(), iterations(1, 10))
    write_log(folder / "launcher.txt", OOM)
    assert only(folder, tmp_path).record.ended == "gpu_memory"


def test_names_are_unlike_all_others(folder, tmp_path):
    for site in ("a", "b"):
        for number in (1, 2):
            write_log(folder / site / f"seed{number}" / "train.log", dump(), iterations(1, 5))
    write_log(folder / "c" / "gpt2.log", dump(), iterations(1, 5))
    assert sorted(runs_of(folder, tmp_path)) == ["a/seed1", "a/seed2", "b/seed1", "b/seed2", "gpt2"]


def bar(step, loss):
    return f" {step}%|██▌       | {step}/100 [0:00:{step // 2:02d}<0:00:50,  2.00it/s, loss={loss:.3f}]"


def test_steps_counted_anew_in_each_epoch_are_one_attempt(folder, tmp_path):
    lines = [bar(step, 9 - 2 * epoch - step / 100) for epoch in range(3) for step in range(10, 101, 10)]
    write_log(folder / "train.log", lines)
    run = only(folder, tmp_path)
    assert len(run.record.attempts) == 1
    assert run.steps["step"].tolist() == list(range(10, 301, 10))
    assert run.steps.counts.all()
    assert (run.record.loss_first, run.record.loss_last) == (8.9, 4.0)


def test_a_start_anew_without_a_word_is_an_attempt_where_the_loss_begins_anew(folder, tmp_path):
    losses = [{"loss": 10 - step / 20} for step in range(100)]
    lines = [iteration(step, **losses[step]) for _ in range(2) for step in range(1, 61)]
    write_log(folder / "train.log", lines)
    run = only(folder, tmp_path)
    assert len(run.record.attempts) == 2
    assert run.steps.counts.tolist() == [False] * 60 + [True] * 60


def test_what_differs_between_attempts_by_its_nature_parts_no_run(folder, tmp_path):
    first, second = dump(load=None, rank=0, lr=0.1), dump(load="/ckpt", rank=3, lr=0.1)
    write_log(folder / "a.out", first, iterations(1, 30), second, iterations(21, 40))
    write_log(folder / "b.out", first, iterations(1, 30), dump(lr=0.2), iterations(1, 40))
    assert sorted(runs_of(folder, tmp_path)) == ["a", "b", "b#2"]
