"""What the commands that are typed often load. Seconds differ by machine (make bench prints them), modules do not."""

import json
import subprocess
import sys

import pytest

from hpc_gpt.cli import verbs

HEAVY = {"torch", "deepspeed", "submitit"}


def modules_after(*arguments):
    """Top-level packages loaded once `hpc-gpt ARGUMENTS` has ended well, in a Python of its own."""
    program = (
        "import json, sys\n"
        "from hpc_gpt.cli import main\n"
        "try:\n"
        f"    main({list(arguments)!r})\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["completion", "bash"]])
def test_what_every_shell_asks_loads_nothing_heavy(arguments):
    assert not modules_after(*arguments) & (HEAVY | {"numpy", "jinja2"})


@pytest.mark.parametrize("verb", verbs())
def test_help_loads_nothing_heavy(verb):
    assert not modules_after(verb, "--help") & (HEAVY | {"numpy", "jinja2"})


@pytest.mark.parametrize(
    "arguments",
    [
        ["submit", "demo", "--cluster", "local", "--dry-run"],
        ["report"],
        ["status"],
        ["profile", "list"],
    ],
)
def test_render_and_report_load_no_torch(arguments):
    assert not modules_after(*arguments) & HEAVY


@pytest.mark.parametrize(
    "arguments", [["render", "--gpus", "64", "--pp", "16"], ["render", "demo", "--cluster", "local"]]
)
def test_render_loads_no_numpy(arguments):
    assert not modules_after(*arguments) & (HEAVY | {"numpy"})


def test_what_a_job_script_starts_loads_no_reader_of_logs():
    """At the time limit a job has only seconds; a log is read if nothing else says how the attempt ended."""
    names = [f"hpc_gpt.launcher.attempts.{name}" for name in ("may_start", "notify", "script_end", "what_next")]
    program = f"import sys\nimport {', '.join(names)}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    heavy = HEAVY | {"numpy", "jinja2", "click", "hpc_gpt.reader.causes", "hpc_gpt.reader.logs"}
    assert not {*done.stdout.split()} & heavy
