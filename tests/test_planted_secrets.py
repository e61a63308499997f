"""No secret of the environment reaches a file or a word of ours; what a run writes keeps the user's umask."""

import contextlib
import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.sweep import make_stand_ins
from hpc_gpt.core.runs.code_archive import CODE_ARCHIVE, read_code
from tests.cli.command import in_process
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.xdist_group("planted-secrets")

# Made up; each has a part that nothing else has.
PLANTED = {
    "HF_TOKEN": "hf_plantedQx7Zk1",
    "WANDB_API_KEY": "plantedQx7Zk2aaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "AWS_SECRET_ACCESS_KEY": "wJalr/plantedQx7Zk3",
    "HTTPS_PROXY": "http://someone:plantedQx7Zk4@proxy.example:3128",
    "DEPLOY_KEY": "-----BEGIN OPENSSH PRIVATE KEY-----\nplantedQx7Zk5\n-----END OPENSSH PRIVATE KEY-----",
}
MARK = "plantedQx7Zk"
SMALL = ("demo", "--gpus", "1", "--tp", "1", "--pp", "1", "--set", "data.source=random", "--set", "train.steps=2")
SWEEP = "rows.toml"


class Session:
    """Commands with planted secrets, a cluster that takes every job, and all that they say."""

    def __init__(self, folder: Path, mask: int) -> None:
        self.folder, self.said, self.mask = folder, "", mask
        make_stand_ins(folder / "bin")
        own = {f"HPC_GPT_{key}": str(folder / key.lower()) for key in ("LOGS", "CONFIG", "STATE", "DATA")}
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        self.environment = {**os.environ, **PLANTED, **own, "PATH": path, "PYTHONPATH": str(REPOSITORY)}
        self.environment["OMP_NUM_THREADS"] = "1"
        (folder / SWEEP).write_text(
            'extends = "demo"\nname = "rows"\n[rows]\n"a" = { train.seed = 1 }\n"b" = { train.seed = 2 }\n'
        )

    def run(self, *words: object, own_process: bool = False) -> None:
        if own_process:
            done: Any = subprocess.run(
                [sys.executable, "-m", "hpc_gpt", *map(str, words)],
                cwd=self.folder,
                env=self.environment,
                capture_output=True,
                text=True,
                umask=self.mask,
                check=False,
            )
        else:
            before = os.umask(self.mask)
            try:
                done = in_process(*words, cwd=self.folder, environment=self.environment)
            finally:
                os.umask(before)
        assert "Traceback" not in done.stderr, done.stderr
        self.said += done.stdout + done.stderr


@pytest.fixture(
    scope="module",
    params=[pytest.param(0o027, marks=pytest.mark.long(launch="umask 027")), 0o077],
    ids=["umask 027", "umask 077"],
)
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Session:
    """One run here to its end, one in a queue, a sweep, and every verb that tells of them."""
    made = Session(tmp_path_factory.mktemp("planted"), request.param)
    made.run("submit", *SMALL, "--cluster", "local", "--wait", own_process=True)
    (here,) = (made.folder / "logs" / "demo").iterdir()
    made.run("submit", *SMALL, "--cluster", "generic-slurm")
    made.run("submit", "--sweep", SWEEP, *SMALL[1:], "--cluster", "generic-slurm")
    made.run("status", "--open")
    made.run("why", here, "--json")
    made.run("report", "logs", "--json")
    made.run("report", "logs", "--html", "page.html")
    made.run("doctor", "--json")
    return made


