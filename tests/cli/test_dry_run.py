"""A dry run refuses what submit refuses, but for a Slurm that is away; and it makes nothing."""

import json
import re

import pytest

from tests.cli.command import Done, error_of, in_process, resolved_of, without_slurm
from tests.core.weights.test_folder import LLAMA, write_folder
from tests.made_runs import unsubmitted_run
from tests.programs import put

TOKENS = ("--set", "data.source=tokens", "--set", "data.path=no.tokens")
STREAM = ("--set", "data.source=stream", "--set", "data.path=stdlib")


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """No Slurm, and no data made yet."""
    monkeypatch.setenv("HPC_GPT_DATA", str(tmp_path / "data"))
    for name, value in without_slurm(tmp_path).items():
        monkeypatch.setenv(name, value)


def both(*arguments: object, **environment: str) -> tuple[Done, Done]:
    """The dry run, which comes first, and submit."""
    dry = in_process("submit", *arguments, "--dry-run", "--script", environment=environment)
    return dry, in_process("submit", *arguments, environment=environment)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (TOKENS, "no token file no.tokens"),
        (("--set", "data.source=megatron", "--set", "data.path=no"), "no.idx"),
        (("--set", "data.tokenizer=tiktoken:gpt2"), "sources use tokenizer byte"),
        (("--set", "train.eval_every=1", "--set", "data.eval_fraction=0"), "has 0 tokens for evaluation"),
        ((*STREAM, "--set", "data.workers=41"), "has 38 shards to train on (40 less 2 for evaluation)"),
        (("--engine", "megatron-lm", "--set", "data.source=random"), "MEGATRON_LM"),
        (("--set", "data.source=stream", "--set", "data.path=no"), "no text at no"),
    ],
)
def test_what_submit_refuses_a_dry_run_refuses_in_the_same_words(bare, tmp_path, asked, words):
    dry, real = both("demo", "--cluster", "local", *asked)
    assert dry == real
    assert (dry.code, dry.stdout) == (2, "")
    assert words in error_of(dry)[0]
    assert not (tmp_path / "logs").exists()


def test_a_vocabulary_too_small_for_data_that_are_yet_to_be_made(bare, tmp_path):
    for done in both("demo", "--cluster", "local", "--set", "model.vocab=100", "--set", "model.vocab_multiple=4"):
        assert done.code == 2
        assert "256" in error_of(done)[0]


def test_what_an_engine_does_not_follow_of_a_config_is_said(bare, tmp_path):
    folder = write_folder(tmp_path / "weights", LLAMA)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"initializer_range": 0.01, "pad_token_id": 3}))
    asked = ("--cluster", "local", "--gpus", 1, "--set", "data.source=random")
    drawn = f"{file}: initializer_range is 0.01: not followed, as weights are drawn with 0.02 here"
    padded = f"{file}: pad_token_id is 3: not followed, as its row is trained like any other"
    for model, engine, lines in (
        (("--model", folder), "ddp", [drawn]),
        (("--model", folder), "megatron-lm", [drawn, padded]),
        (("--set", f"train.init={folder}"), "ddp", []),  # nothing is drawn
    ):
        done = in_process("render", *model, *asked, "--engine", engine, code=0)
        assert ('"pad_token": 3' in done.stdout) is (padded not in lines)
        assert [line in done.stderr for line in (drawn, padded)] == [line in lines for line in (drawn, padded)]


def test_a_logs_folder_that_cannot_hold_a_run(bare):
    for logs in ("/dev/null/runs", "/tmp/a:b"):
        for done in both("demo", "--cluster", "local", "--set", "data.source=random", HPC_GPT_LOGS=logs):
            assert done.code == 1
            assert logs in error_of(done)[0]


def test_a_run_that_goes_on(bare):
    run = unsubmitted_run(data__source="tokens", data__path="gone.tokens")
    for done in both("--resume", run.run_id):
        assert done.code == 2
        assert "gone.tokens" in error_of(done)[0]


def test_data_that_can_be_made_are_not_made(bare, tmp_path):
    in_process("submit", "demo", "--cluster", "local", "--dry-run", "--script", code=0)
    assert not (tmp_path / "data").exists()
    assert not (tmp_path / "logs").exists()


def test_a_slurm_that_is_away_is_named(bare, tmp_path):
    asked = ("submit", "demo", "--cluster", "generic-slurm", "--dry-run", "--script")
    assert "no sbatch here to ask" in in_process(*asked, code=0).stderr
    in_process(*asked, *TOKENS, code=2)
    for name in ("sbatch", "scontrol"):
        client = tmp_path / "bin" / name
        put(client, "#!/bin/bash\necho 'Unable to contact slurm controller (connect failure)' >&2\nexit 1\n")
    done = in_process(*asked, code=0)
    assert "Slurm's controller does not answer: Unable to contact slurm controller" in done.stderr
    assert done.stdout.startswith("#!/bin/bash")
    in_process(*asked[:-2], code=4)


