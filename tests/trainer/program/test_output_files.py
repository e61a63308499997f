"""The files of --output and --error of a job script: there before its first line, and its own as sbatch's are."""

import errno
import gzip
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_gpt.core.ends.end_policy import first_failure
from hpc_gpt.core.runs.find_runs import list_runs
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.trainer.program.output_files import copied_files, copy_more, make_outputs
from tests.cli.command import in_process
from tests.programs import put
from tests.waiting import wait_for

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "gpt"}


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder := tmp_path / "run" / "attempts" / "1").mkdir(parents=True)
    (folder / "log").write_text("said\n")
    (folder / "err").write_text("bad\n")
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if os.stat(folder).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("/dev/shm is no other file system here")
        yield Path(folder)


def after(attempt: Path, more: str) -> None:
    """The log grows, and the watch looks."""
    with (attempt / "log").open("a") as log:
        log.write(more)
    for log_file, file in copied_files(attempt):
        copy_more(log_file, file)


@pytest.mark.parametrize("appends", [False, True])
def test_a_new_file_is_the_log_itself(attempt: Path, appends: bool) -> None:
    make_outputs(attempt, "%x-%4j.out", "%u-%N-%t.err", appends, {**JOB, "SLURMD_NODENAME": "n1.site"}, "me")
    assert sorted(path.name for path in Path().iterdir()) == ["gpt-0007.out", "me-n1-0.err"]
    assert Path("gpt-0007.out").samefile(attempt / "log")
    assert Path("me-n1-0.err").samefile(attempt / "err")
    Path("gpt-0007.out").rename("moved")
    after(attempt, "more\n")
    assert Path("moved").read_text() == "said\nmore\n"


def test_an_earlier_file_is_cut_or_kept_and_no_log_changes(attempt: Path, tmp_path: Path) -> None:
    for number, appends, text in ((1, False, "said\n"), (2, True, "said\nsecond\n"), (3, False, "third\n")):
        (own := tmp_path / "run" / "attempts" / str(number)).mkdir(exist_ok=True)
        (own / "log").write_text(text.splitlines(keepends=True)[-1])
        make_outputs(own, "out", None, appends, JOB, "me")
        after(own, "")
        assert Path("out").read_text() == text
    assert [path.read_text() for path in sorted(tmp_path.glob("run/attempts/*/log"))] == [
        "said\n",
        "second\n",
        "third\n",
    ]


def test_a_file_of_the_users_is_truncated_or_kept(attempt: Path) -> None:
    for appends, text in ((True, "mine\nsaid\n"), (False, "said\n")):
        Path("out").write_text("mine\n")
        make_outputs(attempt, "out", None, appends, JOB, "me")
        after(attempt, "")
        assert Path("out").read_text() == text


def test_a_users_link_is_written_through(attempt: Path) -> None:
    Path("latest").symlink_to("real")
    make_outputs(attempt, "latest", None, False, JOB, "me")
    assert Path("latest").readlink() == Path("real")
    after(attempt, "line\n")
    assert Path("real").read_text() == "said\nline\n"


def test_behind_a_link_nothing_is_replaced(attempt: Path, monkeypatch, capfd) -> None:
    """The link of somebody in a folder like /tmp, which the system lets nobody open (fs.protected_symlinks)."""
    Path("theirs").write_text("theirs\n")
    Path("out").symlink_to("theirs")
    opened = Path.open

    def refused(path: Path, *words, **options):
        if path.name == "out":
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *words, **options)

    monkeypatch.setattr(Path, "open", refused)
    assert make_outputs(attempt, "out", None, False, JOB, "me") == []
    assert Path("theirs").read_text() == "theirs\n"
    assert "note: out: Permission denied: the output is only in" in capfd.readouterr().out


