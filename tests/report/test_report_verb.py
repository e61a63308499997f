"""`hpc-gpt report`: data on stdout, everything else on stderr, record.json in our own folders alone."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from hpc_gpt.cli.report import report
from hpc_gpt.core.errors import ConfigError, NoSuchRun, UserError
from hpc_gpt.core.runs.record import Record
from hpc_gpt.report.notes import ABSURD, KNOW, LOOK, RunNote, note_lines
from tests.conftest import REPOSITORY
from tests.made_runs import add_attempt, make_run, metrics_line
from tests.reader.made_logs import dump, iterations, write_log
from tests.waiting import LIMIT_S

TRUTH = REPOSITORY / "tests" / "reader" / "truth"


@pytest.fixture
def logs(tmp_path, monkeypatch):
    folder = tmp_path / "logs"
    monkeypatch.setenv("HPC_GPT_LOGS", str(folder))
    return folder


@pytest.fixture
def runs(logs):
    made = [make_run(logs) for _ in range(2)]
    for run in made:
        add_attempt(run, 20)
    return made


def call(*words):
    return CliRunner().invoke(report, words, catch_exceptions=False)


def test_all_runs_of_the_logs_folder_unless_told_otherwise(runs):
    result = call()
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) == 3
    for run in runs:
        assert run.run_id in result.stdout


def test_paths_may_be_a_run_a_folder_of_runs_or_an_id(runs, logs):
    for path in (str(runs[0].path), runs[0].run_id):
        assert len(json.loads(call(path, "--json").stdout)["records"]) == 1
    for path in (str(logs), str(logs / "demo")):
        assert len(json.loads(call(path, "--json").stdout)["records"]) == 2
    assert len(json.loads(call(str(logs), runs[0].run_id, "--json").stdout)["records"]) == 2


def test_record_json_alone_is_written_and_brought_up_to_date(runs):
    before = {path: path.read_bytes() for path in runs[0].path.rglob("*") if path.is_file()}
    call()
    after = {path: path.read_bytes() for path in runs[0].path.rglob("*") if path.is_file()}
    assert set(after) - set(before) == {runs[0].record}
    assert all(after[path] == before[path] for path in before)
    inode = runs[0].record.stat().st_ino
    call()
    assert runs[0].record.stat().st_ino == inode, "one that says the same is not written again"
    first = Record.from_tables(json.loads(runs[0].record.read_text()))
    assert first.step_s == 0.5
    add_attempt(runs[0], [metrics_line(21)])
    call(str(runs[0].path))
    assert len(Record.from_tables(json.loads(runs[0].record.read_text())).attempts) == 2


def test_json_is_all_there_is_on_stdout_a_line_a_record_as_jsonl(runs):
    add_attempt(runs[0], [metrics_line(21, loss=float("nan"))])
    result = call("--json")
    page = json.loads(result.stdout)
    assert sorted(page) == ["records", "schema"]
    assert result.stdout == call("--format", "json").stdout
    lines = call("--format", "jsonl").stdout.splitlines()
    assert [json.loads(line)["run"] for line in lines] == [run.run_id for run in runs]


def test_a_folder_that_cannot_be_written_is_told_of_and_printed(runs):
    runs[0].record.mkdir()  # what root cannot replace either
    result = call("--json")
    assert result.exit_code == 0
    assert len(json.loads(result.stdout)["records"]) == 2
    assert "note: record.json not written: cannot write" in result.stderr


def test_a_damaged_run_is_told_of_and_does_not_hide_the_others(runs):
    (runs[0].path / "resolved.json").write_text("{")
    result = call()
    assert result.exit_code == 1
    assert runs[1].run_id in result.stdout
    assert "Error: " in result.stderr
    assert runs[0].run_id in result.stderr


def test_no_runs_yet_is_no_failure(logs):
    result = call()
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.startswith("no runs under ")
    assert "hint: hpc-gpt report PATH" in result.stderr
    assert json.loads(call("--json").stdout) == {"schema": 1, "records": []}


@pytest.mark.parametrize("words", [("--columns", "gpus,nosuch"), ("--columns", " , "), ("--sort", "-nosuch")])
def test_misspelt_keys_are_refused_before_the_reading(words, runs):
    with pytest.raises(ConfigError):
        call(*words)
    assert not runs[0].record.exists()


@pytest.mark.parametrize("option", ["--tensorboard", "--wandb"])
def test_an_export_that_cannot_be_written_is_refused_first(option, runs, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError):
        call(option, str(tmp_path / "file" / "below"))
    assert not runs[0].record.exists()


@pytest.mark.long
def test_the_commands_after_an_export_read_it(runs, tmp_path):
    """What is exported is read back in test_tensorboard.py and test_wandb.py."""
    out = tmp_path / "my $(curves)"
    result = call("--tensorboard", str(out / "tb"), "--wandb", str(out))
    assert result.exit_code == 0, result.stderr
    commands = [line.removeprefix("next: ") for line in result.stderr.splitlines() if line.startswith("next: ")]
    board, sync = commands
    # TensorBoard lists what it finds instead of serving it.
    shown = subprocess.run(
        f"{sys.executable} -m tensorboard.main{board.removeprefix('tensorboard')} --inspect --tag loss",
        shell=True, capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    assert shown.stdout.count("first_step") == len(runs)
    # W&B lists what it would send.
    listed = subprocess.run(
        f"{sys.executable} -m {sync.replace('sync', 'sync --dry-run')}",
        shell=True, capture_output=True, text=True, timeout=LIMIT_S, check=True,
        env=os.environ | {"HOME": str(tmp_path)},
    )  # fmt: skip
    assert f"Would sync {len(runs)} run(s)" in listed.stdout + listed.stderr


def test_beside_a_log_one_that_has_nothing_is_a_note(logs, tmp_path):
    write_log(tmp_path / "A.out", dump(), iterations(1, 5))
    (tmp_path / "A.err").touch()
    words = f"{tmp_path / 'A.err'}: empty file\n"
    done = call(str(tmp_path / "A.out"), str(tmp_path / "A.err"))
    assert (done.exit_code, f"note: skipped {words}" in done.stderr) == (0, True)
    alone = call(str(tmp_path / "A.err"))
    assert (alone.exit_code, alone.stderr) == (1, f"Error: {words}")


def test_a_link_to_nothing_is_called_one(logs, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    result = call(str(tmp_path / "loop"))
    assert (result.exit_code, result.stderr) == (1, f"Error: {tmp_path / 'loop'}: a link to nothing\n")


def test_what_is_said_of_many_runs_is_said_once(logs, tmp_path):
    (folder := tmp_path / "lab").mkdir()
    line = " iteration {0:8d}/ 1000 | elapsed time per iteration (ms): 500.0 | lm loss: {0}.0E+00 |\n"
    for name in "abcdef":
        (folder / f"{name}.out").write_text("".join(line.format(step) for step in (1, 2, 3)))
    notes = [note for note in call(str(folder)).stderr.splitlines() if "rests on" in note]
    assert notes == ["note: a, b, c and 3 more: step_s rests on 2 steps"]


SIX = (
    "bloom_other_layout",
    "bridge_done_then_cancelled",
    "colossal_4551",
    "composer_two_nodes",
    "llmc_156",
    "litgpt_553",
)


def test_the_notes_on_six_logs_are_three_lines_at_most(logs, tmp_path):
    """The worst first; the others are counted, and in the report of one run, the page and JSON. What report wrote
    itself, and the script of a run, are not worth a note."""
    (folder := tmp_path / "lab").mkdir()
    for name in SIX:
        (folder / f"{name}.log").write_bytes((TRUTH / f"{name}.log").read_bytes())
        (folder / f"{name}.sh").write_text("#!/bin/bash\n#SBATCH --nodes=2\nsrun python train.py\n")
    own = ("--html", str(folder / "page.html"), "--tensorboard", str(folder / "tb"), "--wandb", str(folder / "wb"))
    assert call(str(folder), *own).exit_code == 0
    for name in ("x.py", "y.md", "z.npy"):
        (folder / name).write_text("x")
    for paths in ([folder], sorted(folder.iterdir())):
        done = call(*map(str, paths))
        notes = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
        assert (done.exit_code, len(notes) <= 3) == (0, True), done.stderr
        assert not any(name in done.stderr for name in ("page.html", "tb", "wb", ".sh"))
    alone = call(str(folder / "litgpt_553.log")).stderr
    assert alone.count("litgpt_553") == alone.count("note: ") > 0, "no name twice in a note"
    assert "litgpt: " not in alone
    assert len(json.loads(call(str(folder), "--json").stdout)["records"]) == 6


def test_the_worst_notes_are_named_and_the_others_counted():
    notes = [RunNote(name, text, level) for name in "abc" for text, level in (("few steps", LOOK), ("no peak", KNOW))]
    notes += [RunNote("d", "320 TFLOPs of 312", ABSURD), *(RunNote("a", word, LOOK) for word in ("x", "y", "z"))]
    worst = ["d: 320 TFLOPs of 312", "a, b, c: few steps"]
    assert note_lines(notes, 4) == [*worst, "4 more: report RUN"]
    assert note_lines(notes, 4, taken=1) == [worst[0], "5 more: report RUN"]
    assert note_lines(notes, 4, taken=5) == ["6 notes: report RUN"]
    assert len(note_lines(notes, 1)) == 6, "of one run nothing else shows them"
    assert note_lines(notes[:2], 4) == ["a: few steps", "a: no peak"]


def test_a_script_without_a_log_is_no_run_and_told_of(logs, tmp_path):
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "job.sh").write_text("#!/bin/bash\n#SBATCH --nodes=2\nsrun python train.py\n")
    result = call(str(tmp_path / "lab" / "job.sh"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"Error: {tmp_path / 'lab' / 'job.sh'}: a Slurm script without a log\n"
    with pytest.raises(NoSuchRun, match="a Slurm script without a log"):
        call(str(tmp_path / "lab"))


@pytest.mark.parametrize("form", ["table", "csv", "md", "json", "jsonl"])
def test_no_format_gives_a_figure_without_its_flag(form, logs, tmp_path):
    line = " iteration {0:8d}/ 1000 | elapsed time per iteration (ms): 500.0 | lm loss: {0}.0E+00 |\n"
    (tmp_path / "a.out").write_text("".join(line.format(step) for step in (1, 2, 3)))
    (tmp_path / "notes.txt").write_text("nothing of a training\n")
    result = call(str(tmp_path), "--format", form)
    told = result.stdout if form.startswith("json") else result.stderr
    assert "step_s rests on 2 steps" in told
    assert "notes.txt: has no line" in result.stderr


def test_a_note_with_other_figures_in_each_run_is_said_once(logs, tmp_path):
    (folder := tmp_path / "lab").mkdir()
    line = " iteration {0:8d}/ 1000 | elapsed time per iteration (ms): {1:.1f} | lm loss: {0}.0E+00 |\n"

    def notes(names):
        for number, name in enumerate(names, 1):
            times = [100 * number * (1 + step % 10) for step in range(1, 61)]
            (folder / f"{name}.out").write_text("".join(line.format(at, ms) for at, ms in enumerate(times, 1)))
        return [note for note in call(str(folder)).stderr.splitlines() if "spread widely" in note]

    (note,) = notes("abc")
    assert note.startswith("note: a, b, c: step times spread widely: 10th percentile "), "three lines have no room"
    (note,) = notes("abcdef")
    assert note.startswith("note: a, b, c and 3 more: step times spread widely: 10th percentile ")
    assert note.endswith(" s (the others are alike, with other figures)")