def test_the_python_of_jobs_and_what_of_it_is_not_here(bare, tmp_path, monkeypatch):
    (tmp_path / "site.toml").write_text(f'venv = "{tmp_path}/venv"\n')
    asked = ("demo", "--cluster", str(tmp_path / "site.toml"))
    missing = f"venv {tmp_path}/venv is not on this machine; without it on the nodes no rank starts"
    assert f"python       {tmp_path}/venv/bin/python\n             note: {missing}\n" in dry_run(*asked)
    (tmp_path / "venv").mkdir()
    assert f"python       {tmp_path}/venv/bin/python\ndata " in dry_run(*asked)
    (tmp_path / "site.toml").write_text('container = { kind = "apptainer", image = "/no/torch.sif" }\n')
    assert "python3 of the image /no/torch.sif\n             note: container.image /no/torch.sif is" in dry_run(*asked)


def test_what_surrounds_a_training_is_in_the_overview(bare):
    shown = dry_run("demo", "--set", "notify.command=mail me")
    assert "notify       mail me, when ended or failed or retried\n" in shown


def dry_run(*asked: str) -> str:
    return in_process("submit", *asked, "--dry-run", code=0).stdout


# --- when it saves


@pytest.mark.parametrize(
    ("asked", "saves", "keeps"),
    [
        ((), 30.0, 3),
        (("--set", "train.keep_last=5"), 30.0, 5),
        (("--set", "train.save_every=0"), None, 0),
        (("--set", "train.save_minutes=2"), 2.0, 0),
        (("--set", "train.save_last=false"), None, 0),
        (("--smoke",), None, 0),
    ],
)  # fmt: skip
def test_a_run_that_does_not_say_when_saves_every_half_hour(bare, tmp_path, asked, saves, keeps):
    (tmp_path / "plain.toml").write_text('name = "plain"\n[model]\npreset = "gpt2"\n[data]\nsource = "random"\n')
    request = ("submit", tmp_path / "plain.toml", "--cluster", "generic-slurm", *asked, "--dry-run")
    train = resolved_of(in_process(*request, "--script"))["train"]
    assert (train["save_minutes"], train["keep_last"]) == (saves, keeps)
    said = in_process(*request).stdout
    assert ("every 30 min and at the end, the newest 3 kept: about" in said) == (asked in ((),))


def test_a_step_that_the_run_does_not_reach_is_said(tmp_path):
    asked = ("--set", "train.steps=30", "--set", "train.save_at=[7, 5, 7]", "--set", "train.profile_steps=[500, 502]")
    done = in_process("submit", "demo", "--cluster", "local", *asked, "--dry-run", cwd=tmp_path)
    assert "note: step 500 of train.save_at or train.profile_steps is not reached: the run has 30 steps" in done.stderr
    assert " and after step 5, 7 and at the end" in done.stdout


def test_more_checkpoints_than_room_is_a_warning(monkeypatch):
    monkeypatch.setattr("hpc_gpt.core.checkpoints.disk_space.free_gib", lambda folder: 0.1)
    asked = ("submit", "demo", "--cluster", "generic-slurm", "--dry-run", "--set", "train.steps=1000")
    every = ("--set", "train.save_every=1")
    done = in_process(*asked, *every, "--script")
    line = next(line for line in done.stderr.splitlines() if line.startswith("warning: "))
    assert re.fullmatch(
        r"warning: all checkpoints take more than is free: \d+ checkpoints fit; train.keep_last = 3 .*", line
    )
    assert "warning: all checkpoints" in in_process(*asked, *every).stdout
    assert "warning: all checkpoints" not in in_process(*asked, *every, "--set", "train.keep_last=3").stdout


def test_the_seconds_of_a_preflight_are_checked_before_queueing(bare):
    asked = ("demo", "--cluster", "generic-slurm", "--set", "job.preflight=true")
    for done in both(*asked, HPC_GPT_PREFLIGHT_S="3 min"):
        assert done.code in (2, 4)
    assert error_of(both(*asked, HPC_GPT_PREFLIGHT_S="3 min")[0])[0].startswith("HPC_GPT_PREFLIGHT_S is '3 min'")
    assert both(*asked, HPC_GPT_PREFLIGHT_S="300")[0].code == 0
