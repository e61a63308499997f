"""What lies under a path: everything once, nothing that is no log, and every skipped thing counted and named."""

import builtins
import io
import json
import math
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_gpt.reader.runs.discovery import (
    OF_KERNEL,
    WRITTEN_BY_US,
    discover,
    distinguishing_folders,
    is_general,
    log_name,
    notes,
)
from hpc_gpt.reader.runs.foreign import NOT_KNOWN, read_foreign_runs
from tests.cli.command import in_process
from tests.conftest import REPOSITORY
from tests.made_runs import add_attempt, make_run
from tests.reader.made_logs import dump, iterations, write_log
from tests.waiting import LIMIT_S


@pytest.fixture
def lab(tmp_path):
    write_log(tmp_path / "lab" / "deep" / "er" / "a.log", dump(), iterations(1, 5))
    return tmp_path / "lab"


def names(paths):
    return [path.name for path in paths]


def test_our_own_runs_are_left_to_their_reader(lab):
    run = make_run(lab / "ours")
    found = discover([lab])
    assert [each.path for each in found.own] == [run.path]
    assert names(found.logs) == ["a.log"]


def test_the_output_file_of_a_job_script_is_no_second_run(lab):
    """A hard link to the attempt's log, or a copy: shorter while the run goes on, longer once it goes on elsewhere."""
    run = make_run(lab / "ours")
    attempt = add_attempt(run, [])
    lines = "".join(f"{line}\n" for line in [*dump(), *iterations(1, 9, loss=3)])
    attempt.log.write_text(lines)
    (lab / "linked-1.out").hardlink_to(attempt.log)
    copies = {"copied": lines, "copying": lines[:-99], "next": lines * 2, "other": lines[1:], "begun": lines[:256]}
    for name, text in (copies | {"later": lines[:300] + "x" * 99, "few": lines[:255]}).items():
        (lab / f"{name}-1.out").write_text(text)
    found = discover([lab])
    assert names(found.logs) == ["few-1.out", "later-1.out", "other-1.out", "a.log"]
    assert found.counts["the output file of a run that is listed"] == 4, "a link of ours is not worth a note"
    assert names(discover([lab / "linked-1.out"]).logs) == ["linked-1.out"], "alone it is a log as any other"


def test_a_short_output_file_is_known_by_its_recorded_path(lab):
    run = make_run(lab / "ours")
    attempt = add_attempt(run, [])
    for name in ("short.out", "other.out"):
        (lab / name).write_text("died at once\n")
    attempt.log.write_text("died at once\n")
    attempt.outputs.write_text(json.dumps({"files": [str(lab / "short.out"), 3]}))
    assert "short.out" in names(discover([lab]).logs), "a file that says something else is not ours"
    attempt.outputs.write_text(json.dumps({"files": [str(lab / "short.out")]}))
    found = discover([lab])
    assert names(found.logs) == ["other.out", "a.log"]
    assert found.counts["the output file of a run that is listed"] == 1


def test_a_sweeps_links_to_its_runs_are_not_worth_a_note(lab):
    run = make_run(lab / "ours")
    for place in ("a-sweep", "z-sweep"):  # met before the run, and after it
        (lab / place / "20261127-120000-abcd" / "1").mkdir(parents=True)
        (lab / place / "20261127-120000-abcd" / "1" / "0").symlink_to(run.path, target_is_directory=True)
    found = discover([lab])
    assert [each.path for each in found.own] == [run.path.resolve()]
    assert notes(found) == []


def test_a_link_in_a_circle_is_walked_once_and_told(lab):
    (lab / "deep" / "circle").symlink_to(lab)
    (lab / "deep" / "again.log").symlink_to(lab / "deep" / "er" / "a.log")
    (lab / "deep" / "nowhere").symlink_to(lab / "not there")
    (lab / "deep" / "self").symlink_to(lab / "deep" / "self")
    found = discover([lab])
    assert len(found.logs) == 1
    assert found.counts["folder seen before, for example through a link"] == 1
    assert found.counts["file seen before, for example through a link"] == 1
    assert found.counts["a link to nothing"] == 2


def test_what_is_no_plain_file_is_never_opened(lab):
    os.mkfifo(lab / "pipe.log")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(lab / "socket.log"))
        found = discover([lab, lab / "pipe.log", "/dev/zero"])
    assert found.counts["not a plain file"] == 3
    assert names(found.logs) == ["a.log"]


def test_folders_of_the_kernel_are_not_entered(lab):
    for name in ("proc/self", "sys", "dev"):
        (lab / name.replace("/", "-")).symlink_to(f"/{name}", target_is_directory=True)
    found = discover([lab, "/proc"])
    assert (found.counts, names(found.logs)) == ({OF_KERNEL: 4}, ["a.log"])
    assert in_process("why", "/proc").stderr.startswith(f"Error: /proc: {OF_KERNEL}\n")
    said = in_process("report", "/sys", lab, "--json")
    assert (said.code, f"/sys: {OF_KERNEL}" in said.stderr, len(json.loads(said.stdout)["records"])) == (1, True, 1)


