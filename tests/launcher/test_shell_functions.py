"""Functions of the templates by themselves, in bash: what each prints, leaves and exits with."""

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest

from hpc_gpt.core.runs.snapshot import templates_dir
from hpc_gpt.launcher.render import turns_script
from tests.golden.test_scripts import SCRIPTS
from tests.programs import put, ran
from tests.waiting import wait_for

LOADED = jinja2.Environment(
    loader=jinja2.FileSystemLoader(str(templates_dir())),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
LOADED.filters["quote"] = lambda value: shlex.quote(str(value))
# In place of the job's own: `within` of within.sh.j2,
# `ask_slurm` of slurm/chain.sh.j2, `fail` of slurm/functions.sh.j2.
AROUND = (
    'within() { "${@:2}"; }\nask_slurm() { :; }\nfail() { echo "fails: $1; $2"; exit 7; }\nsettings() { echo "{}"; }\n'
)


def bash(
    folder: Path, template: str, end: str, facts: dict | None = None, name: str = "job.sh", **variables: str
) -> SimpleNamespace:
    """(code, printed) of the template's functions and then `end`, as a script `name` in the folder."""
    around = {"scheduler": "slurm", "slug": "a", "preflight": False, "node_suffix": None, "python_here": "the-python",
              "cluster": {"chain": "none"}, "resolved": {"script": None}, "allocated_nodes": 2}  # fmt: skip
    text = LOADED.get_template(template).render({**around, **(facts or {})})
    (folder / name).write_text(f"{AROUND}{text}\n{end}\n")
    environment = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "HOSTNAME": "n1", **variables}
    done = ran("bash", name, cwd=folder, env=environment)
    return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)


def program(folder: Path, name: str, text: str) -> None:
    put(folder / "bin" / name, f"#!/bin/bash\n{text}\n")


MAKE = (
    'make_run_folder; echo "$HPC_GPT_RUN ${HPC_GPT_JOB:-}"; env | grep -c "^SLURM_CLUSTERS\\|^HPC_GPT_ELEMENT" || true'
)


@pytest.mark.parametrize(
    ("variables", "run", "job"),
    [
        ({"SLURM_JOB_ID": "12"}, "logs/a/12", "12"),
        ({"SLURM_JOB_ID": "12", "HPC_GPT_ELEMENT": "9_3"}, "logs/a/12", "9_3"),
        ({"SLURM_JOB_ID": "12", "HPC_GPT_LOGS": "there", "SLURM_CLUSTERS": "far"}, "there/a/12", "12"),
        ({"SLURM_JOB_ID": "12", "SLURM_SUBMIT_DIR": "sub"}, "sub/logs/a/12", "12"),
        ({"SLURM_JOB_ID": "12", "HPC_GPT_RUN": "mine", "HPC_GPT_LOGS": "there"}, "mine", "12"),
    ],
)
def test_a_run_folder_is_made_where_it_belongs(tmp_path: Path, variables: dict, run: str, job: str) -> None:
    done = bash(tmp_path, "run-folder.sh.j2", MAKE, name="slurm_script", **variables)
    assert (done.code, done.err, done.out.splitlines()) == (0, "", [f"{tmp_path / run} {job}", "0"])
    assert (tmp_path / run / "attempts").is_dir()
    assert (tmp_path / run / "job.sh").read_text() == (tmp_path / "slurm_script").read_text()
    assert (tmp_path / run / "resolved.json").read_text() == "{}\n"
    assert sorted(path.name for path in (tmp_path / run).iterdir()) == ["attempts", "job.sh", "resolved.json"]


def test_a_run_folder_keeps_what_it_has(tmp_path: Path) -> None:
    known = {"SLURM_JOB_ID": "12"}
    own = {"name": "slurm_script", **known}
    bash(tmp_path, "run-folder.sh.j2", MAKE, **own)
    (tmp_path / "logs/a/12/resolved.json").write_text("mine")
    assert bash(tmp_path, "run-folder.sh.j2", MAKE, **own).code == 0
    assert (tmp_path / "logs/a/12/resolved.json").read_text() == "mine"
    other = bash(tmp_path, "run-folder.sh.j2", MAKE + " # another", **own)
    assert (other.code, other.out) == (1, "")
    assert other.err == (
        f"Error: HPC_GPT_RUN names the run of another script: {tmp_path}/logs/a/12\n\n"
        "hint: unset HPC_GPT_RUN, or submit that run's own job.sh\n"
    )


