"""Every command that README and docs show is parsed. Those that plan, render, report or look are run, and those that
submit as a dry run; the others are in one list, with the reason. Every TOML shown is read by what reads it."""

import contextlib
import importlib.util
import json
import re
import shutil
import tomllib
from dataclasses import fields

import click
import pytest

from hpc_gpt import cli
from hpc_gpt.core.files import logs_dir
from hpc_gpt.core.settings.cluster import ClusterProfile, load_profile
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.core.weights.config import config_of
from tests.cli.command import in_process
from tests.conftest import REPOSITORY
from tests.docs.pages import PAGES, blocks, shown
from tests.made_runs import add_attempt, make_run, metrics_line

COMMANDS = shown("hpc-gpt")
# {how a command begins: why no test here runs it}
NOT_RUN = {
    "--host": "needs sshd: tests/cli/test_on_host.py",
    "submit --resume": "needs a run with a checkpoint: tests/cli/test_resuming.py",
    "submit --branch": "the same: tests/cli/test_branching.py",
    "submit big.toml": "what init writes, with tokens: tests/cli/test_init.py",
    "submit --model Llama-3.2-1B": "needs published weights: tests/core/weights",
    "submit demo --engine NAME": "of an engine to be written: tests/core/engines/test_seventh.py",
    "submit demo --race --grid engine.name=ddp,NAME": "the same",
    "export": "needs a trained run: tests/distributed/test_export.py",
    "doctor": "asks Slurm: tests/slurm/test_doctor.py and test_first_hour.py",
    "profile detect": "asks Slurm: tests/slurm/test_first_hour.py",
    "save": "asks a run that trains: tests/launcher/local and tests/slurm/test_control.py",
    "stop": "the same",
    "requeue": "the same",
    "cancel": "the same",
    "status demo-smoke": "asks a run on a cluster: tests/slurm/test_first_hour.py",
    "logs demo-smoke": "the same",
    "clean": "needs a run that has ended: tests/launcher/watch/test_clean.py",
    "data corpus.jsonl --tokenizer": "needs a published tokenizer: tests/trainer/tokens",
    "data corpus.parquet": "needs a file of Parquet: tests/trainer/tokens/test_sources.py",
    "data --bytes": "needs a file of 0.3: tests/trainer/tokens/test_token_bytes.py",
    "report old-logs/ --tensorboard": "loads TensorBoard: tests/report",
    "plan --calibrate": "needs runs on GPUs: tests/cli/test_plan_calibrate.py",
    "plan --model gpt2 --engine NAME": "of an engine to be written: tests/core/engines/test_seventh.py",
    "report RACE": "reads a race: tests/launcher/local/test_race.py",
    "report acme.log": "of a dialect to be written: tests/reader/programs/test_example_of_the_page.py",
}


def reason_not_to_run(words):
    """The entry of NOT_RUN that a command falls under; None if it is run."""
    text = " ".join(words) + " "
    return next((begin for begin in NOT_RUN if text.startswith(f"{begin} ")), None)


RUN = [words for _, words in COMMANDS if reason_not_to_run(words) is None]


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{page}: {' '.join(words)}" for page, words in COMMANDS])
def test_every_shown_command_parses(page, words, tmp_path, monkeypatch):
    if "train.slurm" in words:  # words after a job script go to the script
        (tmp_path / "train.slurm").write_text("#!/bin/bash\n")
        monkeypatch.chdir(tmp_path)
    ctx, command, bare = click.Context(cli.group, **cli.group.context_settings), cli.group, len(words) == 1
    words = words[2:] if words[:1] == ("--host",) else words
    while isinstance(command, click.Group) and words:
        _, command, words = command.resolve_command(ctx, list(words))  # raises UserError for an unknown verb
    if not bare:
        command.make_context("hpc-gpt", list(words), parent=ctx)


def test_there_are_commands_to_test_and_reasons_for_the_others():
    assert len(COMMANDS) > 80
    assert len(RUN) > 30
    used = {reason_not_to_run(words) for _, words in COMMANDS}
    assert [begin for begin in NOT_RUN if begin not in used] == []


