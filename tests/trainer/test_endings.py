"""How attempts end that do not end well, or end early: each says so, none hangs, no checkpoint is lost."""

import math
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.trainer.tokens.build import build_tokens
from tests.trainer.launch import Launch, lines, new_run, settings, train, train_alone

ALONE = {"tp": 1, "pp": 1, "dp": 1}
DP2 = {"tp": 1, "pp": 1, "dp": 2}
PP2 = {"tp": 1, "pp": 2, "dp": 1}
TP2 = {"tp": 2, "pp": 1, "dp": 1}
LONG = 1_000_000


def checkpoints(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


@pytest.mark.long(but="first")
@pytest.mark.parametrize("source", ["tokens", "stream"])
def test_ranks_that_read_the_same_data_took_the_same_at_a_save(tmp_path: Path, source: str) -> None:
    whole = tmp_path / "text.txt"
    whole.write_bytes(b"all work and no play " * 40)  # some 26 samples, of which a step takes four
    if source == "tokens":
        whole = build_tokens(whole, tmp_path / "text.tokens").path
    for rank in range(2):
        # A copy for each rank, of which one byte has changed; of a token file its header says the same.
        content = bytearray(whole.read_bytes())
        content[-400] ^= rank
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "copy").write_bytes(content)
    resolved = settings(tmp_path, TP2, Engine(name="fsdp"), steps=8, save_every=7)
    data = replace(resolved.data, source=source, path="copy", eval_fraction=0.0, workers=0)
    run = new_run(tmp_path, replace(resolved, data=data))
    launch = train(run, 2, HPC_GPT_DATA=str(tmp_path / "{rank}"))
    assert launch.ended[:2] == ("data", 7), launch.log
    assert re.search(
        r"ranks 0 on \S+ and 1 on \S+ read the same data, but have taken different samples by step 7;",
        launch.attempt.ended()["cause"],
    )
    assert not run.checkpoints.exists() or not checkpoints(run)


def test_ctrl_c_twice_leaves_at_once(tmp_path: Path, tokens: Path) -> None:
    run = new_run(tmp_path, settings(tokens, PP2, steps=LONG, save_every=2))
    launch = Launch(run, 2)
    launch.await_words("saved after step 2")
    # Rank 1 stands still, so rank 0 comes no further than the next collective. It must leave all the same.
    launch.signal(signal.SIGSTOP, [1])
    launch.await_stop(1)
    launch.signal(signal.SIGINT, [0])
    # Two at once would be one.
    launch.await_words("rank 0 has SIGINT")
    launch.signal(signal.SIGINT, [0])
    launch.await_state(lambda: not launch.ranks[0].is_alive(), "end of rank 0")
    launch.signal(signal.SIGCONT, [1])
    assert launch.ranks[0].exitcode == 130, launch.log
    assert (launch.wait()[1], launch.ended[0]) == (1, "stopped")
    assert "step-00000002" in checkpoints(run)


def test_a_training_that_runs_off_keeps_its_last_good_checkpoint(tmp_path: Path, tokens: Path) -> None:
    """A learning rate that climbs to absurd heights: the loss becomes NaN or infinite after some good steps."""
    run = new_run(
        tmp_path, settings(tokens, TP2, steps=200, lr=1e38, warmup_steps=0, clip=0.0, save_every=1, max_bad_steps=3)
    )
    launch = Launch(run, 2)
    assert launch.wait() == [1, 1], launch.log
    assert launch.ended[0] == "nan"
    assert launch.attempt.ended()["cause"] == "3 steps in a row were skipped or not finite"
    found = lines(run)
    bad = [line["step"] for line in found if line["skipped"] or not math.isfinite(line["loss"] + line["grad_norm"])]
    assert bad == list(range(bad[0], found[-1]["step"] + 1))
    assert 3 <= len(bad) <= 5
    assert f"not saved after step {bad[0]}: loss or gradient is not finite" in launch.log
    assert checkpoints(run) == [f"step-{step:08d}" for step in range(1, bad[0])]


