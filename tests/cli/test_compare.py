"""`hpc-gpt compare`, as a user has it."""

import json

import numpy as np

from hpc_gpt.core.files import logs_dir
from tests.cli.command import in_process
from tests.made_runs import add_attempt, make_run, metrics_line


def finished(seed: int, step_s: float = 0.5, steps: int = 100, **overrides):
    run = make_run(logs_dir(), **overrides)
    noise = np.random.default_rng(seed).standard_normal(steps)
    lines = [metrics_line(step, step_s=step_s * (1 + 0.02 * noise[step - 1])) for step in range(1, steps + 1)]
    add_attempt(run, lines)
    return run


def test_two_runs_of_ours(own_folders):
    a, b = finished(1), finished(2, step_s=0.4, engine__recompute="full")
    done = in_process("compare", a.run_id, b.path, code=0)
    first, second, empty, answer, *rest = done.stdout.splitlines()
    assert first.startswith(f"A  demo/{a.run_id}, tp2-pp2-dp1")
    assert second.startswith(f"B  demo/{b.run_id}, ")
    assert empty == ""
    assert answer.startswith("B against A: faster by 25 % (")
    assert any(line.split() == ["recompute", "none", "->", "full"] for line in rest)
    assert not done.stderr


def test_json_is_one_object_and_nothing_else(own_folders):
    names = [finished(seed, step_s).run_id for seed, step_s in ((1, 0.5), (2, 0.5), (3, 1.0))]
    done = in_process("compare", *names, "--json")
    found = json.loads(done.stdout)
    assert found["schema"] == 1
    assert [(each["a"], each["b"], each["verdict"]) for each in found["comparisons"]] == [
        (names[0], names[1], "no_difference"),
        (names[0], names[2], "slower"),
    ]
    assert not done.stderr


def test_of_three_each_is_compared_with_the_first(own_folders):
    names = [finished(seed).run_id for seed in (1, 2, 3)]
    done = in_process("compare", *names)
    assert "B against A: no difference shown (" in done.stdout
    assert "C against A: no difference shown (" in done.stdout
    assert "each of the 2 intervals has 95 % confidence by itself" in done.stderr


def test_a_record_that_was_kept_makes_no_claim(own_folders, tmp_path):
    run, other = finished(1), finished(2)
    (kept := tmp_path / "kept.json").write_text(in_process("report", other.path, "--json").stdout)
    done = in_process("compare", run.run_id, kept, code=0)
    assert "no interval can be given: B has no times of single steps, only step_s" in done.stdout
    # In its run folder a record stands beside the steps.
    assert "no difference shown" in in_process("compare", run.run_id, other.path / "record.json").stdout


def megatron_log(path, seed: int, step_ms: float):
    noise = np.random.default_rng(seed).standard_normal(60)
    lines = [
        f" iteration {step:8d}/     100 | consumed samples: {step * 512:12d} | elapsed time per iteration (ms): "
        f"{step_ms * (1 + 0.01 * noise[step - 1]):.1f} | learning rate: 1.500E-04 | global batch size:   512 | "
        f"lm loss: {2 + 4 / step:.6E} | loss scale: 1.0 | grad norm: 1.000 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 |\n"
        for step in range(1, 61)
    ]
    path.write_text("".join(lines))
    return path


def test_anyones_logs(tmp_path):
    a, b = megatron_log(tmp_path / "a.log", 1, 1000.0), megatron_log(tmp_path / "b.out", 2, 800.0)
    done = in_process("compare", a, b, code=0)
    assert "\nB against A: faster by 24.8 % (" in done.stdout
    assert "the same to the last digit at all 60 common steps" in done.stdout
    assert "equal losses: two logs of one run" in done.stdout


def test_a_log_against_a_run_of_ours(own_folders, tmp_path):
    done = in_process("compare", finished(1).run_id, megatron_log(tmp_path / "a.log", 1, 1000.0), code=0)
    # The log says its batch, which is another, and not how long a sequence is.
    assert "x; no interval can be given: a step is not the same work in both" in done.stdout


def test_the_shared_logs_have_too_few_steps_for_a_claim(shared):
    done = in_process("compare", *sorted((shared / "logs").glob("*.out")), code=0)
    assert done.stdout.count("no interval can be given: ") == 2
    assert "faster by" not in done.stdout
    assert "lower by" not in done.stdout


def test_equal_runs_on_a_busy_machine_are_not_told_apart(own_folders):
    """Half of A's time, and an eighth of B's, something else took the cores for dozens of steps: 0.5 s, not 0.1."""
    runs = []
    for seed, busy in ((1, (60, 200)), (2, (30, 60))):
        run, noise = make_run(logs_dir()), np.random.default_rng(seed).standard_normal(241)
        steps = range(1, 241)
        lines = [
            metrics_line(at, step_s=(0.5 if busy[0] < at <= busy[1] else 0.1) * (1 + 0.02 * noise[at])) for at in steps
        ]
        add_attempt(run, lines)
        runs.append(run.run_id)
    done = in_process("compare", *runs)
    assert "step time  0.489 -> 0.100 s" in done.stdout, done.stdout
    assert "B against A: no difference shown (" in done.stdout
    assert "  note: A: step times spread widely: 10th percentile" in done.stdout
