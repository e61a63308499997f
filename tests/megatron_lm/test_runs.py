"""Runs of the stand-in for Megatron-LM, from submit to record: to the end, interrupted and taken up again, failed."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from hpc_gpt.core.files import read_json, read_json_lines
from hpc_gpt.core.process import start_time
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.trainer.tokens.build import build_megatron
from tests.cli.command import Done, error_of, hpc_gpt, in_process
from tests.launcher.local.conftest import ended, newest, nothing_left, status_of
from tests.made_runs import read_run
from tests.megatron_lm.checkout import make_checkout
from tests.megatron_lm.stand_in import START
from tests.processes import command_of, descendants
from tests.programs import ran
from tests.waiting import patient, wait_for

__all__ = ["nothing_left"]  # a fixture, found by name
SMALL = ("demo", "--cluster", "local", "--gpus", "2", "--tp", "2", "--pp", "1", "--set", "engine.name=megatron-lm",
         "--set", "train.steps=20", "--set", "train.log_every=2", "--set", "train.save_every=0",
         "--set", "train.eval_every=0", "--set", "train.warmup_steps=2")  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return make_checkout(tmp_path / "Megatron-LM's own")


@pytest.fixture
def submit(checkout):
    """Submits two ranks of the stand-in, with variables of its own."""

    def call(*arguments: str, **environment: str) -> Done:
        return in_process("submit", *SMALL, *arguments, environment={"MEGATRON_LM": str(checkout), **environment})

    return call


def lines(run: RunFolder) -> list[dict]:
    return [line for attempt in run.attempts() for line in read_json_lines(attempt.metrics)]


def test_from_submit_to_the_record(submit, checkout):
    done = submit("--set", "train.save_every=10", CUDA_DEVICE_MAX_CONNECTIONS="8")
    assert done.code == 0, done.stderr
    run = newest()
    status = ended(run)
    [attempt] = run.attempts()
    assert (status.state, status.step) == ("done", 20), attempt.log.read_text()
    assert [line["step"] for line in lines(run)] == list(range(2, 21, 2))
    assert lines(run)[-1]["loss"] == pytest.approx(START * 0.99**20, rel=1e-5)
    trainer = read_json(attempt.folder / "trainer.json")
    assert (trainer["device"], trainer["resumed_step"], trainer["megatron_lm"]["path"]) == ("cpu", 0, str(checkout))
    log = attempt.log.read_text()
    assert re.search(r"iteration +20/ +20 \|", log), "Megatron's own lines are in the log"
    assert "note: CUDA_DEVICE_MAX_CONNECTIONS is 8 in your environment, and Megatron-LM says for tp 2 x cp 1: " in log
    assert "ended done after step 20" in log
    saved = {path.name for path in (run.checkpoints / "megatron").iterdir()}
    assert saved == {"iter_0000010", "iter_0000020", "latest_checkpointed_iteration.txt"}

    record = read_run(run)
    assert (record.engine, record.ended, record.tp, record.dp, record.zero_stage) == ("megatron-lm", "done", 2, 1, None)
    assert record.loss_last == lines(run)[-1]["loss"]
    assert record.step_s >= 0.01
    assert record.tokens_total == 20 * record.global_batch * record.seq, "a line of two iterations counts both"
    assert not (run.path / "ds_config.json").exists()
    assert "own format, which hpc-gpt does not read" in error_of(hpc_gpt("export", run.run_id))[0]
    table = json.loads(in_process("report", run.run_id, "--json").stdout)["records"]
    assert table[0]["settings"]["data"] == {**table[0]["settings"]["data"], "source": "megatron", "path": "stdlib"}


@pytest.mark.long
def test_a_mixture_of_pairs_reaches_it_with_their_weights(submit, tmp_path):
    options = []
    for name, weight in (("web", 3), ("code", 1)):
        (tmp_path / f"{name}.txt").write_text(f"some {name}, " * 2000)
        build_megatron(tmp_path / f"{name}.txt", tmp_path / name)
        mix = {"path": str(tmp_path / name), "source": "megatron", "weight": weight}
        options += [word for key, value in mix.items() for word in ("--set", f"data.mix.{name}.{key}={value}")]
    done = submit(*options)
    assert "data: web: 75 %, " in done.stderr
    run = newest()
    status = ended(run)
    [attempt] = run.attempts()
    assert (status.state, status.step) == ("done", 20), attempt.log.read_text()
    assert f"reads 0.25 {tmp_path}/code 0.75 {tmp_path}/web\n" in attempt.log.read_text()


@pytest.mark.long
def test_a_row_of_the_seeds_table_shrunken(checkout):
    done = in_process(
        "submit", "gpt2-meg", "--row", "32g-18b", "--smoke", "--cluster", "local",
        environment={"MEGATRON_LM": str(checkout)},
    )  # fmt: skip
    assert done.code == 0, done.stderr
    run = newest()
    status = ended(run)
    assert (status.state, status.step) == ("done", 5), run.attempts()[0].log.read_text()
    record = read_run(run)
    assert (record.tp, record.pp, record.recompute, record.dtype) == (2, 2, "full", "fp16"), "every switch is kept"


def test_cancelled_and_taken_up_again_it_goes_on_as_saved(submit):
    assert submit(STAND_IN_AWAIT="7").code == 0  # however late the cancel reaches it
    run = newest()
    wait_for("step 6", lambda: (status_of(run).step or 0) >= 6)
    assert in_process("cancel", run.run_id, "--yes").code == 0
    first = ended(run)
    assert first.state == "cancelled"
    saved = int((run.checkpoints / "megatron" / "latest_checkpointed_iteration.txt").read_text())
    assert (saved, first.step) == (7, 6)

    gone = in_process("submit", "--resume", run.run_id)
    assert (gone.code, error_of(gone)[0]) == (
        2,
        "engine megatron-lm runs a checkout of Megatron-LM, but neither MEGATRON_LM nor profile local names one",
    )
    hpc_gpt("submit", "--resume", run.run_id, environment={"MEGATRON_LM": read_checkout(run)}, code=0)
    status = ended(run)
    assert (status.state, status.step, status.attempts) == ("done", 20, 2)
    assert read_json(run.attempts()[1].folder / "trainer.json")["resumed_step"] == saved
    for line in lines(run):
        assert line["loss"] == pytest.approx(START * 0.99 ** line["step"], rel=1e-5), (
            "no iteration twice, none left out"
        )
    assert [line["step"] for line in lines(run)] == list(range(2, 21, 2))


def read_checkout(run: RunFolder) -> str:
    return read_json(run.attempts()[0].folder / "trainer.json")["megatron_lm"]["path"]


@pytest.mark.long(but="first")
@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_before_the_limit_all_save_though_one_rank_hears_of_it(submit, ranks):
    assert submit("--set", "train.steps=100000", STAND_IN_STEP_S="0.05").code == 0
    run = newest()
    wait_for("step 4", lambda: (status_of(run).step or 0) >= 4)
    [attempt] = run.attempts()
    for rank in ranks:
        os.kill(read_json(attempt.ranks / f"{rank}.json")["pid"], signal.SIGUSR2)
    assert ended(run).state == "walltime"
    end = attempt.ended()
    assert (end["cause"], end["requeue"]) == ("SIGUSR2: the time limit is near", False), (
        "the local profile has no queue"
    )
    assert int((run.checkpoints / "megatron" / "latest_checkpointed_iteration.txt").read_text()) >= end["step"] - 1
    assert "exiting program after receiving SIGTERM" in attempt.log.read_text()


@pytest.mark.long
def test_what_is_saved_stays_though_a_late_signal_ends_all(submit, tmp_path):
    """A rank may be leaving, as another has asked, when its own SIGTERM comes."""
    late = make_checkout(tmp_path / "late")
    program = late / "pretrain_gpt.py"
    last = (
        "import atexit, os, signal\n"
        "atexit.register(lambda: (signal.signal(15, signal.SIG_DFL), os.kill(os.getpid(), 15)))\n"
    )
    program.write_text(last + program.read_text())
    assert submit("--set", "train.steps=100000", MEGATRON_LM=str(late), STAND_IN_STEP_S="0.05").code == 0
    run = newest()
    wait_for("step 4", lambda: (status_of(run).step or 0) >= 4)
    [attempt] = run.attempts()
    os.kill(read_json(attempt.ranks / "1.json")["pid"], signal.SIGUSR2)
    assert ended(run).state == "walltime"
    assert attempt.ended()["cause"] == "SIGUSR2: the time limit is near"


@pytest.mark.long
def test_before_it_trains_there_is_nothing_to_save(submit, tmp_path):
    slow = make_checkout(tmp_path / "slow")
    program = slow / "pretrain_gpt.py"
    program.write_text("import time\nprint('compiling kernels', flush=True)\ntime.sleep(3600)\n" + program.read_text())
    assert submit(MEGATRON_LM=str(slow)).code == 0
    run = newest()
    wait_for("both", lambda: run.attempts() and run.attempts()[0].log.read_text().count("compiling") == 2)
    assert in_process("cancel", run.run_id, "--yes").code == 0
    assert ended(run).state == "cancelled"
    assert "pretrain_gpt.py ended before its first iteration, unsaved" in run.attempts()[0].ended()["cause"]


@pytest.mark.long
def test_how_it_failed_is_read_from_its_last_words(submit):
    words = "CUDA error: an illegal memory access was encountered"
    assert submit(STAND_IN_FAIL=f"4:{words}").code == 0
    run = newest()
    status = ended(run)
    assert (status.state, status.cause) == ("error", f"rank 1: RuntimeError: {words}")
    assert "Connection closed by peer" in run.attempts()[0].log.read_text(), "rank 0 failed too, and kept quiet"


@pytest.mark.long
def test_a_program_that_hangs_writes_its_stacks_and_is_ended(submit):
    long = ("--set", f"train.hang_floor_s={patient(8)}", "--set", "train.steps=100000")
    assert submit(*long, STAND_IN_HANG="30", STAND_IN_STEP_S="0.2").code == 0
    run = newest()
    status = ended(run)
    assert status.state == "hang"
    assert status.cause.startswith("no rank made a step for "), status.cause
    assert "ranks 0, 1 wait in its program after step 28" in status.cause
    [attempt] = run.attempts()
    for rank, function in ((0, "in hear"), (1, "in main")):
        path = attempt.stacks / f"{rank}.txt"
        wait_for(path.name, path.exists)
        stacks = path.read_text()
        assert stacks.startswith("Fatal Python error: Aborted")
        assert function in stacks


@pytest.mark.long
def test_a_program_that_is_stopped_is_the_one_that_hangs(submit):
    # The log is looked at once a second, and what is seen at the first three looks has 12 times the floor.
    long = ("--set", f"train.hang_floor_s={patient(8)}", "--set", "train.steps=100000")
    assert submit(*long, STAND_IN_STEP_S="0.2").code == 0
    run = newest()
    wait_for("step 24", lambda: (status_of(run).step or 0) >= 24)
    [attempt] = run.attempts()
    wrapper = read_json(attempt.ranks / "0.json")["pid"]
    program = next(pid for pid in descendants(wrapper) if "pretrain_gpt.py" in " ".join(command_of(pid)))
    os.kill(program, signal.SIGSTOP)
    status = ended(run)
    assert status.state == "hang"
    assert "rank 0 on" in status.cause
    assert "at a process that is stopped" in status.cause
    assert attempt.ended()["rank"] == 0
    wait_for("its program's end", lambda: start_time(program) is None)


def test_what_cannot_run_is_refused_before_a_folder_is_made():
    # What else is refused of a checkout: test_arguments.py.
    refused, dry = (
        in_process("submit", *SMALL, *more, environment={"MEGATRON_LM": ""}) for more in ((), ("--dry-run",))
    )
    assert (refused.code, dry.stderr) == (2, refused.stderr)
    message, hint = error_of(refused)
    assert "neither MEGATRON_LM nor profile local names one" in message
    assert 'megatron_lm = "/path/to/Megatron-LM" in the cluster profile' in hint
    assert not list(Path(os.environ["HPC_GPT_LOGS"]).glob("*/*"))


def test_a_script_without_a_checkout_ends_with_one_line(tmp_path):
    rendered = in_process("render", *SMALL, environment={"MEGATRON_LM": ""}, code=0)
    (tmp_path / "job.sh").write_text(rendered.stdout)
    environment = {name: value for name, value in os.environ.items() if name != "MEGATRON_LM"}
    done = ran("bash", "job.sh", cwd=tmp_path, env=environment, code=2)
    assert done.stderr.splitlines()[0] == "Error: MEGATRON_LM is not set"
    assert not (tmp_path / "logs").exists()