def test_no_planted_secret_is_written_or_said(session: Session) -> None:
    files = [path for path in session.folder.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    wanted = {
        "job.sh",
        "array.sh",
        "provenance.json",
        "resolved.json",
        "record.json",
        "metrics.jsonl",
        "log",
        CODE_ARCHIVE,
    }
    assert wanted <= names, wanted - names
    assert not [path for path in files if MARK.encode() in path.read_bytes()]
    assert MARK not in session.said


def test_every_file_and_folder_of_a_run_keeps_the_umask(session: Session) -> None:
    logs = session.folder / "logs"
    wide = [path for path in (logs, *logs.rglob("*")) if not path.is_symlink() and path.stat().st_mode & session.mask]
    assert not wide


IN_ENVIRONMENT = "plantedZz8"
SECRET = "plantedZz7"  # of no format that is known: by its name alone
URL = f"https://me:{SECRET}@host.example/x"
SCRIPT = "#!/bin/bash\n#SBATCH --nodes=1 --time=5\n"
PROGRAM = '[engine]\nname = "command"\n[command]\nworkdir = "mine"\n'
RUN = PROGRAM + 'run = "python train.py"\n'
LINES = (  # that a program prints, the last one as it fails
    f"HF_TOKEN={SECRET}", f'{{"api_key": "{SECRET}", "lr": 1}}', f'{{\\"api_key\\": \\"{SECRET}\\"}}',
    f"X-API-Key: {SECRET}",
    f"Authorization: Basic {SECRET}", f"pulling from {URL}", f"cmd = ['python', '--api-key', '{SECRET}', '--lr', '1']",
    f"Namespace(hub_token='{SECRET} {SECRET}', lr=1)", f'login with --password "{SECRET} {SECRET}"',
    f"step 1/2 loss 2.0 hub_token: {SECRET}", f"RuntimeError: 401 for {URL}&api_key={SECRET}",
)  # fmt: skip


class Place(NamedTuple):
    """Where a user may say a secret: the words after `submit`, the files, variables, and whether that is refused."""

    words: tuple[str, ...]
    files: dict[str, str] = {}
    variables: dict[str, str] = {}
    is_refused: bool = False


def of_script(*words: str, text: str = "", before: tuple[str, ...] = (), **variables: str) -> Place:
    return Place((*before, "job.sh", *words), {"job.sh": SCRIPT + text}, variables)


def of_program(more: str, head: str = RUN, refused: bool = True, *words: str) -> Place:
    return Place(("mine.toml", *words), {"mine.toml": head + more}, is_refused=refused)


def of_profile(text: str) -> Place:
    return Place(("mine.toml",), {"mine.toml": RUN, "site.toml": f"gpus_per_node = 1\n{text}\n"}, is_refused=True)


PLACES = {
    "a script's arguments, two words": of_script("--api-key", SECRET),
    "a script's arguments, one word": of_script(f"--api-key={SECRET}"),
    "a script's arguments, a variable": of_script(f"HF_TOKEN={SECRET} x;y"),
    "--export=": of_script(before=(f"--export=ALL,WANDB_API_KEY={SECRET}",)),
    "--export, two words": of_script(before=("--export", f"WANDB_API_KEY={SECRET},LR=1")),
    "--export with quotes": of_script(before=(f"--export=ALL,PASSWORD='{SECRET},{SECRET}',LR=1",)),
    "--comment": of_script(before=(f"--comment=token={SECRET}",)),
    "SBATCH_EXPORT": of_script(SBATCH_EXPORT=f"ALL,WANDB_API_KEY={SECRET}"),
    "SBATCH_COMMENT": of_script(SBATCH_COMMENT=f"token={SECRET}"),
    "a directive --export": of_script(text=f"#SBATCH --export=ALL,HF_TOKEN={SECRET}\n"),
    "a directive --comment": of_script(text=f"#SBATCH --comment='password {SECRET}'\n"),
    "a line of a script": of_script(text=f"export HF_TOKEN={SECRET}\n"),
    "command.args": of_program(
        f'[command]\nscript = "job.sh"\nargs = ["--api-key", "{SECRET}"]\n', '[engine]\nname = "command"\n'
    ),
    "command.run": of_program(f'run = "python train.py --api-key {SECRET}"\n', PROGRAM),
    "command.run, quoted": of_program(f"run = \"python train.py --password '{SECRET}'\"\n", PROGRAM),
    "command.run, a list": of_program(f'run = ["python", "train.py", "--api-key", "{SECRET}"]\n', PROGRAM),
    "command.run, a header": of_program(f"run = \"curl -H 'Authorization: Basic {SECRET}' x\"\n", PROGRAM),
    "a place that only its program knows": of_program(f'run = "wandb login {SECRET} && x"\n', PROGRAM),
    "the same in a script's arguments": of_script("curl", "-u", f"me:{SECRET}"),
    "the profile's setup": of_profile(f'setup = ["docker login -u me -p {SECRET} host.example"]'),
    "command.setup": of_program(f'setup = ["export HF_TOKEN={SECRET}"]\n'),
    "command.values": of_program(f'[command.values]\napi_key = "{SECRET}"\n', PROGRAM + 'run = "x {api_key}"\n'),
    "command.values of a neutral name": of_program(
        f'[command.values]\nk = "{SECRET}"\n', PROGRAM + 'run = "x --api-key {k}"\n'),
    "command.resume": of_program(f'checkpoints = "c-*"\nresume = "--hub_token {SECRET}"\n'),
    "extends": Place(
        ("child.toml",),
        {"child.toml": 'extends = "mine.toml"\n', "mine.toml": PROGRAM + f'run = "x --api-key {SECRET}"\n'},
        is_refused=True,
    ),
    "a row": of_program(
        f'[rows]\n"a" = {{ command.run = "x --api-key {SECRET}" }}\n"b" = {{ train.steps = 2 }}\n',
        RUN, True, "--row", "b",
    ),
    "a comment of the experiment": of_program(f"# token: {SECRET}\n", RUN, False),
    "notify.command": of_program(f"[notify]\ncommand = \"curl -H 'X-API-Key: {SECRET}' x\"\n"),
    "notify.command, a list": of_program(f'[notify]\ncommand = ["send", "--token", "{SECRET}"]\n'),
    "track.wandb": of_program(f'[track]\nwandb = "{URL}"\n', 'extends = "demo"\n'),
    "track.mlflow": of_program(f'[track]\nmlflow = "{URL}"\n', 'extends = "demo"\n'),
    "job.sbatch": of_program(f'[job]\nsbatch = ["--comment=token={SECRET}"]\n'),
    "--set": of_program("", RUN, True, "--set", f"command.run=x --api-key {SECRET}"),
    "the profile's environment": of_profile(f'[environment]\nHF_TOKEN = "{SECRET}"'),
    "the profile's sbatch": of_profile(f'sbatch = ["--comment=token={SECRET}"]'),
    "the profile's image": of_profile(f'[container]\nimage = "docker://me:{SECRET}@host.example/x"'),
    "the profile's modules": of_profile(f'modules = ["{URL}"]'),
    ".env in its folder": Place(("mine.toml",), {"mine.toml": RUN, "mine/.env": f"HF_TOKEN={SECRET}\n"}),
    "a remote of its git": Place(
        ("mine.toml",), {"mine.toml": RUN, "mine/.git/config": f'[remote "o"]\nurl = {URL}\n'}
    ),
}  # fmt: skip


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a program and a profile, and a cluster that takes every job."""
    make_stand_ins(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (folder := tmp_path / "given").mkdir()
    (folder / "mine").mkdir()
    (folder / "mine" / "train.py").write_text("print()\n")
    (folder / "job.sh").write_text(SCRIPT)
    (folder / "site.toml").write_text("gpus_per_node = 1\n")
    monkeypatch.chdir(folder)
    return tmp_path


def holding(folder: Path) -> set[str]:
    """The files of ours with the secret, archives opened; a job.sh that only its owner can read is not one, as it holds
    a script of the user's own."""
    found = set()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and (folder / "given") not in path.parents:
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            if path.name == CODE_ARCHIVE:
                data = b"".join(read_code(path.parent).values())
            is_script = path.name == "job.sh" and not path.stat().st_mode & 0o077
            if SECRET.encode() in data and not is_script:
                found.add(path.name)
    return found


@pytest.mark.parametrize("name", PLACES)
def test_a_secret_of_a_user_is_refused_or_kept_nowhere(planted: Path, name: str, monkeypatch) -> None:
    place = PLACES[name]
    for file, text in place.files.items():
        (planted / "given" / file).parent.mkdir(parents=True, exist_ok=True)
        (planted / "given" / file).write_text(text)
    for variable, value in place.variables.items():
        monkeypatch.setenv(variable, value)
    said = ""
    for words in (("--dry-run",), ("--json",)):
        done = in_process("submit", *words, "--cluster", "site.toml", *place.words)
        assert done.code == (2 if place.is_refused else 0), done.stderr
        said += done.stdout + done.stderr
    runs = list((planted / "logs").glob("*/*/resolved.json"))
    assert bool(runs) != place.is_refused
    if runs:
        assert (runs[0].parent / "submissions.jsonl").exists()
        for verb in ("status", "why", "report"):
            done = in_process(verb, runs[0].parent, "--json")
            said += done.stdout + done.stderr
    assert SECRET not in said
    assert holding(planted) == set()


def test_a_secret_that_a_program_prints_is_in_its_log_alone(planted: Path) -> None:
    (planted / "given" / "mine" / "train.py").write_text(
        f"import sys\nfor line in {LINES[:-1]!r}:\n    print(line, flush=True)\nsys.exit({LINES[-1]!r})\n"
    )
    (planted / "given" / "mine.toml").write_text(RUN + "[job]\nretry_pause_s = 1\n")
    words = [sys.executable, "-m", "hpc_gpt", "submit", "mine.toml", "--cluster", "local", "--gpus", "1", "--wait"]
    environment = {**os.environ, "WANDB_API_KEY": IN_ENVIRONMENT}
    with (planted / "said").open("w") as out, subprocess.Popen(words, stdout=out, stderr=out, env=environment) as job:
        while job.poll() is None:  # everybody on a machine can read an argument list
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    assert IN_ENVIRONMENT.encode() not in path.read_bytes()
            time.sleep(0.02)
    (run,) = [path.parent for path in (planted / "logs").glob("*/*/resolved.json")]
    said = (planted / "said").read_text()
    for verb in (
        ("status",), ("status", "--json"), ("why", run), ("why", run, "--json"), ("report", run),
        ("report", run, "--json", "--html", planted / "page.html"), ("report", run, "--format", "csv"),
        ("report", run, "--format", "md"), ("compare", run, run),
    ):  # fmt: skip
        shown = in_process(*verb)
        said += shown.stdout + shown.stderr
    assert json.loads((run / "record.json").read_text())["cause"]
    assert SECRET not in said
    assert SECRET in (run / "attempts" / "1" / "log").read_text()
    assert holding(planted) <= {"log", "work.tar.gz", "train.py"}
    modes = {name: (run / name).stat().st_mode & 0o777 for name in ("job.sh", "resolved.json", "experiment.toml")}
    assert set(modes.values()) == {0o600}, "they hold the command line"
    assert (run / "provenance.json").stat().st_mode & 0o777 == 0o666 & ~os.umask(os.umask(0o22))
