"""Records of our own run folders: every state a run can be in, and every file half there."""

import json
import math
import os
import platform
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_gpt.core.ends.failures import ENDED
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.formulas import tflops_hardware, tflops_model, tflops_seed
from hpc_gpt.core.process import start_time
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.settings.resolved import config_hash
from hpc_gpt.reader.readers.runs.own_run import read_run
from tests.made_runs import STARTED, add_attempt, make_run, metrics_line, with_attempt, with_job


def test_a_finished_run(run):
    add_attempt(run, 100)
    record = read_run(run)
    assert (record.ended, record.cause) == ("done", None)
    assert (record.gpus, record.tp, record.pp, record.dp) == (4, 2, 2, 1)
    assert (record.micro_batch, record.micro_batches, record.global_batch) == (8, 4, 32)
    assert (record.step_s, record.warmup_steps, record.steps_used) == (0.5, 1, 99)
    assert (record.tokens_per_s, record.tokens_total) == (32 * 128 / 0.5, 100 * 32 * 128)
    assert (record.loss_first, record.loss_last) == (6.0, 2.04)
    assert (record.sources["loss_last"], record.job_id) == ("attempts/1/metrics.jsonl:100", "4711")
    assert (record.started, record.ended_at) == ("2023-11-14T22:13:20Z", "2023-11-14T23:13:20Z")
    assert [attempt["last_step"] for attempt in record.attempts] == [100]


def test_a_run_of_ours_has_its_cp_and_an_earlier_one_has_1(logs):
    wide = with_attempt(make_run(logs, experiment="llama-tiny", layout__cp=2), 10)
    record = read_run(wide)
    assert (record.gpus, record.cp, record.dp, record.global_batch) == (2, 2, 1, 16)
    assert record.tokens_per_s == 16 * 128 / 0.5
    plain = make_run(logs, experiment="llama-tiny")
    assert "cp" not in json.loads((plain.path / "resolved.json").read_text())["layout"]
    assert (read_run(plain).cp, read_run(plain).dp) == (1, 2)


def test_every_flops_figure_can_be_worked_out_from_the_record(run):
    add_attempt(run, 10)
    record = read_run(run)
    sizes = {"seq": record.seq, "global_batch": record.global_batch, "gpus": record.gpus, "step_s": record.step_s}
    shape = {"layers": record.layers, "hidden": record.hidden}
    assert record.tflops_seed == tflops_seed(params=record.params, recompute=record.recompute, **sizes)
    weights = 12 * record.layers * record.hidden**2 + record.vocab * record.hidden
    assert record.tflops_model == tflops_model(params=weights, **shape, **sizes)
    assert record.tflops_hardware == tflops_hardware(vocab=record.vocab, recompute=record.recompute, **shape, **sizes)


def test_every_figure_that_is_there_says_where_it_is_from(run):
    memory = {"memory_allocated_gib": [1.0, 2.0], "memory_reserved_gib": [2.0, 3.0]}
    lines = [metrics_line(step, loss_eval=3.0 if step == 5 else None, **memory) for step in range(1, 11)]
    add_attempt(run, lines, node_list="n[1-4]")
    record = read_run(run)
    bare = {"schema", "run", "dialect", "settings", "flags", "sources"}
    without = {key for key, value in record.to_tables().items() if value not in (None, [], {})} - set(record.sources)
    assert without <= bare


def test_evaluations_and_saves_between_steps_set_none_apart(run):
    lines = [metrics_line(step, loss_eval=3.5, save_s=1.5) for step in range(1, 21)]
    add_attempt(run, lines)
    record = read_run(run)
    assert (record.step_s, record.step_s_p90, record.steps_used) == (0.5, 0.5, 19)
    assert (record.loss_eval, record.save_s) == (3.5, 1.5)
    assert "1 warm-up, 0 set apart" in record.sources["step_s"]
    assert not record.flags


