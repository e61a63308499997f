"""What a job script sees of its own output and job, by sbatch and by `hpc-gpt submit`."""

import gzip
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.programs import put
from tests.slurm.launcher import Job, Launcher
from tests.slurm.test_job_scripts import folder_of, submit

FILES = """\
#!/bin/bash
#SBATCH -N 1 --ntasks=1 --time=9 --job-name=files --output=%x-%j-%N-%t.out --error=%5j.err
stat -c %F files-* *.err >seen
echo said
echo bad >&2
mv files-*.out moved.out
echo more
cp moved.out own.out
"""


def ends(job: Job) -> None:
    job.wait("its end", lambda: not job.cluster.run("squeue", "-h", "-j", job.id).stdout.strip())


def test_output_files_are_there_before_the_first_line(launcher: Launcher) -> None:
    jobs = {}
    for way in ("sbatch", "submit"):
        folder = folder_of(launcher, f"files-{way}", train_slurm=FILES)
        jobs[way] = folder, submit(launcher, way, folder, "train.slurm")
    found = {}
    for way, (folder, job) in jobs.items():
        ends(job)
        subprocess.run(["gzip", "moved.out"], cwd=folder, check=True)
        names = [path.name.replace(job.id, "ID") for path in folder.iterdir() if path.name != "logs"]
        texts = [(folder / name).read_text() for name in ("seen", "own.out", f"{int(job.id):05}.err")]
        found[way] = sorted(names), texts, gzip.decompress((folder / "moved.out.gz").read_bytes())
    assert found["submit"] == found["sbatch"]
    assert found["submit"][1] == ["regular empty file\nregular empty file\n", "said\nmore\n", "bad\n"]
    run = jobs["submit"][1].run
    assert run.attempt(1).log.read_text().startswith("said\nmore\n")
    assert run.attempt(1).err.read_text() == "bad\n"
    # What Slurm shows leads to them.
    folder, job = jobs["submit"]
    shown = re.search(r"StdOut=(.*)", job.cluster.run("scontrol", "show", "job", job.id).stdout)[1]
    (line,) = [line for line in Path(shown).read_text().splitlines() if line.startswith("the script's output is in ")]
    node = job.run.attempt(1).started()["node_list"]
    files = f"{folder}/files-{job.id}-{node}-0.out and {folder}/{int(job.id):05}.err"
    assert line == f"the script's output is in {files}"


AGAIN = """\
#!/bin/bash
#SBATCH -N 1 --ntasks=1 --time=9 --requeue --output=out.txt
echo "start ${SLURM_RESTART_COUNT:-0}"
[ -n "$SLURM_RESTART_COUNT" ] || { scontrol requeue "$SLURM_JOB_ID"; sleep 60; }
"""
SCONTROL = """#!/bin/bash
{scontrol} "$@" | sed 's/^\\(JobFileAppend *= \\)0/\\11/'
exit "${{PIPESTATUS[0]}}"
"""


@pytest.mark.long
def test_an_earlier_file_is_treated_as_open_mode_says(launcher: Launcher) -> None:
    jobs = {}
    for mode in ("", "truncate", "append"):
        for way in ("sbatch", "submit"):
            folder = folder_of(launcher, f"again-{mode}-{way}", train_slurm=AGAIN)
            (folder / "out.txt").write_text("of an earlier job\n")
            words = [f"--open-mode={mode}"] if mode else []
            jobs[mode, way] = folder, submit(launcher, way, folder, *words, "train.slurm")
    site = launcher.place("again-site")
    put(site / "scontrol", SCONTROL.format(scontrol=shutil.which("scontrol")))
    folder = folder_of(launcher, "again-site-submit", train_slurm=AGAIN)
    (folder / "out.txt").write_text("of an earlier job\n")
    own = {"PATH": f"{site}:{os.environ['PATH']}", "HPC_GPT_CLUSTER": "", "HPC_GPT_EXPERIMENT": ""}
    jobs["site", "submit"] = folder, launcher.submit("train.slurm", cwd=folder, **own)
    found = {}
    for key, (folder, job) in jobs.items():
        ends(job)
        assert job.restarts == 1
        lines = (folder / "out.txt").read_text().splitlines()
        found[key] = [line for line in lines if line.startswith(("start", "of an"))]
    kept = ["of an earlier job", "start 0", "start 1"]
    for mode, lines in {"": ["start 1"], "truncate": ["start 1"], "append": kept}.items():
        assert found[mode, "sbatch"] == found[mode, "submit"] == lines
    assert found["site", "submit"] == kept  # JobFileAppend=1 in slurm.conf
    for (_, way), (_, job) in jobs.items():
        if way == "submit":
            starts = [re.findall(r"^start .", each.log.read_text(), re.MULTILINE) for each in job.run.attempts()]
            assert starts == [["start 0"], ["start 1"]]