def test_what_is_no_file_stays_and_an_absent_folder_is_said(attempt: Path, capfd) -> None:
    os.mkfifo("pipe")
    make_outputs(attempt, "/dev/null", "pipe", False, JOB, "me")
    assert capfd.readouterr().out == ""
    make_outputs(attempt, "slurm/%j.out", None, False, JOB, "me")
    assert capfd.readouterr().out == (
        f"note: slurm/7.out: No such file or directory: the output is only in {attempt}/log\n"
    )
    assert [path.name for path in Path().iterdir()] == ["pipe"]
    assert copied_files(attempt) == []


@pytest.mark.parametrize("appends", [False, True])
def test_on_another_file_system_the_log_is_copied(attempt: Path, elsewhere: Path, appends: bool) -> None:
    (elsewhere / "out").write_text("mine\n")
    make_outputs(attempt, f"{elsewhere}/out", None, appends, JOB, "me")
    assert (elsewhere / "out").read_text() == ("mine\n" if appends else "")
    after(attempt, "more\n")
    after(attempt, "")
    assert (elsewhere / "out").read_text() == ("mine\n" if appends else "") + "said\nmore\n"


def test_what_a_full_disk_took_of_a_block_comes_once(attempt: Path, small_disk: Path) -> None:
    make_outputs(attempt, f"{small_disk}/out", None, False, JOB, "me")
    (filler := small_disk / "filler").write_bytes(bytes(6 << 20))
    lines = "".join(f"line {number}\n" for number in range(400_000))
    after(attempt, lines)
    assert (small_disk / "out").read_text() in ("", "said\n")
    filler.unlink()
    after(attempt, "")
    assert (small_disk / "out").read_text() == f"said\n{lines}"


FIRST = """\
#!/bin/bash
#SBATCH -N 1 --job-name=first --output=%x-%j.out --error={error} --open-mode=append
stat -c %F *.out {error} >seen
readlink "/proc/$$/fd/1" >goes
echo said
echo bad >&2
mv first-*.out moved.out
echo more
"""


def test_on_this_machine_they_are_there_before_the_first_line(tmp_path, elsewhere) -> None:
    (error := elsewhere / "err").write_text("mine\n")
    (tmp_path / "train.slurm").write_text(FIRST.format(error=error))
    # The watch has begun before the files are there.
    begun = 'until [ -e "$HPC_GPT_RUN/attempts/1/trainer.json" ]; do sleep 0.05; done'
    slow = f'case "$*" in *program.start*) {begun} ;; esac'
    python = put(tmp_path / "python", f'#!/bin/sh\n{slow}\nexec {sys.executable} "$@"\n')
    own = {"HPC_GPT_LOGS": str(tmp_path / "logs"), "HPC_GPT_PYTHON": str(python)}
    words = ("--cluster", "local", "--wait", "--set", "notify.command=exit 9", "train.slurm")
    in_process("submit", *words, cwd=tmp_path, environment=own, code=0)
    assert (tmp_path / "seen").read_text() == "regular empty file\nregular file\n"
    assert error.read_text() == "mine\nbad\n"
    subprocess.run(["gzip", "moved.out"], cwd=tmp_path, check=True)  # which takes no file with a second name
    assert gzip.decompress((tmp_path / "moved.out.gz").read_bytes()) == b"said\nmore\n"
    (run,) = list_runs(tmp_path / "logs")
    log = RunFolder(run.path).attempt(1).log
    assert (tmp_path / "goes").read_text() == f"{log}\n", "no pipe slows its output"
    whole = "said\nmore\nnotify: ended: the command ended with exit code 9\n"
    wait_for("what the notifier says", lambda: log.read_text() == whole, log.read_text)


def test_a_line_of_megabytes_without_a_blank_is_searched_once(attempt: Path) -> None:
    """A script that printed one ended as `error`: the chain's answer took longer than job.sh waits for it. If a search
    began at each of its bytes, this would take hours."""
    long = "x" * 2_000_000
    for name in ("n3", long):
        (attempt / "log").write_text(f"{long}\nsrun: error: {name}: task 1: Killed\n")
        found = first_failure(Attempt(attempt)) == f"{name}: task 1: Killed"
        assert found, len(name)
