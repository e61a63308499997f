"""Completion: the scripts of three shells are fit for them; TAB offers verbs, experiments, profiles, runs, models."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.cli.command import in_process
from tests.terminal import on_a_terminal


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_the_shell_can_read(shell):
    script = in_process("completion", shell, code=0)
    assert "_HPC_GPT_COMPLETE" in script.stdout
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here to read its completion script")
    done = subprocess.run([shell, "-n"], input=script.stdout, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def offered(*words: str) -> list[str]:
    """What bash would be offered for the last of the words."""
    environment = {"_HPC_GPT_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(["hpc-gpt", *words]),
                   "COMP_CWORD": str(len(words))}  # fmt: skip
    done = in_process(environment=environment)
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_verbs_and_options():
    assert offered("re") == ["render", "requeue", "report"]
    assert "--pipeline-model-parallel-size" in offered("submit", "--pi")


def test_experiments():
    assert offered("submit", "memory-l") == ["memory-l", "memory-ladder"]
    assert {"demo", "gpt2-meg-ds-3d"} < set(offered("render", ""))
    assert not any("object" in name for name in offered("render", ""))


def test_what_report_takes(made_run):
    assert offered("report", "memory") == ["memory", "memory-ladder", "memory-techniques"]
    assert offered("report", made_run.run_id[:6]) == [made_run.run_id[:6], made_run.run_id]
    assert "llama-tiny" not in offered("report", ""), "an experiment without rows"


@pytest.mark.parametrize("verb", ["report", "compare", "why"])
def test_where_a_log_may_be_named_the_shell_completes_files(verb):
    environment = {"_HPC_GPT_COMPLETE": "bash_complete", "COMP_WORDS": f"hpc-gpt {verb} ./lo", "COMP_CWORD": "2"}
    assert in_process(environment=environment).stdout.split() == ["file,./lo"]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with a job script, tokens, a model, a tokenizer, a profile and another folder."""
    monkeypatch.chdir(tmp_path)
    for name in (
        "llama-1b/config.json",
        "llama-1b/tokenizer.json",
        "memos.slurm",
        "corpus.tokens",
        "site.toml",
        "a b.tokens",
        "mine.toml",
        "mine $(too).toml",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("#!/bin/bash\n")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("submit memo", ["memory-ladder", "memory-techniques", "memos.slurm"]),
        ("submit --cluster si", ["site.toml"]),
        ("submit --model gpt2-x", ["gpt2-xl"]),
        ("submit --tp ", []),
        ("submit --set train.de", []),
        ("plan --engine f", []),
        ("submit mi", ["mingpt-fsdp", "mine.toml"]),
        ("submit --cluster jean", ["jean-zay-h100", "jean-zay-v100-16g", "jean-zay-v100-32g"]),
        ("profile show lo", ["local"]),
        ("status ", []),
        ("submit --model llama-", ["llama-1b/"]),
        ("submit --model llama-1b/", ["llama-1b/config.json"]),
    ],
)
def test_models_profiles_experiments_and_files(files, words, answer):
    assert not os.path.exists(os.environ["HPC_GPT_LOGS"])  # which is no fault
    found = [name for name in offered(*words.split(" ")) if name != words.split(" ")[-1]]
    assert found[: len(answer)] == answer
    assert answer or not found


TYPED = {
    "submit --model=gpt2-x\t": "submit --model=gpt2-xl",
    "submit --cluster=jean-zay-h\t": "submit --cluster=jean-zay-h100",
    "data a\\ b\t": "data a b.tokens",
    "submit memos\t": "submit memos.slurm",
    "plan --model llama-\tc\t": "plan --model llama-1b/config.json",
    "data --tokenizer=llama-1b/t\tcor\t": "data --tokenizer=llama-1b/tokenizer.json corpus.tokens",
}


@pytest.mark.parametrize("lines", [3, pytest.param(6, marks=pytest.mark.long)])
def test_bash_writes_the_word_that_tab_means(files, tmp_path, lines):
    """Bash itself, at a terminal: `=` and `:` break its words."""
    program = tmp_path / "bin" / "hpc-gpt"
    program.parent.mkdir()
    answers = f'if [ -n "$_HPC_GPT_COMPLETE" ]; then exec {sys.executable} -m hpc_gpt; fi'
    program.write_text(f"#!/bin/sh\n{answers}\nprintf 'got:'; printf ' %s' \"$@\"; printf ':got\\n'\n")
    program.chmod(0o755)
    script = in_process("completion", "bash", code=0).stdout
    (tmp_path / "rc").write_text(f"PATH={program.parent}:$PATH\nPS1='ready> '\n{script}")
    bash = f"import os; os.execvp('bash', ['bash', '--noprofile', '--rcfile', {str(tmp_path / 'rc')!r}, '-i'])"
    typed = "".join(f"hpc-gpt {line}\n" for line in list(TYPED)[:lines])
    _, shown = on_a_terminal("-c", bash, type_in=f"{typed}exit\n", after="ready> ", TERM="dumb")
    assert re.findall("^got: (.*):got$", shown, re.MULTILINE) == list(TYPED.values())[:lines], shown


def test_runs(made_run):
    for verb in ("status", "logs", "cancel"):
        assert offered(verb, made_run.run_id[:6]) == [made_run.run_id]
    assert offered("submit", "--resume", "") == [made_run.run_id, "demo"]
