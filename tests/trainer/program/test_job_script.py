"""A job script of the user's own: what is read of it, what is refused, and the job.sh around it."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hpc_gpt.core.checkpoints.find_checkpoints import newest_checkpoint
from hpc_gpt.core.files import read_json
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.resolved import config_hash
from hpc_gpt.launcher.attempts import what_next
from hpc_gpt.launcher.decide import prepare
from hpc_gpt.launcher.notes import notes_said, without_said
from hpc_gpt.launcher.request import Request, ScriptRequest
from hpc_gpt.launcher.submission import write_run
from hpc_gpt.trainer.program.job_script import find_resume, read_job_script
from hpc_gpt.trainer.program.script_watch import to_signal
from tests.around import around, events_of, named
from tests.cli.command import error_of, in_process
from tests.made_runs import add_attempt
from tests.processes import name_of
from tests.waiting import wait_for

HEAD = "#!/bin/bash\n#SBATCH -N 2 --gres=gpu:4\n#SBATCH --time=1:00:00\n"
BODY = "srun python train.py\n"
SPECIMENS = Path(__file__).parents[2] / "specimens" / "adopted"


def script(folder: Path, text: str | bytes = HEAD + BODY, name: str = "train.slurm") -> Path:
    (path := folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def hash_of(path: Path, *arguments: str, words: tuple[str, ...] = ()) -> str:
    asked = ScriptRequest(path, arguments, words)
    return config_hash(prepare(Request(str(path), None, None, {}, script=asked)).resolved)


def test_a_run_keeps_where_its_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ScriptRequest(script(tmp_path), (), ())
    prepared = prepare(Request("train.slurm", None, None, {"command.checkpoints": "out/step-*"}, script=asked))
    run = write_run(prepared, tmp_path / "logs", {})
    (tmp_path / "out/step-30/weights").mkdir(parents=True)
    (tmp_path / "out/step-30/weights/0").write_text("w")  # an empty one is not whole
    assert newest_checkpoint(run, run.resolved().program)[0] == tmp_path / "out/step-30"


def test_every_byte_of_the_script_is_at_the_end_of_job_sh(tmp_path: Path) -> None:
    every = bytes(each for each in range(1, 256) if each != 13)
    body = HEAD.encode() + b"cat <<'HPC_GPT_RESOLVED'\n" + every + b"\nHPC_GPT_RESOLVED\nno newline at its end"
    script(tmp_path, body)
    done = subprocess.run(
        [sys.executable, "-m", "hpc_gpt", "render", "train.slurm", "a b"], cwd=tmp_path, capture_output=True, check=True
    )
    assert done.stdout.endswith(b"bytes ====================================================================\n" + body)
    assert b"/slurm_script\" 'a b' <&3" in done.stdout
    head = done.stdout.partition(b"\n\n")[0].decode().splitlines()
    assert [line for line in head if line.startswith("#SBATCH")][:2] == HEAD.splitlines()[1:]


def test_bash_and_shellcheck_take_the_job_sh(tmp_path: Path) -> None:
    script(tmp_path)
    for more in ((), ("--error=e", "--signal=B:USR1@60"), ("--cluster", "local", "--nodes=1")):
        done = in_process("render", *more, "train.slurm", "it's", cwd=tmp_path, code=0)
        (tmp_path / "job.sh").write_text(done.stdout)
        checkers = [["bash", "-n"], *([["shellcheck", "-S", "warning"]] if shutil.which("shellcheck") else [])]
        for checker in checkers:
            checked = subprocess.run([*checker, "job.sh"], cwd=tmp_path, capture_output=True, text=True, check=False)
            assert checked.returncode == 0, checked.stdout + checked.stderr


def test_line_breaks_of_dos_are_refused(tmp_path: Path) -> None:
    """What else cannot run as it is, is in tests/cli/refused/programs.txt."""
    script(tmp_path, HEAD.replace("\n", "\r\n"))
    done = in_process("submit", "--cluster", "generic-slurm", "train.slurm", cwd=tmp_path, code=2)
    assert "DOS line breaks" in error_of(done)[0]


def test_options_mean_what_they_mean_to_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = script(tmp_path, HEAD + "#SBATCH --qos=file --partition=file\n" + BODY)
    monkeypatch.setenv("SBATCH_PARTITION", "shell")
    monkeypatch.setenv("SBATCH_QOS", "shell")
    asked = ScriptRequest(path, (), ("-q", "line", "--new-option=x", "--no-requeue"))
    prepared = prepare(Request(str(path), "jean-zay-v100-32g", None, {"retry_pause_s": 7}, script=asked))
    job, profile = prepared.resolved.job, prepared.resolved.cluster
    assert (job.partition, job.qos, job.time) == ("shell", "line", "1:00:00")
    assert (profile.chain, profile.retry_pause_s, profile.modules) == ("none", 7, ())
    assert prepared.job_script is not None
    assert "--new-option=x" in prepared.job_script.options
    directives = [line[8:] for line in prepared.script.splitlines() if line.startswith("#SBATCH ")]
    own = load_profile("jean-zay-v100-32g")
    assert f"--constraint={own.constraint}" in directives  # the script has none
    assert directives.index("-q line") > directives.index("--qos=file --partition=file")


def test_the_hash_is_of_body_arguments_and_sizes_alone(tmp_path: Path) -> None:
    first = hash_of(script(tmp_path))
    assert hash_of(script(tmp_path, HEAD + "#SBATCH -p gpu --mail-user=me\n" + BODY, "other.slurm")) == first
    assert hash_of(script(tmp_path), words=("--time=9",)) == first
    different = {
        first,
        hash_of(script(tmp_path), "--lr=1"),
        hash_of(script(tmp_path), words=("-N4",)),
        hash_of(script(tmp_path), words=("--ntasks=8",)),
        hash_of(script(tmp_path), words=("--gres=gpu:2",)),
        hash_of(script(tmp_path, HEAD + BODY + "\n# a comment\n")),
    }
    assert len(different) == 6


def test_a_secret_is_in_job_sh_alone_which_is_its_owners(tmp_path: Path) -> None:
    secret = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz"
    told = tmp_path / "told"
    run = ["submit", "--cluster", "local", "--wait", *around(told), "train.slurm", "--token", secret]
    text = f"#!/bin/bash\n#SBATCH -N1\necho got $1 of $#\n# {secret}\necho step 1 loss 2.5\necho step 2 loss 2.0\n"
    script(tmp_path, text)
    done = in_process(*run, cwd=tmp_path, environment={"HPC_GPT_LOGS": str(tmp_path / "logs")}, code=0)
    (folder,) = (tmp_path / "logs" / "train").iterdir()
    assert (folder / "attempts" / "1" / "log").read_text() == "got --token of 2\nstep 1 loss 2.5\nstep 2 loss 2.0\n"
    assert oct((folder / "job.sh").stat().st_mode)[-3:] == "600"
    holds = [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert {path.name for path in holds} == {"job.sh", "slurm_script"}
    wait_for("both events", lambda: told.read_text().count("\n") == 2, told.read_text)
    assert secret not in done.stdout + done.stderr + told.read_text()
    events = named(events_of(RunFolder(folder), told), "ended", "step", "loss")
    assert events == [("first_step", 1, None, 2, 2.0), ("ended", 1, "done", 2, 2.0)]
    assert json.loads((folder / "provenance.json").read_text())["script"]["folder"] == str(tmp_path)


def test_a_request_to_end_is_for_programs_and_catching_shells(tmp_path: Path) -> None:
    text = "{}\nsleep 3600 & (sleep 3601; true) & wait\n"
    for trap, catches in (("", False), ("trap 'echo x' TERM", True)):
        shell = subprocess.Popen(["bash", "-c", text.format(trap)], start_new_session=True)

        def programs(shell: int = shell.pid) -> list[str]:
            return sorted(name_of(pid) for pid in to_signal(shell, signal.SIGTERM) if pid != shell)

        try:
            wait_for("both programs", lambda: programs() == ["sleep", "sleep"], programs)
            assert (shell.pid in to_signal(shell.pid, signal.SIGTERM)) is catches
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()


def test_the_fifth_time_limit_in_a_row_ends_a_silent_script(tmp_path: Path, capsys) -> None:
    asked = ScriptRequest(script(tmp_path), (), ())
    prepared = prepare(Request("train.slurm", None, None, {"chain": "requeue"}, script=asked))
    run = write_run(prepared, tmp_path / "logs", {})
    for number in range(1, 6):
        add_attempt(run, [], "walltime", job_id="7", node_list="n[1-2]")
        assert what_next.main([str(run.path), str(number), "143", "JobState=RUNNING"]) == 0
        assert capsys.readouterr().out.split()[1] == ("again" if number < 5 else "stop")
    verdict = run.attempt(5).verdict()
    assert verdict["ended"] == "no_progress"
    assert "--checkpoints" in verdict["why"]


@pytest.fixture
def in_zone() -> Iterator[Callable[[str], None]]:
    """Puts this process into a time zone."""
    with pytest.MonkeyPatch.context() as patch:
        yield lambda zone: (patch.setenv("TZ", zone), time.tzset())[0]
    time.tzset()


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/Los_Angeles", "UTC"])
def test_the_script_hands_over_the_limit_as_utc(tmp_path: Path, in_zone, zone: str) -> None:
    asked = ScriptRequest(script(tmp_path, HEAD + "#SBATCH --signal=B:USR1@120\ntrue\n"), (), ())
    in_zone(zone)
    for left_s, near in ((60, True), (3600, False)):
        run = write_run(prepare(Request("train.slurm", None, None, {}, script=asked)), tmp_path / "logs", {})
        add_attempt(run, [], None, job_id="7")
        end = datetime.fromtimestamp(int(time.time()) + left_s, UTC)
        shown = f"JobId=7 JobState=RUNNING Restarts=0 RunTime=00:01:00 EndTime={end:%Y-%m-%dT%H:%M:%S} Deadline=N/A"
        assert what_next.main([str(run.path), "1", "143", shown]) == 0
        ended = run.attempt(1).ended() or run.attempt(1).verdict()
        assert ("before the time limit" in (ended.get("cause") or "")) == near, (left_s, ended)
        assert run.attempt(1).verdict()["elapsed_s"] == 60


def test_checkpoints_may_be_named_by_a_whole_path(tmp_path: Path) -> None:
    script(tmp_path)
    asked = ("submit", "--cluster", "generic-slurm", "--dry-run")
    done = in_process(*asked, "--checkpoints", "/scratch/me/step-*", "train.slurm", cwd=tmp_path, code=0)
    assert "the job chain sees progress by the checkpoints /scratch/me/step-*" in done.stdout + done.stderr


def test_a_dry_run_alone_says_what_was_said_before(tmp_path: Path) -> None:
    """A note that has changed since, a warning and the answer to the command are said at once; each row of a sweep
    counts."""
    asked = ScriptRequest(script(tmp_path), (), ())
    first = prepare(Request("train.slurm", None, None, {}, script=asked))
    (note,) = first.notes
    begins = "no line of it resumes: if the program does not load by itself, each start begins at step 0"
    assert note == f"note: {begins}; progress is seen by the printed steps, or by --checkpoints 'out/step-*'"
    logs, lines = tmp_path / "logs", [*first.notes, *first.predictions, "warning: no room", "note: new"]
    assert without_said(lines, notes_said(first.resolved, logs)) == lines, "before the first submission"
    written = [write_run(first, logs, {})]
    assert read_json(written[0].path / "provenance.json")["notes"] == [note, "not predicted: a script of your own"]
    assert without_said(lines, notes_said(first.resolved, logs)) == lines[2:]
    key = "hf_" + "x" * 32
    other = replace(first, notes=(f"note: --token {key}",))
    written.append(write_run(other, logs, {}))
    assert key not in (written[1].path / "provenance.json").read_text()
    assert without_said([*first.notes, *other.notes, "note: new"], notes_said(first.resolved, logs, 2)) == ["note: new"]
    done = in_process("submit", "--cluster", "generic-slurm", "--dry-run", "train.slurm", cwd=tmp_path, code=0)
    assert f"{note}\n" in done.stderr


STEPS = """\
#!/bin/bash
#SBATCH -N 1
for step in $(seq 50); do sleep 0.3; date +%s.%N >>times; echo "step $step loss 2.5"; done
"""


@pytest.mark.long  # its steps must be many looks at its output
def test_the_step_time_is_the_programs_and_not_the_looks(tmp_path: Path) -> None:
    script(tmp_path, STEPS)
    own = {"HPC_GPT_LOGS": "logs"}
    in_process("submit", "--cluster", "local", "--wait", "train.slurm", cwd=tmp_path, environment=own, code=0)
    (record,) = json.loads(in_process("report", "logs", "--json", cwd=tmp_path).stdout)["records"]
    assert record["steps_used"] > 20
    times = [float(line) for line in (tmp_path / "times").read_text().split()]
    took = [after - before for before, after in itertools.pairwise(times)]
    # A look is each 0.2 s: a step's time by looks alone would be that, or twice it.
    assert 0.27 < record["step_s"] < 1.1 * max(took)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('srun python train.py ${newest:+--resume "$newest"}', "--resume"),
        ("torchrun pretrain_gpt.py --load $CKPT --save $CKPT", "--load"),
        ("python train.py --resume_from_checkpoint=True", "--resume_from_checkpoint"),
        ("python train.py trainer.ckpt_path=last", "ckpt_path"),
        ("python train.py $HPC_GPT_RESUME_FROM", "HPC_GPT_RESUME_FROM"),
        ("# python train.py --resume", None),
        ("python train.py --load-dataset wiki", None),
        ("python train.py", None),
    ],
)
def test_the_words_of_a_resume_are_named_with_their_line(tmp_path: Path, line: str, words: str | None) -> None:
    (path := tmp_path / "own.slurm").write_text(f"#!/bin/bash\n#SBATCH -t 7\n{line}\n")
    assert find_resume(read_job_script(path)) == (None if words is None else (3, words))