@pytest.mark.parametrize(
    "victim", ["b.log", "job.slurm", "copy.out", "more", pytest.param("ours", marks=pytest.mark.long)]
)
def test_a_file_that_goes_does_not_end_the_rest(lab, victim, monkeypatch):
    """Before each call that asks for it or opens it, in turn."""
    gone = lab / victim

    def make() -> None:
        for name in ("b.log", "more/c.log"):
            write_log(lab / name, dump(), iterations(1, 5))
        (lab / "job.slurm").write_text("#!/bin/bash\n#SBATCH --nodes=2\nsrun x\n")
        (lab / "copy.out").write_text("".join(f"{line}\n" for line in iterations(1, 9, loss=3)))
        if not (lab / "ours").exists():
            shutil.copy(lab / "copy.out", add_attempt(make_run(lab / "ours"), []).log)

    left = math.inf

    def losing(call):
        def wrapped(path, *words, **more):
            nonlocal left
            if isinstance(path, str | os.PathLike) and Path(path).is_relative_to(gone):
                left -= 1
                if not left:
                    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
            return call(path, *words, **more)

        return wrapped

    make()
    for module, name in ((os, "stat"), (os, "open"), (os, "scandir"), (io, "open"), (builtins, "open")):
        monkeypatch.setattr(module, name, losing(getattr(module, name)))
    for turn in range(1, 999):
        left = math.inf
        make()
        left = turn
        done = in_process("report", lab, "--json")
        kept = {record["run"].rpartition("/")[2] for record in json.loads(done.stdout)["records"]}
        assert "a" in kept, (turn, done.stderr)
        if left > 0:
            break
    assert 2 < turn < 900


def test_what_cannot_be_read_is_told(lab):
    (lab / "deep" / "er" / "a.log").chmod(0)
    (lab / "closed").mkdir(mode=0)
    program = f"from hpc_gpt.reader.runs.discovery import discover; print(discover([{str(lab)!r}]).counts)"
    command = [sys.executable, "-c", program]
    if os.geteuid() == 0:  # root reads everything, unless it gives that up
        command = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert "'cannot be read: permission denied': 2" in done.stdout, done.stderr


def test_what_is_no_log_is_counted_with_why_and_the_first_named(lab):
    (lab / "weights.npy").write_bytes(b"\x93NUMPY" + bytes(99))
    (lab / "weights").write_bytes(b"PK\x03\x04" + bytes(99))
    (lab / "notes.txt").write_text("buy milk\n")
    (lab / "README.md").write_text("\n".join(iterations(1, 5)))
    (lab / "train.py").write_text("print('x')\n")
    (lab / "empty.log").touch()
    (lab / ".hidden.log").write_text("\n".join(iterations(1, 5)))
    (lab / ".git").mkdir()
    (lab / "run.sh").write_text("#!/bin/sh\necho\n")
    for number in range(20):
        (lab / f"{number}.bin.log").write_bytes(bytes(range(1, 255)) * 40)
    found = discover([lab])
    runs = read_foreign_runs(found)
    assert len(runs) == 1
    assert found.counts == {
        "not a log by its name (*.npy)": 1,
        "a zip archive, as of a checkpoint": 1,
        NOT_KNOWN: 1,
        "not a log by its name (*.md)": 1,
        "not a log by its name (*.py)": 1,
        "empty file": 1,
        "hidden folder": 1,
        "hidden file": 1,
        "a shell script without #SBATCH": 1,
        "binary": 20,
    }
    (note,) = notes(found)
    first = f"{lab / '0.bin.log'} and 19 more (binary), {lab / 'README.md'} and 2 more (not a log by its name)"
    assert note.startswith(f"skipped 29 paths: {first}, ")
    assert note.endswith(" and 5 others")


NO_LOGS = (
    "py pyi ipynb md rst tex htm html css js ts c cc cpp cu cuh h hpp rs go java toml yml yaml ini cfg patch diff svg"
)
NO_LOGS += " bib lock pyc pt pth ckpt safetensors npy npz bin idx distcp tfevents.1.n2 PY"
SCRIPTS = "sh bash slurm sbatch sub job batch SH"


def test_names_that_no_log_has(tmp_path):
    for end in f"{NO_LOGS} {SCRIPTS} sh2 md.log".split():
        (tmp_path / f"a.{end}").write_text("x")
    found = discover([tmp_path])
    assert names(found.logs) == ["a.md.log", "a.sh2"]
    assert {why for why in found.counts if "(" in why} == {
        f"not a log by its name (*.{end.lower()})" for end in NO_LOGS.split()
    }
    assert found.counts["a shell script without #SBATCH"] == len(SCRIPTS.split())