def test_an_allocation_of_the_users_has_a_run_for_each_script(tmp_path: Path) -> None:
    """The same script finds its run again, on as many nodes as it needs, and says at its end how to go on."""
    own = {"SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "3"}
    end = 'make_run_folder; echo "$HPC_GPT_RUN $((HPC_GPT_ALLOCATION == $$)) $SLURM_NNODES $SLURM_JOB_NUM_NODES"; n=1'
    first, again = (bash(tmp_path, "run-folder.sh.j2", f"{end}; exit 3", **own) for _ in "12")
    other = bash(tmp_path, "run-folder.sh.j2", f"{end} # another", **own)
    assert first.out == again.out
    run = first.out.split()[0]
    assert re.fullmatch(rf"{tmp_path}/logs/a/12-\d+ 1 2 2\n", first.out)
    assert other.out.split()[0] not in (run, "")
    assert (first.code, first.err) == (
        3,
        f"attempt 1 has ended with exit code 3; unless the run is done, HPC_GPT_RUN={run} bash {run}/job.sh continues "
        f"it in an allocation, hpc-gpt submit --resume {run} in a job of its own\n",
    )
    element = bash(tmp_path, "run-folder.sh.j2", f"{end}", **own, HPC_GPT_ELEMENT="9_3")
    assert (element.out, element.err) == (f"{tmp_path}/logs/a/12 0  3\n", "")


def test_a_run_folder_needs_a_job_and_a_place(tmp_path: Path) -> None:
    alone = bash(tmp_path, "run-folder.sh.j2", MAKE)
    assert (alone.code, alone.out) == (2, "")
    assert alone.err == "Error: this script runs inside a Slurm job\n\nhint: sbatch job.sh\n"
    (tmp_path / "taken").write_text("")
    done = bash(tmp_path, "run-folder.sh.j2", MAKE, name="slurm_script", SLURM_JOB_ID="12", HPC_GPT_LOGS="taken")
    assert (done.code, done.out) == (1, "")
    assert "Error: cannot make the run folder taken/a/12\n\nhint: set HPC_GPT_LOGS to a folder that n1 can" in done.err


@pytest.mark.parametrize(("command", "code"), [("(exit 3)", 3), ("sh -c 'kill -9 $$'", 137)])
@pytest.mark.parametrize("signalled", [False, True])
def test_ranks_end_with_their_own_code(tmp_path: Path, command: str, code: int, signalled: bool) -> None:
    """Also after a signal, which interrupts the wait for them: they leave once it was heard."""
    program(tmp_path, "scontrol", "echo 'KillWait                = 61 sec'")
    (tmp_path / "1/flight").mkdir(parents=True)
    sends = "(until [ -e up ]; do sleep 0.02; done; kill -USR2 $$) &" if signalled else "touch heard"
    ranks = f"touch up; until [ -e heard ]; do sleep 0.02; done; {command}"
    end = f"trap 'touch heard' USR2; attempt=1; {sends}\nranks() {{ {ranks}; }}\nrun_ranks ranks\n"
    done = bash(tmp_path, "slurm/ranks.sh.j2", end + 'echo "$rc $kill_wait $last_s"', SLURM_JOB_ID="12")
    assert done.out.split() == [str(code), "61", "20"]
    assert list((tmp_path / "1").iterdir()) == []


@pytest.mark.parametrize(
    ("hosts", "known", "suffix", "code", "words"),
    [
        ("n1\nn2", "n1", None, 0, "n1"),
        ("n1\nn2", "n1-ib", "-ib", 0, "n1-ib"),
        ("", "", None, 7, "fails: scontrol names no host of 'n[1-2]'; set HPC_GPT_MASTER_ADDR by hand"),
        ("n1", "10.0.0.7", None, 0, "10.0.0.7"),
        ("n1", "other", None, 7, "fails: the host n1 has no address; if n1-ib has one, set node_suffix in the "
                                 "profile; else export HPC_GPT_MASTER_ADDR"),
        ("n1", "10.0.0.7", "-ib", 7, "fails: the host n1-ib has no address; correct node_suffix in the cluster "
                                     "profile, or export HPC_GPT_MASTER_ADDR"),
    ],
)  # fmt: skip
def test_the_first_host_is_one_with_an_address(
    tmp_path: Path, hosts: str, known: str, suffix: str | None, code: int, words: str
) -> None:
    """By its name, or by the address that Slurm has for it."""
    names = f'[ "$*" = "show hostnames n[1-2]" ] && printf %b {shlex.quote(hosts)}\n'
    node = f'[ "$*" = "show node n1" ] && echo "   NodeAddr={known} NodeHostName=n1 Version=22.05.8"\n'
    program(tmp_path, "scontrol", (node.replace(known, "n1") if known == "other" else node) + names)
    program(tmp_path, "getent", f'[ "$1" = ahosts ] || exit 9; [ "$2" = "{known}" ] || exit 2')
    done = bash(tmp_path, "slurm/ranks.sh.j2", "first_host 'n[1-2]'", {"node_suffix": suffix})
    assert (done.code, done.out.strip()) == (code, words)


# --- what the script of a program asks of Slurm and Python, with a limit

ASKS = 'echo $$ >.up && mv .up up; until [ -e go ]; do sleep 0.05; done; echo "an answer"'


def within(name: str, *lines: str) -> list[str]:
    found = re.search(r"^within\(\) \{.*?^\}$", SCRIPTS[name](), re.MULTILINE | re.DOTALL)
    assert found
    return ["bash", "-c", "\n".join([found[0], *lines, 'echo "exit code $?"']), "job.sh", ASKS]


@pytest.mark.parametrize("name", ["job-script-slurm", "job-script-local"])
def test_what_is_asked_hears_none_of_the_jobs_signals(name: str, tmp_path: Path) -> None:
    """Slurm sends them to every process of the job."""
    line = within(name, "trap : TERM INT", 'within 3000 bash -c "$1"')
    job = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True)
    wait_for("it is asked", (tmp_path / "up").exists)
    asked = int((tmp_path / "up").read_text())
    for number in (signal.SIGTERM, signal.SIGINT):
        for group in {job.pid, os.getpgid(asked)}:  # timeout makes one of its own
            os.killpg(group, number)
    (tmp_path / "go").touch()
    assert job.communicate()[0] == "an answer\nexit code 0\n"
    done = ran(*within(name, 'rm go; within 0.5 bash -c "$1"'), cwd=tmp_path)
    assert done.stdout == f"exit code {128 + signal.SIGKILL}\n", "its limit ends it"


