"""Records of our own run folders: the device that was found, and measurements other than steps."""

import json
from dataclasses import replace

import pytest

from hpc_gpt.core.files import write_once
from hpc_gpt.core.runs.lineage import RESUMED_FROM
from hpc_gpt.core.settings.experiment_file import find_sweep
from hpc_gpt.core.settings.resolved import config_hash
from hpc_gpt.reader.readers.runs.own_run import read_run
from hpc_gpt.reader.report.gather import gather_paths
from tests.made_runs import STARTED, add_attempt, make_run, metrics_line, with_attempt


def slurm_run(logs, **more):
    run = make_run(logs, "jean-zay-v100-32g", "gpt2-meg-ds-3d")
    memory = {"memory_allocated_gib": [20.0, 18.5], "memory_reserved_gib": [25.0, 24.0]}
    lines = [metrics_line(step, **memory, loss_eval=None) for step in range(1, 11)]
    for line in lines:
        line["step_s"] = 146.0
    add_attempt(run, lines, node_list="r6i4n[0-15]", **more)
    return run


def test_the_source_run_on_its_own_device(logs):
    record = read_run(slurm_run(logs))
    assert (record.device, record.tflops_seed) == ("v100-32g", pytest.approx(46.7, abs=0.1))
    assert record.mfu == pytest.approx(record.tflops_model / 125)
    assert record.hfu == pytest.approx(record.tflops_hardware / 125)
    assert (record.memory_allocated_gib, record.gpu_hours) == ([20.0, 18.5], 64)
    assert record.node_list == "r6i4n[0-15]"


def test_the_device_that_ranks_found_goes_before_the_profiles(logs):
    record = read_run(slurm_run(logs, device="Tesla V100-SXM2-16GB"))
    assert record.device == "v100-16g"
    assert any("the profile says device v100-32g" in flag for flag in record.flags)
    assert record.sources["device"] == "attempts/1/trainer.json"


def test_a_run_that_found_no_gpu_has_no_device_and_no_mfu(logs):
    record = read_run(slurm_run(logs, device="cpu"))
    assert (record.device, record.mfu, record.hfu) == (None, None, None)
    assert "the profile says device v100-32g, the run found no GPU" in record.flags
    assert record.sources["device"] == "attempts/1/trainer.json: the ranks ran on CPU"


def test_an_unknown_device_has_no_mfu_but_a_flag(logs):
    record = read_run(slurm_run(logs, device="NVIDIA Something 9000"))
    assert (record.mfu, record.hfu) == (None, None)
    assert "no peaks known for device NVIDIA Something 9000: mfu and hfu are null" in record.flags


def test_a_dtype_without_a_unit_has_no_mfu_but_a_flag(logs):
    run = with_attempt(make_run(logs, "jean-zay-v100-32g", "gpt2-meg-ds-3d", train__dtype="bf16"), 10)
    record = read_run(run)
    assert record.mfu is None
    assert any("no dense bf16 peak known for device v100-32g" in flag for flag in record.flags)


def test_on_a_cpu_there_is_no_device_and_ranks_cost_the_budget(run):
    add_attempt(run, 10, device="cpu", node_list="host")
    record = read_run(run)
    assert (record.device, record.mfu, record.memory_allocated_gib) == (None, None, None)
    assert record.gpu_hours == run.resolved().gpus
    assert not [flag for flag in record.flags if "mfu" in flag]


def test_gpu_time_of_an_endless_attempt_goes_to_its_last_step(logs):
    run = make_run(logs, "jean-zay-v100-32g", "gpt2-meg-ds-3d")
    add_attempt(run, [metrics_line(1, time=STARTED + 7200)], None, node_list="n1")
    assert read_run(run).gpu_hours == 128


# --- the hash


def test_what_an_attempt_measured_beside_its_steps(run):
    attempt = add_attempt(run, 8)
    write_once(attempt.folder / "trainer.json", json.dumps({"attention_used": "flash"}))
    measured = {"gpu_util_mean": 71.9, "gpu_util_spread": 22.0, "compile_s": 3.5, "power_w": None, "skipped_shards": 2}
    write_once(attempt.folder / "measured.json", json.dumps(measured))
    record = read_run(run)
    assert (record.gpu_util_mean, record.gpu_util_spread, record.compile_s) == (71.9, 22.0, 3.5)
    assert record.power_w is None
    assert record.attention_used == "flash"
    assert "2 damaged shards of the data skipped" in record.flags
    assert record.sources["gpu_util_mean"] == "attempts/1/measured.json"


