"""The submitted code and the events: each in bash with stand-ins."""

from pathlib import Path

import pytest

from tests.launcher.test_shell_functions import bash, program
from tests.programs import put

SLURM = {"container": None, "python_here": '"${python[@]}"'}
LOCAL = {**SLURM, "scheduler": "local", "python_here": '"$HPC_GPT_PYTHON"'}
INSIDE = {**SLURM, "container": {"kind": "pyxis"}}
COLON = "PYTHONPATH cannot carry the colon of {}; set HPC_GPT_LOGS to a path without a colon"
DIFFERS = "submit the experiment again"
# The interpreter: it finds the package, snapshots, and checks the archive.
PYTHON = """echo "$*" >>"$HPC_GPT_RUN/asked"
case "$*" in
-c*) exit "${LACKS:-0}" ;;
*snapshot*) [ -z "${FULL:-}" ] && echo >"$3/code.zip" ;;
-I*) [ -z "${BAD:-}" ] || { echo "${BAD# }"; exit 1; } ;;
esac
"""
FIND = '-c import importlib.util, sys; sys.exit(importlib.util.find_spec("hpc_gpt") is None)\n'
CHECKS = "-I {0}/code.zip hpc_gpt.core.runs.code_archive {0}\n"


@pytest.mark.parametrize(
    ("facts", "run", "variables", "said", "asked"),
    [
        (SLURM, "r", {"HAS": "1", "PYTHONPATH": "/p"}, "{0}/code.zip:/p", CHECKS),
        (LOCAL, "r", {"HAS": "1"}, "{0}/code.zip", CHECKS),
        (SLURM, "r", {}, "{0}/code.zip", FIND + "-m hpc_gpt.core.runs.snapshot {0}\n" + CHECKS),
        (INSIDE, "r", {}, "", ""),
        (INSIDE, "r", {"HAS": "1"}, "{0}/code.zip", CHECKS),
        (SLURM, "r", {"LACKS": "1"}, "fails: the-python on n1 cannot import hpc_gpt; pip install hpc-gpt there, or "
         "name another Python: HPC_GPT_PYTHON, or venv in the cluster profile", FIND),
        (LOCAL, "r", {"FULL": "1"}, "dies: cannot make {0}/code.zip; is the disk full or read-only?",
         FIND + "-m hpc_gpt.core.runs.snapshot {0}\n"),
        (SLURM, "r", {"HAS": "1", "BAD": "it differs"}, f"fails: it differs; {DIFFERS}", CHECKS),
        (LOCAL, "r", {"HAS": "1", "BAD": " "}, f"dies: cannot read {{0}}/code.zip; {DIFFERS}", CHECKS),
        (SLURM, "a:b", {}, "fails: " + COLON, ""),
        (LOCAL, "a:b", {}, "dies: " + COLON, ""),
        (INSIDE, "a,b", {}, "fails: a container cannot mount {0}; set HPC_GPT_LOGS to a path without comma and colon",
         ""),
        (SLURM, "r", {"HPC_GPT_PYTHON": "none"}, "fails: no none on n1; name a Python: HPC_GPT_PYTHON, or modules, "
         "venv or python in the cluster profile", ""),
    ],
)  # fmt: skip
def test_a_run_uses_the_code_that_was_submitted(tmp_path: Path, facts, run: str, variables, said: str, asked) -> None:
    (folder := tmp_path / run).mkdir()
    if "HAS" in variables:
        put(folder / "code.zip", "")
    program(tmp_path, "the-python", PYTHON)
    end = 'set -o pipefail; die() { echo "dies: $1; $2"; exit 7; }; python=("$HPC_GPT_PYTHON")\n'
    end += "use_submitted_code 2>/dev/null; "
    own = {"HPC_GPT_PYTHON": "the-python", "HPC_GPT_RUN": str(folder), **variables}
    done = bash(tmp_path, "code.sh.j2", end + "env | sed -n s/^PYTHONPATH=//p", facts, **own)
    assert (done.out.strip(), done.err) == (said.format(folder), "")
    assert done.code == (7 if ": " in said else 0)
    found = (folder / "asked").read_text() if (folder / "asked").exists() else ""
    assert found == asked.replace("{0}", str(folder))


def test_events_are_sent_after_the_ranks_and_a_hang_is_killed(tmp_path: Path) -> None:
    facts = {"python_here": '"${python[@]}"', "notify": {"timeout_s": 280}}
    program(
        tmp_path,
        "the-python",
        'echo "$*"; trap -p INT USR2 TERM; readlink /proc/self/fd/0; [ -z "${4:-}" ] || exit "$CODE"',
    )
    end = 'n=2 python=(the-python); start_notifier; wait "$notifier"; send_event'
    beside = "trap -- '' SIGINT\ntrap -- '' SIGUSR2\ntrap -- '' SIGTERM\n/dev/null\n"
    for code, last in ((0, ""), (3, "notify: its process ended with exit code 3\n")):
        done = bash(tmp_path, "slurm/notify.sh.j2", f"{end} after", facts, HPC_GPT_RUN="/r", CODE=str(code))
        said = "".join(f"-m hpc_gpt.launcher.attempts.notify /r 2 {word}\n{beside}" for word in ("beside", "after"))
        assert (done.out, done.err) == (said + last, "")
    program(tmp_path, "the-python", 'trap "" TERM; echo "$5"; exec sleep 60')
    facts["notify"] = {"timeout_s": -19.5}
    done = bash(tmp_path, "slurm/notify.sh.j2", "python=(the-python) n=2; send_event refused", facts, HPC_GPT_RUN="/r")
    # It may not have come as far as its first word.
    assert done.out.removeprefix("refused\n") == "notify: its process has not ended and is killed\n"