def test_the_zero_stage_is_the_one_that_ran(logs):
    assert read_run(make_run(logs, engine__zero_stage=0, train__dtype="fp32")).zero_stage == 0
    record = read_run(make_run(logs, engine__zero_stage=0, train__dtype="bf16"))
    assert (record.zero_stage, record.settings["engine"]["zero_stage"]) == (1, 0)
    assert "engine.zero_stage is 0, but bf16 runs ZeRO 1" in record.flags


def test_a_step_trained_again_counts_once_as_trained_last(run):
    add_attempt(run, 30, "walltime", requeue=True)
    add_attempt(run, [metrics_line(step, loss=1.0) for step in range(21, 26)])
    record = read_run(run)
    assert record.tokens_total == 25 * 32 * 128
    assert (record.loss_first, record.loss_last) == (6.0, 1.0)
    assert [attempt["ended"] for attempt in record.attempts] == ["walltime", "done"]
    assert record.gpu_hours == 2 * run.resolved().gpus


def test_what_a_resume_threw_away_and_trained_not_counts_not(run):
    add_attempt(run, 30, None)
    add_attempt(run, [], "error", resumed_step=20, cause="exit code 1")
    assert read_run(run).tokens_total == 20 * 32 * 128


def test_an_attempt_without_a_word_before_its_jobs_next_requeued(run):
    add_attempt(run, [metrics_line(1)], None)
    add_attempt(run, [metrics_line(2)], None, job_id="4712")
    add_attempt(run, [metrics_line(3)], "done", job_id="4712")
    assert [attempt["ended"] for attempt in read_run(run).attempts] == ["unknown", "requeued", "done"]


def test_a_sigterm_after_which_its_job_started_was_a_requeue(run):
    add_attempt(run, [metrics_line(1)], "cancelled", cause="SIGTERM")
    add_attempt(run, [metrics_line(2)], "cancelled", cause="SIGTERM")
    add_attempt(run, [metrics_line(3)], "done", job_id="4712")
    assert [attempt["ended"] for attempt in read_run(run).attempts] == ["requeued", "cancelled", "done"]


# --- states


def test_submitted_and_not_started_is_pending(run):
    record = read_run(run)
    assert (record.ended, record.step_s, record.attempts) == ("pending", None, [])


def test_neither_submitted_nor_started_is_unknown(logs):
    assert read_run(make_run(logs, submit=False)).ended == "unknown"


def test_refused_in_sbatchs_own_words(logs):
    run = make_run(logs, submit=False)
    words = "sbatch: error: Invalid feature specification"
    run.add_submission({"scheduler": "slurm", "job_id": None, "refused": words})
    record = read_run(run)
    assert (record.ended, record.cause) == ("refused", words)


def test_refused_and_then_taken(logs):
    (run := make_run(logs, submit=False)).add_submission({"scheduler": "slurm", "job_id": None, "refused": "no"})
    with_job(run, "4711")
    assert read_run(run).ended == "pending"


def test_an_attempt_that_writes_is_running(run):
    add_attempt(run, [metrics_line(1)], None)
    record = read_run(run)
    assert (record.ended, record.ended_at) == ("running", None)
    assert record.attempts[0]["ended"] == "running"


def test_a_local_run_is_running_as_long_as_its_process_is(logs):
    run = make_run(logs, submit=False)
    me = {"scheduler": "local", "job_id": str(os.getpid()), "host": platform.node(), "pid": os.getpid()}
    run.add_submission({**me, "pid_start": start_time(os.getpid())})
    add_attempt(run, [metrics_line(1)], None, job_id=str(os.getpid()))
    assert read_run(run).ended == "running"
    run.add_submission({**me, "pid_start": "another"})
    record = read_run(run)
    assert (record.ended, record.cause) == ("error", "its process is gone and wrote no end")
    assert record.attempts[0]["ended"] == "error"
    run.add_submission({**me, "pid_start": "another", "host": "elsewhere"})
    assert read_run(run).ended == "running"