def test_what_takes_too_long_ends_without_a_line_of_the_shell(tmp_path: Path) -> None:
    """timeout kills itself, too, which bash reports as `line 122: 481 Killed (trap …`."""
    done = bash(tmp_path, "within.sh.j2", "within 1 bash -c 'echo out; echo err >&2; sleep 60' || echo $?")
    assert (done.code, done.out, done.err) == (0, "out\n137\n", "err\n")


def test_a_job_starts_runs_in_turns_and_repeats_a_cut_one(tmp_path: Path) -> None:
    """The second run asks for a requeue: the job ends, and its next start begins with that run."""
    program(tmp_path, "squeue", "echo RUNNING")
    job_sh = (
        'n=1; while [ -d "$HPC_GPT_RUN/attempts/$n" ]; do n=$((n + 1)); done; mkdir -p "$HPC_GPT_RUN/attempts/$n"\n'
        'echo "${HPC_GPT_RUN##*/} $n $HPC_GPT_ELEMENT" >>"$HPC_GPT_RUN/../said"; again=false\n'
        '[ "${HPC_GPT_RUN##*/}$n" != b1 ] || again=true\n'
        'echo "{\\"requeue\\": $again}" >"$HPC_GPT_RUN/attempts/$n/ended.json"\n'
    )
    (turns := tmp_path / "turns").mkdir()
    for number, name in enumerate("abc"):
        (run := tmp_path / "runs" / name).mkdir(parents=True)
        (run / "job.sh").write_text(job_sh)
        (turns / f"{number:04d}").symlink_to(run)
    script = turns_script("x", [SCRIPTS["demo-slurm"]()] * 3)
    (tmp_path / "turns.sh").write_text(script)
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "HPC_GPT_TURNS": str(turns), "SLURM_JOB_ID": "7"}
    said = []
    for _ in range(3):
        subprocess.run(["bash", tmp_path / "turns.sh"], env=environment, check=True)
        said.append((tmp_path / "runs" / "said").read_text().splitlines())
    assert said[0] == ["a 1 7", "b 1 7"]
    assert said[1] == said[2] == ["a 1 7", "b 1 7", "b 2 7", "c 1 7"]
