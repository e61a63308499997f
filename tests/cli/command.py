"""The command as a user has it, in a process of its own; and the same within the test's process, which starts none."""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from hpc_gpt import cli
from hpc_gpt.core.settings.resolved import Resolved
from tests.conftest import REPOSITORY
from tests.waiting import LIMIT_S

# What scripts and git need of a machine without Slurm.
_TOOLS = ("bash", "git", "uname", "nproc", "mkdir", "cat", "ln", "rm", "cmp", "date", "env", "sed", "tail", "stat")


@dataclass(frozen=True)
class Done:
    code: int
    stdout: str
    stderr: str


def hpc_gpt(
    *arguments: object, cwd: Path | None = None, environment: dict[str, str] | None = None, code: int | None = None
) -> Done:
    """`python -m hpc_gpt ARGUMENTS`; HPC_GPT_* are the test's own. `code`: it must exit with that."""
    done = subprocess.run(
        [sys.executable, "-m", "hpc_gpt", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert code in (None, done.returncode), done.stderr
    return Done(done.returncode, done.stdout, done.stderr)


def in_process(
    *arguments: object, cwd: Path | None = None, environment: dict[str, str] | None = None, code: int | None = None
) -> Done:
    """The same without starting a process: for what reads, prints or refuses, and neither forks nor waits."""
    with CliRunner().isolation(env=environment) as (stdout, stderr, _), contextlib.chdir(cwd or "."):
        try:
            cli.main([str(word) for word in arguments])
        except SystemExit as end:
            found = end.code if isinstance(end.code, int) else int(end.code is not None)
        else:
            raise AssertionError("main() ends by SystemExit")
    done = Done(found, stdout.getvalue().decode(), stderr.getvalue().decode())
    assert code in (None, found), done.stderr
    return done


def as_nobody(*arguments: object) -> Done:
    """`in_process` by another user, who may write nothing here; for root, who alone can become one."""
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            done = in_process(*arguments)
        except BaseException as fault:
            done = Done(99, "", repr(fault))
        os.write(writes, json.dumps([done.code, done.stdout, done.stderr]).encode())
        os._exit(0)
    os.close(writes)
    with open(reads, encoding="utf-8") as answer:
        found = json.loads(answer.read())
    os.waitpid(child, 0)
    return Done(*found)


def error_of(done: Done) -> tuple[str, str]:
    """(message, hint) of an error, whose shape is checked on the way: `Error: …`, an empty line, `hint: …`. Of several
    faults each has its hint directly below it, unless the hint is above already; here their lines are put together."""
    assert "Traceback" not in done.stderr, done.stderr
    printed = "\n".join(line for line in done.stderr.splitlines() if not line.startswith('{"error"'))
    message, parts, hint = printed.partition("\n\nhint: ")
    if not parts:
        groups = [group.partition("\nhint: ") for group in printed.split("\n\n")]
        message, hint = "\n".join(group[0] for group in groups), "; ".join(group[2] for group in groups if group[2])
    assert hint, done.stderr
    assert message.startswith("Error: "), done.stderr
    return message.removeprefix("Error: "), hint


def without_slurm(tmp_path: Path) -> dict[str, str]:
    """A PATH on which no Slurm is."""
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    for name in _TOOLS:
        for folder in ("/bin", "/usr/bin"):
            if (Path(folder) / name).exists() and not (tools / name).exists():
                (tools / name).symlink_to(Path(folder) / name)
    return {"PATH": str(tools)}


def profile_of(name: str, text: str, default: bool = False) -> str:
    """A profile of the test's own user, by its name; with `default`, the one that they have chosen."""
    config = Path(os.environ["HPC_GPT_CONFIG"])
    (config / "clusters").mkdir(parents=True, exist_ok=True)
    (config / "clusters" / f"{name}.toml").write_text(text)
    if default:
        (config / "config.toml").write_text(f'cluster = "{name}"\n')
    return name


def resolved_of(done: Done) -> dict[str, Any]:
    """The settings in a script that was printed, keys with their defaults too."""
    assert done.code == 0, done.stderr
    document = done.stdout.split("<<'HPC_GPT_RESOLVED'", 1)[1].split("\n", 1)[1]
    text = document.split("\nHPC_GPT_RESOLVED\n", 1)[0]
    resolved = Resolved.from_json(text)
    whole = {name: asdict(getattr(resolved, name)) for name in ("data", "engine", "train", "job")}
    return json.loads(text) | json.loads(json.dumps(whole))


def planned(*arguments: object) -> dict[str, Any]:
    """What `plan ARGUMENTS --json` prints."""
    done = in_process("plan", *arguments, "--json", code=0)
    return json.loads(done.stdout)