def test_a_log_with_nuls_in_it_is_read(lab):
    (lab / "crashed.log").write_bytes(bytes(8192) + "\n".join(["", *iterations(1, 5)]).encode())
    found = discover([lab])
    runs = {run.record.run: run for run in read_foreign_runs(found)}
    assert len(runs["crashed"].steps["step"]) == 5
    assert [flag for flag in runs["crashed"].record.flags if "NUL" in flag]


def test_a_script_for_sbatch_is_no_log(lab):
    for name in ("job.slurm", "job.sh", "job"):
        (lab / name).write_text("#!/bin/bash\n#SBATCH -N 4\n")
    for name, size in (("late", 5_000), ("last", 69_500), ("below", 69_700)):
        (lab / f"{name}.sh").write_text(f"#!/bin/sh\n{'#' * (size - 11)}\n#SBATCH -N 1\n")
    (lab / "large.sh").write_text("#!/bin/sh\n#SBATCH -N 1\n" + "#" * (1 << 20))
    found = discover([lab])
    assert names(found.logs) == ["a.log"]
    assert names(found.scripts) == ["job", "job.sh", "job.slurm", "last.sh", "late.sh"]
    assert found.counts == {"a shell script without #SBATCH": 2}


def test_a_file_named_by_the_user_is_read_whatever_its_name(lab):
    page = write_log(lab / "chronicle.md", iterations(1, 5))
    assert names(discover([page]).logs) == ["chronicle.md"]
    assert discover([lab / "none.log"]).counts == {"does not exist": 1}


def test_names_are_in_the_order_of_their_numbers(lab):
    for number in (10, 9, 1):
        write_log(lab / f"rank_{number}.log", iterations(1, 2))
    for folder in ("x10", "x9"):
        write_log(lab / "deep" / folder / f"{folder}.log", iterations(1, 2))
    assert names(discover([lab]).logs) == ["rank_1.log", "rank_9.log", "rank_10.log", "a.log", "x9.log", "x10.log"]
    assert names(discover(["-", lab / "deep", "-"]).logs) == ["-", "a.log", "x9.log", "x10.log"]


def said_name(path):
    """What a log's name says; of the folder W, which every log is in, nothing."""
    name = log_name(Path("/W") / path)
    said = [f"rank {name.rank}"] * (name.rank is not None) + ["labelled"] * name.labelled
    said += [f"job {name.job_id}"] * bool(name.job_id) + [f"rotated {name.rotation}"] * (name.rotation is not None)
    said += ["errors"] * name.is_errors + ["general"] * is_general(name.stem)
    family, shape = (each.removeprefix("//W/") for each in (name.family, name.shape))
    folders = "/".join(distinguishing_folders(name.path)[1:])
    return f"{name.stem}{''.join(f', {each}' for each in said)}; {family}; {shape} {name.numbers}; {folders}"


def test_what_the_name_of_a_log_says():
    text = Path(__file__).with_name("log_names.txt").read_text(encoding="utf-8")
    paths = [line.partition(": ")[0] for line in text.splitlines()]
    assert [f"{path}: {said_name(path)}" for path in paths] == text.splitlines()
    general = "log logs main main_log job run slurm nohup screen console console_output rank train training trainer"
    general += " train_log training_log output out stdout stderr std debug info err error Train"
    assert [word for word in general.split() if not is_general(word)] == []


def test_what_hpc_gpt_wrote_itself_is_left_out_without_a_note(lab):
    (lab / "page.html").write_text('<!DOCTYPE html>\n<meta name="generator" content="hpc-gpt report 1.2">\n')
    (lab / "theirs.html").write_text('<!DOCTYPE html>\n<meta name="generator" content="Hugo">\n')
    for name in ("events.out.tfevents.0000000001.hpc-gpt", "events.out.tfevents.1700000000.n1.7.0"):
        (lab / name).write_bytes(b"\0\1")
    for name, mark in (("offline-run-20260101_000000-a", "hpc-gpt.json"), ("offline-run-20260101_000000-b", "x.json")):
        (lab / "wandb" / name).mkdir(parents=True)
        (lab / "wandb" / name / mark).write_text("{}\n")
    (lab / "logs").mkdir()
    (lab / "logs" / "README.md").write_bytes((REPOSITORY / "logs" / "README.md").read_bytes())
    found = discover([lab, lab / "page.html"])
    assert (names(found.logs), found.counts[WRITTEN_BY_US]) == (["a.log", "x.json"], 4)
    assert notes(found) == [f"skipped {lab / 'theirs.html'} and 1 more: not a log by its name"]


@settings(max_examples=40)
@given(st.binary(max_size=400), st.sampled_from(["x", "x.log", "x.sh", "x.gz", "rank_٣.log", "x.log.1"]))
def test_no_bytes_are_too_odd(tmp_path_factory, content, name):
    folder = tmp_path_factory.mktemp("odd")
    (folder / name).write_bytes(content)
    found = discover([folder])
    runs = read_foreign_runs(found)
    assert len(runs) + len(found.scripts) + sum(found.counts.values()) == 1
