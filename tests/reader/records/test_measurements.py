"""Records of our own run folders: the device that was found, and measurements other than steps."""

from dataclasses import replace

import pytest

from hpc_gpt.core.settings.resolved import config_hash
from hpc_gpt.report.gather import gather_paths
from tests.made_runs import add_attempt, make_run, metrics_line, read_run


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


# --- the hash


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