# An hour, then a hundred minutes; an attempt with slow steps, or with rare lines, may be silent for longer.
@pytest.mark.parametrize(
    ("silent_s", "step_s", "settings", "ended"),
    [
        (3600, 5.0, {}, "unknown"),
        (3600, 870.0, {}, "running"),
        (6000, 60.0, {"train__log_every": 1}, "unknown"),
        (6000, 60.0, {"train__log_every": 100}, "running"),
    ],
)
def test_a_silent_attempt_is_unknown_unless_it_may_be_silent(logs, silent_s, step_s, settings, ended):
    attempt = add_attempt(run := make_run(logs, **settings), [metrics_line(1, step_s=step_s)], None)
    for path in (attempt.metrics, attempt.folder):
        os.utime(path, (time.time() - silent_s,) * 2)
    assert read_run(run).ended == ended


def test_in_the_queue_again_is_pending_cancelled_there_cancelled(run):
    add_attempt(run, [metrics_line(1)], "walltime", requeue=True)
    assert read_run(run).ended == "pending"
    run.cancelled_mark("4711").touch()
    assert read_run(run).ended == "cancelled"


def test_submitted_and_not_started_is_pending_after_any_end(run):
    add_attempt(run, [metrics_line(1)], "stopped", cause="Ctrl-C")
    with_job(run, "4712")
    record = read_run(run)
    assert (record.ended, record.cause, record.job_id, record.ended_at) == ("pending", None, "4712", None)
    assert record.sources["ended"] == "submissions.jsonl: job 4712 has made no attempt yet"
    assert [attempt["ended"] for attempt in record.attempts] == ["stopped"]
    run.cancelled_mark("4712").touch()
    assert read_run(run).ended == "cancelled"
    add_attempt(run, [metrics_line(2)], "done", job_id="4712")
    assert read_run(run).ended == "done"


def test_the_link_that_began_tells_how_a_chain_stands(logs):
    run = make_run(logs, submit=False)
    for number in (1, 2, 3):
        with_job(run, str(70 + number), link=number)
    run.add_submission({"scheduler": "slurm", "job_id": None, "refused": "too many jobs", "link": 4})
    record = read_run(run)
    assert (record.ended, record.job_id) == ("pending", "71")
    add_attempt(run, [metrics_line(1, time=time.time())], ended=None, job_id="71", started=time.time())
    assert read_run(run).ended == "running"
    add_attempt(run, [metrics_line(2)], "done", job_id="72")
    record = read_run(run)
    assert (record.ended, record.job_id) == ("done", "72")


@pytest.mark.parametrize(
    ("submitted", "ended", "job_id"), [(STARTED + 9, "pending", "4712"), (STARTED - 9, "stopped", "99")]
)
def test_a_run_of_plain_sbatch_is_pending_only_when_submitted(logs, submitted, ended, job_id):
    run = with_attempt(make_run(logs, submit=False), [metrics_line(1)], "stopped", job_id="99")
    with_job(run, "4712", time=submitted)
    record = read_run(run)
    assert (record.ended, record.job_id) == (ended, job_id)
    add_attempt(run, [metrics_line(2)], job_id="4712")
    assert read_run(run).job_id == "4712"


def test_an_attempt_without_a_word_is_not_pending_by_the_next(run):
    add_attempt(run, [metrics_line(1)], None)
    with_job(run, "4712")
    assert [attempt["ended"] for attempt in read_run(run).attempts] == ["unknown"]


def test_cancelled_before_it_started(run):
    run.cancelled_mark("4711").touch()
    assert read_run(run).ended == "cancelled"


def test_cancelled_and_killed_before_it_could_say_so(run):
    add_attempt(run, [metrics_line(1)], None)
    run.cancelled_mark("4711").touch()
    assert read_run(run).ended == "cancelled"


def test_a_failure_keeps_its_cause(run):
    add_attempt(run, [metrics_line(1)], "error", cause="exit code 137 of rank 3")
    record = read_run(run)
    assert (record.ended, record.cause) == ("error", "exit code 137 of rank 3")