def test_a_checkpoint_of_other_arithmetic_is_refused(tmp_path: Path, tokens: Path) -> None:
    run = new_run(tmp_path / "one", settings(tokens, DP2, steps=2))
    assert train(run, 2).ended == ("done", 2, False)
    other = new_run(tmp_path / "other", settings(tokens, DP2, steps=4, dtype="bf16"))
    shutil.copytree(run.checkpoints, other.checkpoints)
    launch = Launch(other, 2)
    assert launch.wait() == [2, 2], launch.log
    assert launch.ended[0] == "user_error"
    assert "train.dtype is fp32 in it and bf16 in this run" in str(launch.attempt.ended()["cause"])
    assert "hint: " in launch.log
    assert "Traceback" not in launch.log
    assert checkpoints(other) == ["step-00000002"]
    assert lines(other) == []


def test_a_truncated_token_file(tmp_path: Path, tokens: Path) -> None:
    (short := tmp_path / "short.tokens").write_bytes(tokens.read_bytes()[:-5])
    launch = Launch(new_run(tmp_path, settings(short, ALONE, steps=2)), 1)
    assert launch.wait() == [2], launch.log
    assert launch.ended[0] == "data"
    assert f"{short} is truncated" in str(launch.attempt.ended()["cause"])
    assert "Traceback" not in launch.log


def test_a_killed_rank_takes_the_others_along(tmp_path: Path, tokens: Path) -> None:
    run = new_run(tmp_path, settings(tokens, PP2, steps=LONG, save_every=2))
    launch = Launch(run, 2)
    launch.await_words("saved after step 2")
    os.kill(launch.ranks[1].pid, signal.SIGKILL)
    assert launch.wait() == [1, -9], launch.log
    assert launch.ended[0] == "error"
    assert "lost another rank" in launch.log
    saved = max(int(name.removeprefix("step-")) for name in checkpoints(run) if name.startswith("step-"))
    assert [line["step"] for line in lines(run)][:saved] == list(range(1, saved + 1))


def test_ranks_in_another_number_than_the_layouts_are_refused(tmp_path: Path, tokens: Path) -> None:
    run = new_run(tmp_path, settings(tokens, DP2, steps=2))
    launch = Launch(run, 1, WORLD_SIZE="3")
    assert launch.wait() == [2]
    assert "3 ranks were started, but layout tp1-pp1-dp2 has 2" in launch.log
    assert launch.ended[0] == "user_error"


@pytest.mark.long
def test_a_compilation_that_fails_is_one_line_and_what_to_set(tmp_path: Path, tokens: Path) -> None:
    """In a process of its own: Inductor looks for a compiler once."""
    run = new_run(tmp_path, settings(tokens, ALONE, Engine(compile="block"), steps=2))
    done = train_alone(run, CXX="false", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 2, done.stdout
    assert "rank 0: Error: torch.compile failed: " in done.stdout
    assert 'hint: use engine.compile = "none"' in done.stdout
    assert "Traceback" not in done.stdout
    assert "developer context" not in done.stdout
    assert run.attempts()[-1].ended()["ended"] == "user_error"


@pytest.mark.long
@pytest.mark.parametrize(
    "engine",
    [Engine("ddp"), Engine("deepspeed-zero", 1), Engine("deepspeed-zero", 3), Engine("deepspeed-3d")],
    ids=["ddp", "zero-1", "zero-3", "3d"],
)
def test_a_rank_that_compiles_nothing_imports_no_compiler(tmp_path: Path, tokens: Path, engine: Engine) -> None:
    """It is half of a rank's start. Nor does one that masks documents, on a CPU."""
    resolved = settings(tokens, ALONE, engine, steps=2, dtype="bf16")
    masked = replace(resolved, data=replace(resolved.data, mask_documents=engine.name != "deepspeed-zero"))
    run = new_run(tmp_path, masked)
    done = train_alone(run, "-X", "importtime")
    assert done.returncode == 0, done.stdout
    imported = set(re.findall(r"^import time: .*\| +(\S+)$", done.stdout, re.MULTILINE))
    assert "torch.optim" in imported
    assert not imported & {"torch._dynamo", "torch._inductor.config", "sympy"}
