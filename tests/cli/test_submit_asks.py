"""submit without an EXPERIMENT and a size asks on a terminal, and refuses off it; what says either is never asked."""

import os
import sys
from pathlib import Path

import pytest

from hpc_gpt import cli
from hpc_gpt.core.errors import ConfigError
from tests.cli.command import in_process, without_slurm
from tests.terminal import on_a_terminal

JEAN_ZAY = ("--cluster", "jean-zay-v100-32g")
SAID = (
    "no EXPERIMENT and no size: this would queue gpt2-meg-ds-3d-48b, 52.0e9 parameters as tp4-pp16-dp1 on 64 GPUs of "
    "jean-zay-v100-32g"
)


def nothing_was_written():
    return not Path(os.environ["HPC_GPT_LOGS"]).exists()


# Python sees a Ctrl-C between a prompt and its wait for keys only at the next key: the line feed after it.
@pytest.mark.parametrize(("keys", "code"), [("\n", 1), ("\x04", 1), ("\x03\n", 130), ("y\n", 4)])
def test_a_terminal_is_asked(tmp_path, keys, code):
    words, wide = ("-m", "hpc_gpt", "submit", *JEAN_ZAY), {"COLUMNS": "200", **without_slurm(tmp_path)}
    ended, shown = on_a_terminal(*words, type_in=keys, after="queue it? [y/N]", **wide)
    assert (ended, nothing_was_written()) == (code, True)
    assert shown.startswith(f"{SAID}\nqueue it? [y/N]")
    assert ("nothing was submitted" in shown) is (code == 1)
    assert ("no sbatch" in shown) is (code == 4)  # a yes goes on to Slurm


def test_a_ctrl_c_while_the_question_is_printed_counts(tmp_path):
    """input() clears what its flush of the prompt raises: at a busy machine, the Ctrl-C of whoever answers at once."""
    program = (
        "import io, os, signal, sys\n"
        "class Busy(io.TextIOWrapper):\n"
        "    asks = False\n"
        "    def write(self, text):\n"
        "        self.asks = self.asks or 'queue it?' in text\n"
        "        return super().write(text)\n"
        "    def flush(self):\n"
        "        super().flush()\n"
        "        if self.asks:\n"
        "            self.asks = False\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.stderr = Busy(open(2, 'wb', closefd=False, buffering=0), write_through=True)\n"
        f"from hpc_gpt.cli import main; main({['submit', *JEAN_ZAY]!r})"
    )
    ended, shown = on_a_terminal("-c", program, type_in="\n", after="queue it? [y/N]", **without_slurm(tmp_path))
    assert (ended, nothing_was_written()) == (130, True), shown
    assert "interrupted" in shown


def test_a_question_that_nobody_would_see_is_not_asked(tmp_path):
    said = tmp_path / "said"
    program = (
        f"import os; os.dup2(os.open({str(said)!r}, os.O_CREAT | os.O_WRONLY), 2)\n"
        f"from hpc_gpt.cli import main; main({['submit', *JEAN_ZAY]!r})"
    )
    code, shown = on_a_terminal("-c", program)
    assert (code, shown) == (2, "")
    assert said.read_text().startswith(f"Error: {SAID}\n")


@pytest.mark.parametrize(("words", "code"), [(("submit", *JEAN_ZAY), 2), (("cancel",), 1)])
def test_a_closed_stdin_is_no_terminal(made_run, monkeypatch, capsys, words, code):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SystemExit) as end:
        cli.main([*words, *([made_run.run_id] if words == ("cancel",) else [])])
    assert end.value.code == code
    assert "bug in hpc-gpt" not in capsys.readouterr().err


@pytest.fixture
def taken(monkeypatch):
    """Whatever would be submitted ends there."""

    def take(*_):
        raise ConfigError("it would be submitted", "by a test")

    monkeypatch.setattr("hpc_gpt.cli.submitting.submit_run", take)
    return lambda done: "Error: it would be submitted\n" in done.stderr


@pytest.mark.parametrize(
    "given",
    [
        ("--yes",),
        ("-G", "64"),
        ("-N", "16"),
        ("--pp", "16"),
        ("--row", "48b"),
        ("--smoke",),
        ("--set", "layout.micro_batch=2"),
        ("--set", "model.seq=512"),
        ("demo",),
    ],
    ids=" ".join,
)
def test_what_is_named_is_not_asked_about(taken, given):
    assert taken(in_process("submit", *JEAN_ZAY, *given))


@pytest.mark.parametrize("variable", ["EXPERIMENT=demo", "YES=1"])
def test_variables_count_as_their_options_do(taken, variable):
    name, _, value = variable.partition("=")
    assert taken(in_process("submit", *JEAN_ZAY, environment={f"HPC_GPT_{name}": value}))


@pytest.mark.parametrize("chosen_by", ["flag", "variable", "config"])
def test_a_profile_without_a_queue_is_not_asked_about(taken, chosen_by):
    config = Path(os.environ["HPC_GPT_CONFIG"])
    (config / "clusters").mkdir(parents=True)
    (config / "clusters" / "large.toml").write_text('extends = "local"\ngpus_per_node = 64\n')
    (config / "config.toml").write_text('cluster = "large"\n' if chosen_by == "config" else "")
    variable = {"HPC_GPT_CLUSTER": "large"} if chosen_by == "variable" else {}
    flags = ("--cluster", "large") if chosen_by == "flag" else ()
    assert taken(in_process("submit", *flags, environment=variable))


def test_a_dry_run_and_a_sweep_are_not_asked_about(tmp_path):
    in_process("submit", *JEAN_ZAY, "--dry-run", environment=without_slurm(tmp_path), code=0)
    in_process("submit", *JEAN_ZAY, "--sweep", environment=without_slurm(tmp_path), code=4)


def test_the_next_command_of_an_empty_folder_runs_here(tmp_path):
    bare = without_slurm(tmp_path)
    assert in_process("status", environment=bare).stderr.endswith("\nnext: hpc-gpt submit demo --cluster local\n")
    own = {"HPC_GPT_CLUSTER": "jean-zay-v100-32g"}
    assert in_process("status", environment=bare | own).stderr.endswith("\nnext: hpc-gpt submit demo\n")
