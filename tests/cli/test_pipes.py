"""A reader that leaves, as `| head` does, changes neither what a verb does, nor its exit code, nor its stderr."""

import json
import os
import subprocess
import sys

import pytest

from hpc_gpt.cli import verbs
from hpc_gpt.core.settings.experiment_file import read_experiment
from tests.cli.command import in_process
from tests.conftest import REPOSITORY
from tests.made_runs import unsubmitted_run, with_attempt
from tests.programs import python
from tests.terminal import on_a_terminal
from tests.waiting import LIMIT_S

# Prints [exit code, stderr] of each verb, whose reader has left before its first line. Each is a fork of one process.
PROGRAM = """
import importlib, json, os, sys
import jinja2
from hpc_gpt import cli

for verb in cli.verbs().values():  # once for all forks
    importlib.import_module(f"hpc_gpt.cli.{verb.module}")

def run(words):
    reading, writing = os.pipe()
    os.close(reading)
    errors = os.memfd_create("errors")
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(writing, 1)
        os.dup2(errors, 2)
        os.close(writing)
        try:
            cli.main(words)
        except SystemExit as end:
            sys.stdout.flush()  # as Python does when it ends
            os._exit(end.code)
    os.close(writing)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.lseek(errors, 0, 0)
    return [code, os.read(errors, 65536).decode()]

print(json.dumps([run(words) for words in json.loads(sys.argv[1])]))
"""


def test_no_verb_fails_for_lack_of_a_reader(tmp_path):
    run = unsubmitted_run()
    run.new_attempt().log.write_text("hello\n" * 20_000)
    name = run.run_id
    ends_well = [
        ["--help"],
        ["--version"],
        ["plan", "--model", "gpt2", "--gpus", "8", "--cluster", "a100-80g-8"],
        ["doctor", "demo", "--cluster", "local", "--json"],
        ["init", "--help"],
        ["render", "demo"],
        ["submit", "demo", "--cluster", "local", "--dry-run"],
        ["status"],
        ["logs", name],
        ["stop", "--help"],
        ["save", "--help"],
        ["requeue", "--help"],
        ["cancel", "--help"],
        ["clean", "--help"],
        ["top", name],
        ["report", "--format", "csv"],
        ["compare", str(run.path), str(run.path)],
        ["why", name],
        ["export", "--help"],
        ["data", "--help"],
        ["profile", "show", "a100-80g-8"],
        ["completion", "bash"],
        ["help", "keys"],
    ]
    assert {words[0] for words in ends_well} >= set(verbs())
    # What is left to do is done.
    page, scripts = tmp_path / "page.html", tmp_path / "scripts"
    ends_well += [["render", "memory-ladder", "--sweep", "-o", str(scripts), "--cluster", "a100-80g-8"]]
    ends_well += [["report", "--html", str(page)]]
    over = with_attempt(unsubmitted_run(), 3)
    others = [["requeue", over.run_id], ["render", "nosuch"], ["status", "nosuch"]]  # which keep their own codes
    every = json.dumps([*ends_well, *others])
    done = python("-c", PROGRAM, every, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, code=0)
    assert {path.stem for path in scripts.iterdir()} == {row.name for row in read_experiment("memory-ladder").possible}
    assert page.is_file()
    found = json.loads(done.stdout)
    assert [code for code, _ in found] == [0] * len(ends_well) + [1, 2, 5]
    for words, (_, said) in zip(ends_well, found, strict=False):
        assert not {"Error", "Traceback", "Exception", "Broken"} & set(said.replace(":", " ").split()), words


@pytest.mark.parametrize("words", [["logs", "--follow"], ["status", "--watch", "--interval", "0.1"]])
def test_what_follows_a_run_ends_with_its_reader(made_run, waiting_process, words):
    made_run.new_attempt().log.write_text("a line\n")
    words = [*words, made_run.run_id]
    command = subprocess.Popen(
        [sys.executable, "-m", "hpc_gpt", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPOSITORY
    )
    assert command.stdout.readline()
    command.stdout.close()
    assert (command.wait(LIMIT_S), command.stderr.read()) == (0, b"")
    command.stderr.close()
    assert waiting_process.poll() is None


def test_a_full_disk_is_an_error_without_a_traceback():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hpc_gpt", "help", "keys"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "Error: the output: No space left on device\n"


@pytest.mark.parametrize(("words", "code"), [(("render", "demo", "--gpu", "2"), 2), (("status", "nosuch"), 5)])
def test_debug_adds_a_traceback_and_keeps_the_rest(words, code):
    plain, debugged = in_process(*words), in_process("--debug", *words)
    assert (plain.code, debugged.code) == (code, code)
    assert debugged.stderr.startswith("Traceback")
    assert debugged.stderr.endswith(plain.stderr)
    assert "Traceback" not in plain.stderr


def test_a_terminal_has_pythons_streams_and_loses_no_ctrl_c():
    program = "import sys; from hpc_gpt.core.output import outlive_readers; outlive_readers()"
    program += "; print(sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__)"
    assert on_a_terminal("-c", program) == (0, "True True\n")