# --- what is half there


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(st.data())
def test_a_metrics_file_cut_anywhere_is_read_to_its_last_line(tmp_path_factory, data):
    run = make_run(tmp_path_factory.mktemp("cut"))
    whole = "".join(json.dumps(metrics_line(step)) + "\n" for step in range(1, 9))
    cut = data.draw(st.integers(0, len(whole)))
    add_attempt(run, [whole[:cut]], None)
    record = read_run(run)
    lines = whole[:cut].count("\n")
    assert (record.tokens_total or 0) // (32 * 128) in (lines, lines + 1)
    Record.from_tables(json.loads(record.to_json()))


def test_damaged_lines_are_left_out_and_told(run):
    add_attempt(run, [metrics_line(1), '{"step": 2, "lo\n', "\x00\x00\n", "[]\n", "\n", metrics_line(3)])
    record = read_run(run)
    assert record.tokens_total == 2 * 32 * 128
    assert "3 lines of metrics.jsonl cannot be read and were left out" in record.flags


def test_lines_that_lack_keys_or_hold_null(run):
    add_attempt(run, [{"step": 1}, {"step": 2, "loss": None, "step_s": None}, {"step": 3, "loss": 3.0, "step_s": 0.5}])
    record = read_run(run)
    assert (record.step_s, record.loss_last, record.nan_steps) == (0.5, 3.0, 2)


def test_nan_losses_and_skipped_steps_are_in_no_speed_or_loss(run):
    lines = [metrics_line(step) for step in range(1, 21)]
    lines[5].update(skipped=True, step_s=0.1)
    lines[-1].update(loss=float("nan"), step_s=0.1)
    add_attempt(run, lines, "nan", cause="loss is NaN")
    record = read_run(run)
    assert (record.skipped_steps, record.nan_steps, record.step_s_p10) == (1, 1, 0.5)
    assert math.isnan(record.loss_last)
    assert record.to_tables()["loss_last"] is None
    assert record.cause == "nan since step 20; loss is NaN"
    assert any("no number" in flag for flag in record.flags)


def test_where_every_step_was_skipped_it_says_what_was_timed(run):
    add_attempt(run, [metrics_line(step, skipped=True) for step in range(1, 11)])
    assert any("forward and backward only" in flag for flag in read_run(run).flags)


def test_a_loss_that_does_not_fall_is_told(run):
    add_attempt(run, [metrics_line(1, loss=3.0), metrics_line(2, loss=3.5)])
    assert "the loss did not fall" in read_run(run).flags


def test_a_damaged_resolved_json_is_an_error(run):
    (run.path / "resolved.json").write_text("{")
    with pytest.raises(ConfigError):
        read_run(run)


def test_a_run_of_no_files_but_its_settings_has_a_record(run):
    (run.path / "submissions.jsonl").unlink()
    assert set(json.loads(read_run(run).to_json())) == set(Record().to_tables())


def test_the_hash_is_of_what_decides_weights_and_speed(logs):
    def hashed(**overrides):
        return config_hash(make_run(logs, **overrides).resolved())

    assert hashed() == hashed() == hashed(train__log_every=1) == hashed(job__time="00:10:00")
    assert len({hashed(), hashed(train__lr=1e-4), hashed(layout__micro_batch=4), hashed(engine__zero_stage=0)}) == 4


def test_no_state_is_outside_the_designs_list(run):
    states = [read_run(run).ended]
    add_attempt(run, [metrics_line(1)], None)
    states.append(read_run(run).ended)
    assert set(states) <= set(ENDED)


def test_no_secret_gets_into_the_record_of_a_run(run):
    resolved = json.loads((run.path / "resolved.json").read_text())
    resolved["data"]["path"] = "https://me:abcd1234@host/tokens"
    (run.path / "resolved.json").write_text(json.dumps(resolved))
    add_attempt(run, [metrics_line(1)], ended="error", cause="no login with HF_TOKEN=abcd1234")
    record = read_run(run)
    assert record.cause == "no login with HF_TOKEN=[removed]"
    assert "abcd1234" not in record.to_json()


def test_all_settings_of_a_run_are_in_its_record(run):
    resolved = json.loads((run.path / "resolved.json").read_text())
    record = read_run(run)
    for table in ("engine", "train", "data"):
        assert record.settings[table].keys() == resolved[table].keys()