# What an earlier version had is history: CHANGELOG.md names targets that are gone.
@pytest.mark.parametrize("words", [words for page, words in shown("make") if page != "CHANGELOG.md"], ids=" ".join)
def test_its_target_is_in_the_makefile(words):
    targets = re.search(r"^\.PHONY: (.*)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE).group(1).split()
    assert words[0] in targets
    for word in words[1:]:
        assert re.match(r"(TESTS|PIP_ARGS|PYTHON|SEED|AT_ONCE|ONLY|EP|FAULTS|FILES|WORKERS)=", word), word


@pytest.mark.parametrize("words", [words for kind in ("python", "pytest") for _, words in shown(kind)], ids=" ".join)
def test_its_module_and_its_tests_are_there(words):
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]), words[1]
    for word in words:
        if word.startswith("tests/"):
            assert (REPOSITORY / word).exists(), word


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what the pages' commands name: runs, logs of another program, data, models, a sweep."""
    folder = tmp_path_factory.mktemp("pages")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPC_GPT_LOGS", str(folder / "logs"))
        patch.setenv("HPC_GPT_DATA", str(folder / "data"))
        for seconds in (0.5, 0.6):
            run = make_run(logs_dir())
            attempt = add_attempt(
                run, [metrics_line(step, step_s=seconds + 0.01 * (step % 3)) for step in range(1, 31)]
            )
            attempt.log.write_text("step 30\n12: step 30\n")
    (folder / "corpus.jsonl").write_text('{"text": "To be, or not to be.", "content": "That is the question."}\n' * 200)
    for name in ("corpus", "web", "code"):
        in_process("data", "corpus.jsonl", "-o", f"{name}.tokens", cwd=folder)
    for name, of in (("path/to/Qwen3-8B", "qwen3-8b"), ("Llama-3.2-1B", "llama3.2-1b")):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config_of(preset(of))))
    (folder / "mine.sh.j2").write_text(blocks("docs/extending.md", "jinja")[0])
    (folder / "old-logs").mkdir()
    (folder / "old-logs" / "train.log").write_text(
        "".join(f"step {step}: train loss {4 - step / 10:.4f}, val loss {4 - step / 11:.4f}\n" for step in range(3))
        + "".join(
            f"iter {step}: loss {4 - step / 50:.4f}, time {300 + step % 7}.00ms, mfu 31.00%\n" for step in range(60)
        )
    )
    (folder / "myrun.toml").write_text(blocks("docs/keys.md", "toml")[0])
    (folder / "mine.toml").write_text(blocks("docs/your-own-program.md", "toml")[0])
    (folder / "nanoGPT" / "data").mkdir(parents=True)
    (folder / "train.slurm").write_text(blocks("docs/your-own-program.md", "bash")[0])
    shutil.copy(folder / "train.slurm", folder / "job.slurm")
    return folder


@pytest.mark.parametrize("words", RUN, ids=" ".join)
def test_it_does_what_the_page_says(words, place, tmp_path):
    (profiles := tmp_path / "config" / "clusters").mkdir(parents=True)
    for name in ("mine", "mysite"):
        (profiles / f"{name}.toml").write_text(blocks("docs/profiles.md", "toml")[0])
    runs = sorted(path.name for path in (place / "logs" / "demo").iterdir())
    names = {"RUN": runs[0], "OTHER": runs[1], "NAME": "mine"}
    environment = {
        "HPC_GPT_CONFIG": str(tmp_path / "config"),
        "HPC_GPT_LOGS": str(place / "logs"),
    }
    if words[0] in ("init", "data"):  # they overwrite nothing, and train.toml and corpus.tokens are there
        shutil.copy(place / "corpus.jsonl", tmp_path)
        for script in ("train.slurm", "job.slurm"):
            shutil.copy(place / script, tmp_path)
        shutil.copytree(place / "Llama-3.2-1B", tmp_path / "Llama-3.2-1B")
        place = tmp_path
    if (
        words[0] == "submit" and "--dry-run" not in words
    ):  # as shown it queues or trains: tests/slurm and tests/launcher/local
        words = ["submit", "--dry-run", *words[1:]]
    done = in_process(*(names.get(word, word) for word in words), cwd=place, environment=environment)
    assert done.code == EXPECTED.get(" ".join(words), 0), done.stderr
    assert done.stdout or done.stderr


# The exit code of the page's script, which asks for two nodes.
EXPECTED = {"submit --dry-run --cluster local --wait train.slurm": 2}


TOMLS = [(str(page.relative_to(REPOSITORY)), text) for page in PAGES for text in blocks(str(page), "toml")]
PROGRAM = '[engine]\nname = "command"\n[layout]\nnodes = 1\n'


@pytest.mark.parametrize(("page", "text"), TOMLS, ids=[f"{page}: {text[:24]}" for page, text in TOMLS])
def test_every_toml_shown_is_read_by_what_reads_it(page, text, place, tmp_path):
    tables = tomllib.loads(text)
    if {*tables} - {"extends"} <= {each.name for each in fields(ClusterProfile)}:
        (tmp_path / "site.toml").write_text(text)
        assert load_profile(str(tmp_path / "site.toml")).name == "site"
        return
    if {*tables} <= {"cluster", "host", "hosts"}:
        (config := tmp_path / "config").mkdir()
        (config / "config.toml").write_text(text)
        assert in_process("profile", "list", environment={"HPC_GPT_CONFIG": str(config), "HPC_GPT_HOST": ""}).code == 0
        return
    if not isinstance(tables.get("command", {}), dict):
        text = f"[notify]\n{text}"  # the key alone
    if "[command]" in text and "engine" not in tables:
        own = "" if "run" in tables["command"] else '[command]\nrun = "python train.py"\n'
        text = PROGRAM + (own + text.replace("[command]\n", "") if own else text)
    elif not {"model", "engine"} & {*tables}:
        text = f'extends = "demo"\n[layout]\nmicro_batch = 8\n{text}'
    (place / "shown.toml").write_text(text)
    done = in_process("render", "shown.toml", "--cluster", "generic-slurm", cwd=place)
    assert done.code == 0, done.stderr
