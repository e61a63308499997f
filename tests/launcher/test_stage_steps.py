"""What a job script does around the staging of a node, run by bash with stand-ins of srun, date and the node's part."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from hpc_gpt.launcher.render import render_script
from tests.launcher.test_stage import staged

TOOLS = {
    "date": 'case $1 in +%s%3N) read -r t <"$0.ms"; echo $((t + 1500)) >"$0.ms"; echo "$t" ;; *) echo 99.5 ;; esac',
    "srun": 'while [ "$1" != bash ]; do printf "%s " "$1"; shift; done >>"$0.said"; exec "$@"',
    "shown": 'echo "$VIRTUAL_ENV ${PATH%%:*} $HPC_GPT_STAGE_SUM ${PYTHONHOME-none} $*"',
}
STAND_INS = r"""
stage_node() {
  local at=$TMPDIR/$HPC_GPT_STAGED
  echo "node ${1-}"; mkdir -p "$at/environment/bin"; echo 5a >"$at/done"
  cp "$HPC_GPT_RUN/shown" "$at/environment/bin/python"; [ -z "$FAULT" ] || printf 'stage-fault\tn1: %s\tdo\n' "$FAULT"
}
fail() { echo "fail $*"; exit 7; }; n=3 attempt=$TMPDIR staging_ms=250 PYTHONHOME=/x; export PYTHONHOME
within() { shift; "$@"; }
took() { echo "$HPC_GPT_STAGING $(env | grep -c '^HPC_GPT_STAGING=')"; }
"""
BATCH = 'unpack_here; "${python[@]}" a; stage_nodes; took; leave_nodes; ls "$TMPDIR/$HPC_GPT_STAGED"'
BATCH += '; echo "${HPC_GPT_PYTHON##*/}"'
STEP = "--export=ALL {}--nodes=1 --ntasks=1 --ntasks-per-node=1 --x=y "
STAGED, LEFT = STEP.format("--kill-on-bad-exit=0 "), STEP.format("--overlap ")
NOTE, NOT = "note: /e.tar has changed since the submission, when its SHA-256 was 0b\n", "node /e.tar\nfail n1: no do\n"
RUNS = "{0} {0}/bin 5a none a\n".format("HERE/hpc-gpt-0-4711/3/environment")
ROWS = {
    "warm": ("warm", "stage_nodes; took", "node \n1.750 99.5 1\n", STAGED),
    "unpacked": ("/e.tar", BATCH, f"node /e.tar\n{NOTE}{RUNS}node /e.tar\n3.250 99.5 1\nbatch\ndone\n"
                 "environment\npython\n", STAGED + LEFT),
    "not unpacked": ("/e.tar", "FAULT=no; unpack_here", NOT, ""),
    "not on a node": ("/e.tar", "export FAULT=no HPC_GPT_STAGED=a/b; stage_nodes", NOT, STAGED),
    "warm here": ("warm", "stage_environment fail; stage_environment fail; took", "node \n1.500 99.5 1\n", ""),
    "unpacked here": ("/e.tar", 'stage_environment fail; python a; echo "${HPC_GPT_PYTHON##*/}"; took',
                      f"node /e.tar\n{RUNS}python\n1.500 99.5 1\n", ""),
    "first here": ("/e.tar", "SUBMITIT_LOCAL_GLOBALID=0; stage_environment fail", f"{NOTE}node /e.tar\n", ""),
    "not here": ("/e.tar", "FAULT=no; stage_environment fail", "fail n1: no do\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_script_stages_in_these_steps(name: str, tmp_path: Path) -> None:
    stage, body, said, asked = ROWS[name]
    here = name.endswith("here")
    resolved = staged(stage, "local" if here else "generic-slurm", chain="none", srun=() if here else ("--x=y",))
    script = render_script(resolved)
    functions = re.split(r"^# --- ", script[script.index("# --- the environment on each node") + 6 :], flags=re.M)[0]
    for tool, text in TOOLS.items():
        (tmp_path / tool).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / tool).chmod(0o755)
    (tmp_path / "date.ms").write_text("1000\n")
    (tmp_path / "provenance.json").write_text('{\n "stage_sha256": "0b"\n}\n')
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path), "HPC_GPT_RUN": str(tmp_path),
           "FAULT": "", "HPC_GPT_JOB": "4711", **({"HPC_GPT_STAGED": "hpc-gpt-0-4711/3"} if here else {})}  # fmt: skip
    words = ["bash", "-c", f"set -u\n: {functions}{STAND_INS}{body}"]
    done = subprocess.run(words, env=os.environ | own, text=True, capture_output=True, check=False)
    found = done.stdout.replace(str(tmp_path), "HERE").replace(f"hpc-gpt-{os.getuid()}-", "hpc-gpt-0-")
    assert (found, done.stderr) == (said, "")
    assert (tmp_path / "srun.said").exists() == bool(asked)
    assert not asked or (tmp_path / "srun.said").read_text() == asked
    assert (tmp_path / "hpc-gpt-0-4711").exists() == here, "what is unpacked is taken away at the end"
