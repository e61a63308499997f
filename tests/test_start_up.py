"""What the commands that are typed often load. Seconds differ by machine (make bench prints them), modules do not."""

import json
import subprocess
import sys

import pytest

from hpc_gpt.cli import verbs

HEAVY = {"torch", "deepspeed", "submitit"}
# Commands that one process runs in turn, and what none of them loads.
LOADED = {
    "what every shell asks": (
        [["--help"], ["--version"], ["completion", "bash"], *([verb, "--help"] for verb in verbs())],
        HEAVY | {"numpy", "jinja2"},
    ),
    "render": (
        [["render", "--gpus", "64", "--pp", "16"], ["render", "demo", "--cluster", "local"]],
        HEAVY | {"numpy"},
    ),
    "what submits and what shows states": (
        [["submit", "demo", "--cluster", "local", "--dry-run"], ["status"], ["profile", "list"]],
        HEAVY | {"hpc_gpt.reader", "hpc_gpt.core.weights"},
    ),
    "what reads": ([["report"]], HEAVY),
}
PROGRAM = """\
import json, sys
from hpc_gpt.cli import main
loaded = []
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as end:
        assert not end.code, (words, end.code)
    loaded.append(sorted(sys.modules))
print(json.dumps(loaded), file=sys.stderr)
"""


@pytest.mark.parametrize("name", LOADED)
def test_commands_load_nothing_heavy(name):
    commands, heavy = LOADED[name]
    words = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    after = zip(commands, json.loads(done.stderr.splitlines()[-1]), strict=True)
    assert [(command, heavy & {*loaded}) for command, loaded in after if heavy & {*loaded}] == []


def test_what_a_job_script_starts_loads_no_reader_of_logs():
    """At the time limit a job has only seconds; a log is read if nothing else says how the attempt ended."""
    names = [f"hpc_gpt.launcher.attempts.{name}" for name in ("may_start", "notify", "script_end", "what_next")]
    program = f"import sys\nimport {', '.join(names)}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    heavy = HEAVY | {"numpy", "jinja2", "click", "hpc_gpt.reader.failures.causes", "hpc_gpt.reader.lines.read_log"}
    assert not {*done.stdout.split()} & heavy


def test_the_timings_of_an_earlier_run_load_no_dialect():
    program = "import sys\nimport hpc_gpt.reader.runs.timings\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {*done.stdout.split()} & {*HEAVY, "hpc_gpt.reader.lines.dialects", "hpc_gpt.reader.failures.causes"}