def test_how_long_the_last_start_took(run):
    for number in (1, 2):
        attempt = add_attempt(run, [metrics_line(number)], "walltime" if number < 2 else "done")
        parts = {"script": 4.0, "staging": 0.0, "imports": 6.0, "rendezvous": 1.0, "build": 2.0, "first_step": number}
        start = {"start_s": sum(parts.values()), "start_parts": parts}
        write_once(attempt.folder / "start.json", json.dumps(start))
    record = read_run(run)
    assert (record.start_s, record.start_parts) == (15.0, parts)
    assert record.sources["start_s"] == "attempts/2/start.json"


def test_the_kernel_that_ran_counts_another_choice_is_flagged(run):
    attempt = add_attempt(run, 8)
    write_once(attempt.folder / "trainer.json", json.dumps({"attention_used": "flash"}))
    write_once(attempt.folder / "measured.json", json.dumps({"attention_used": "math"}))
    record = read_run(run)
    assert (record.attention_used, record.sources["attention_used"]) == ("math", "attempts/1/measured.json")
    assert "attention: torch chose flash, but math ran" in record.flags


def test_of_several_attempts_the_last_measured_counts_by_key(run):
    for number, (util, retries, skipped) in enumerate([(50.0, 3, 1), (60.0, None, 4), (None, None, None)], 1):
        attempt = add_attempt(run, [metrics_line(number)], "walltime" if number < 3 else "done")
        if number < 3:
            measured = {"gpu_util_mean": util, "allocator_retries": retries, "skipped_shards": skipped}
            write_once(attempt.folder / "measured.json", json.dumps(measured))
    record = read_run(run)
    assert (record.gpu_util_mean, record.sources["gpu_util_mean"]) == (60.0, "attempts/2/measured.json")
    assert (record.allocator_retries, record.sources["allocator_retries"]) == (3, "attempts/1/measured.json")
    # Each attempt's count continues that of the one before.
    assert "4 damaged shards of the data skipped" in record.flags


def test_each_stage_has_its_own_peak_over_the_steps(run):
    memory = [[3.0, 1.0], None, [2.0, 5.0]]
    add_attempt(run, [metrics_line(step, memory_allocated_gib=peaks) for step, peaks in enumerate(memory, 1)])
    assert read_run(run).memory_allocated_gib == [3.0, 5.0]


def test_the_last_attempts_device_stands(run):
    add_attempt(run, [metrics_line(1)], "walltime", device="cpu")
    add_attempt(run, [metrics_line(2)], device="NVIDIA Nobody 9")
    assert read_run(run).device == "NVIDIA Nobody 9"


def test_where_a_run_comes_from_is_among_its_settings(logs):
    run = make_run(logs, experiment="memory-ladder", row=find_sweep("memory-ladder").possible[0].name)
    write_once(run.path / RESUMED_FROM, json.dumps({"run": "before", "path": "/logs/before", "step": 40}))
    found = read_run(run).settings
    assert found["resumed_from"] == {"run": "before", "step": 40}
    assert found["sweep"] == {"name": "memory-ladder", "row": find_sweep("memory-ladder").possible[0].name}


def test_the_hash_tells_devices_and_numbers_of_nodes_apart(logs):
    resolved = make_run(logs).resolved()
    elsewhere = replace(resolved, cluster=replace(resolved.cluster, device="H100"))
    spread = replace(resolved, nodes=resolved.nodes + 1)
    assert len({config_hash(settings) for settings in (resolved, elsewhere, spread)}) == 3


def test_an_engine_without_zero_stages_has_none_in_its_record(logs):
    layout = {"layout__tp": 1, "layout__pp": 1, "layout__dp": 4}
    assert read_run(make_run(logs, engine__name="ddp", **layout)).zero_stage is None
    assert read_run(make_run(logs, **layout)).zero_stage == 1


def test_from_megatrons_timer(tmp_path) -> None:
    step = " iteration {:8d}/    1000 | elapsed time per iteration (ms): 100.0 | lm loss: 3.2E+00 | loss scale: 1.0 |\n"
    log = tmp_path / "run.log"
    log.write_text(
        "".join(step.format(number) for number in range(1, 5))
        + "  successfully saved checkpoint at iteration       4 to /ckpt\n"
        + "time (ms) | save-checkpoint: 12000.00\n"
        + step.format(5)
        + "    save-checkpoint ................................: (13000.00, 14000.00)\n"
    )
    (run,) = gather_paths([log], tmp_path / "logs").runs
    assert run.record.save_s == pytest.approx(13)
    assert run.record.sources["save_s"] == "inferred: mean of 2 timers save-checkpoint"
