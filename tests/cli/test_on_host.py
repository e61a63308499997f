"""`hpc-gpt --host NAME VERB …`: with sshd on this machine, another HOME, another folder and another Python there."""

import contextlib
import json
import os
import pty
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_gpt import __version__
from hpc_gpt.cli.on_host import check_file
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.files import logs_dir
from hpc_gpt.launcher.watch.clean import remove_sent
from tests.conftest import REPOSITORY
from tests.made_runs import make_run
from tests.processes import children_of
from tests.waiting import LIMIT_S, wait_for


def needs(program: str, package: str):
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"needs {program} of Debian's {package}")


def needs_shell(name: str):
    return pytest.param(name, marks=[needs(name, name), pytest.mark.long])


pytestmark = [pytest.mark.xdist_group("on_host"), needs("sshd", "openssh-server"), needs("ssh", "openssh-client")]
PROGRAM = (sys.executable, "-m", "hpc_gpt")


class Login:
    """Two machines in one: `here`, the laptop's folder, and `home`, the home folder on the host `login`.

    The shell there is what the file `shell` names, and the file `rc` is what it reads first.
    """

    def __init__(self, folder: Path, config: Path) -> None:
        self.here, self.home, self.config = folder / "laptop", folder / "home", config
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("HPC_GPT_LOGS")}
        self.environment |= {"PATH": f"{self.here}/bin:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
        self.environment["HPC_GPT_LOGS"] = str(self.here / "logs")
        self.logs = self.home / "logs"

    def words(self, *words: str) -> list[str]:
        return [*PROGRAM, "--host", "login", *words]

    def run(self, *words: str, code: int | None = 0, given: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        environment = self.environment | more
        done = subprocess.run(
            self.words(*words), cwd=self.here, env=environment, input=given, capture_output=True, text=True, check=False
        )
        assert code in (None, done.returncode), (done.stdout, done.stderr)
        return done

    def start(self, *words: str, **more: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.words(*words), cwd=self.here, env=self.environment, stdout=subprocess.PIPE, text=True, **more
        )


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Login]:
    folder = Path("/tmp") / f"on-host-{os.getpid()}"  # a socket's path is short
    folder.mkdir()
    login = Login(folder, folder / "config")
    for path in (login.here / "bin", login.home / "bin", login.config):
        path.mkdir(parents=True)
    # Another Python: an environment of its own, which finds the packages of this one.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", login.home / "venv"], check=True)
    python = login.home / "venv" / "bin" / "python"
    packages = sysconfig.get_paths(vars={"base": str(login.home / "venv")})["purelib"]
    (Path(packages) / "here.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{REPOSITORY}\n")
    (login.home / "bin" / "hpc-gpt").write_text(f'#!/bin/sh\nexec {python} -m hpc_gpt "$@"\n')
    (login.home / "login").write_text(
        f'#!/bin/sh\ncd\n. {login.home}/rc\nSHELL=$(command -v "$(cat {login.home}/shell)")\nexport SHELL\n'
        '[ "$SSH_ORIGINAL_COMMAND" ] || exec "$SHELL" -l\nexec "$SHELL" -c "$SSH_ORIGINAL_COMMAND"\n'
    )
    for program in (login.home / "bin" / "hpc-gpt", login.home / "login"):
        program.chmod(0o755)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"HOME": login.home, "PATH": f"{login.home}/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    options = {"Port": port, "ListenAddress": "127.0.0.1", "HostKey": folder / "host", "PidFile": "none",
               "AuthorizedKeysFile": folder / "user.pub", "StrictModes": "no", "UsePAM": "no", "PrintMotd": "no",
               "ForceCommand": login.home / "login", "Banner": folder / "banner",
               "SetEnv": " ".join(f"{name}={value}" for name, value in own.items())}  # fmt: skip
    (folder / "banner").write_text("Authorized use only\n")
    (folder / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    daemon = subprocess.Popen(
        [shutil.which("sshd"), "-D", "-e", "-f", folder / "sshd_config"], stderr=(folder / "said").open("w")
    )
    config = f"Host login\nHostName 127.0.0.1\nPort {port}\nIdentityFile {folder / 'user'}\n"
    config += "StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nIdentitiesOnly yes\n"
    config += "Host gone\nHostName 127.0.0.1\nPort 1\n"
    (folder / "ssh_config").write_text(config)
    (login.here / "bin" / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder}/ssh_config "$@"\n')
    (login.here / "bin" / "ssh").chmod(0o755)
    wait_for("sshd", lambda: daemon.poll() is not None or socket.socket().connect_ex(("127.0.0.1", port)) == 0)
    assert daemon.poll() is None, (folder / "said").read_text()
    yield login
    for state in ("my state", "new"):
        for path in (login.here / state / "ssh").glob("*"):
            subprocess.run(["ssh", "-O", "exit", "-S", path, "login"], capture_output=True, check=False)
    daemon.terminate()
    daemon.wait()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def login(machines: Login) -> Login:
    (machines.home / "shell").write_text("bash")
    (machines.home / "rc").write_text("")
    (machines.config / "config.toml").unlink(missing_ok=True)
    machines.environment["HPC_GPT_CONFIG"] = str(machines.config)
    machines.environment["HPC_GPT_STATE"] = str(machines.here / "my state")
    shutil.rmtree(machines.logs, ignore_errors=True)
    return machines


# In place of the program: it prints its words, and what it has of the user, and with `wait` tells of its signals.
STAND_IN = """#!{python}
import json, os, signal, sys
said = dict(words=sys.argv[4:], ttys=[os.isatty(fd) for fd in (0, 1, 2)], cwd=os.getcwd(), pid=os.getpid())
said |= dict(env={{name: os.environ.get(name) for name in ("NO_COLOR", "LANG", "TERM", "HPC_GPT_HOST")}})
def tell(number, frame):
    os.write(1, b"size %d %d\\n" % tuple(os.get_terminal_size(1)))
if "wait" in sys.argv:
    signal.signal(signal.SIGWINCH, tell)
    sys.path.insert(0, {repository!r})
    from hpc_gpt.cli.ssh import watch_connection
    watch_connection()
    try:
        print(json.dumps(said), flush=True)
        while True:
            signal.pause()
    except KeyboardInterrupt:
        print("interrupted there", flush=True)
        sys.exit(130)
print(json.dumps(said), flush=True)
print("to stderr", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture
def stand_in(login: Login) -> Login:
    path = login.home / "stand in"
    path.write_text(STAND_IN.format(python=sys.executable, repository=str(REPOSITORY)))
    path.chmod(0o755)
    login.config.joinpath("config.toml").write_text(f'[hosts.login]\npython = "{path}"\n')
    return login


ODD = [
    *(
        "",
        " ",
        "a b",
        "'",
        '"',
        "'\"'",
        "$HOME",
        "$(id)",
        "`id`",
        "\\",
        "\\\\n",
        "a\nb",
        "\n",
        "\t",
        "!",
        "!!",
        "a!b",
        "#",
    ),
    *("#x", "~", "~root", "~/x", "*", "?", "[a]", "{a,b}", "%d", "%", "&", "&&", "|", ";", ";;", "<x", ">x", "(", ")"),
    *("=", "a=b", "--x=$y", "^a^b", "äöü €", "🦊", "\u2028", "-", "--", "\x01", "\x7f", "\udcff", "\\'"),
    "a'b\"c$d`e\\f!g\nh",
]


@pytest.mark.parametrize("shell", ["bash", needs_shell("tcsh"), needs_shell("fish"), needs_shell("zsh")])
def test_odd_words_arrive_through_each_login_shell(stand_in: Login, shell: str) -> None:
    (stand_in.home / "shell").write_text(shell)
    drawn = random.Random(shell)
    alphabet = [chr(code) for code in range(1, 127)] + list("äß€🦊")
    words = ODD + ["".join(drawn.choices(alphabet, k=drawn.randrange(12))) for _ in range(40)]
    done = stand_in.run("why", *words, code=7, NO_COLOR="1", LANG="C.UTF-8", TERM="odd 'term")
    said = json.loads(done.stdout)
    assert said["words"] == ["why", *words]
    assert said["env"] == {"NO_COLOR": "1", "LANG": "C.UTF-8", "TERM": "odd 'term", "HPC_GPT_HOST": ""}
    assert said["ttys"] == [False, False, False]
    assert said["cwd"] == str(stand_in.home)
    assert done.stderr.splitlines()[-1] == "to stderr"  # after the banner


def test_what_a_login_script_prints_is_not_the_answer(login: Login) -> None:
    (login.home / "rc").write_text("echo Welcome; echo to stderr >&2; sleep 1; printf 'no newline'\n")
    done = login.run("status", "--json", HPC_GPT_STATE=str(login.here / "new"))  # a connection of its own
    assert json.loads(done.stdout)["runs"] == []
    assert "Authorized use only" in done.stderr
    (login.home / "rc").write_text("")
    done = login.run("logs", "no such $HOME run", code=5)
    assert done.stdout == ""
    assert f"Error: no run 'no such $HOME run' under {login.logs}" in done.stderr


def on_terminal(login: Login, *words: str) -> tuple[int, int]:
    """(pid, terminal) of the program with a terminal of 30 lines of 91 columns."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(login.here)
        termios.tcsetwinsize(0, (30, 91))
        os.execvpe(PROGRAM[0], login.words(*words), login.environment | {"NO_COLOR": "1"})
    return pid, terminal


def read_until(terminal: int, text: bytes) -> bytes:
    said = b""
    while text not in said:
        ready, _, _ = select.select([terminal], [], [], LIMIT_S)
        assert ready, said
        try:
            said += os.read(terminal, 4096)
        except OSError:  # the program has ended
            raise AssertionError(said) from None
    return said


@pytest.mark.long(always=True)
def test_a_terminal_has_its_size_and_ctrl_c_goes_there(stand_in: Login) -> None:
    pid, terminal = on_terminal(stand_in, "top", "wait")
    assert b'"ttys": [true, true, true]' in read_until(terminal, b"}\r\n")
    termios.tcsetwinsize(terminal, (41, 123))
    read_until(terminal, b"size 123 41")
    os.write(terminal, b"\x03")
    said = read_until(terminal, b"interrupted there")
    with contextlib.suppress(OSError):  # the end
        while more := os.read(terminal, 4096):
            said += more
    assert b"closed" not in said  # what ssh says at the end of each session
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    os.close(terminal)


@pytest.mark.long(always=True)
def test_ctrl_c_and_a_laptop_that_is_gone_end_the_verb_there(stand_in: Login) -> None:
    process = stand_in.start("logs", "wait")
    assert json.loads(process.stdout.readline())["ttys"] == [False, False, False]
    process.send_signal(signal.SIGINT)
    assert process.communicate()[0] == "interrupted there\n"
    assert process.returncode == 130
    process = stand_in.start("logs", "wait")
    there = json.loads(process.stdout.readline())["pid"]
    process.kill()  # as if the laptop were gone
    wait_for("the end there", lambda: not Path(f"/proc/{there}").exists())


@pytest.mark.long(always=True)
def test_a_lost_connection_is_one_line_and_ends_the_verb_there(stand_in: Login) -> None:
    for terminal in (False, True):
        if terminal:
            pid, fd = on_terminal(stand_in, "top", "wait")
            said = json.loads(read_until(fd, b"}\r\n").splitlines()[-1])
        else:
            process = stand_in.start("logs", "wait", stderr=subprocess.PIPE)
            pid, said = process.pid, json.loads(process.stdout.readline())
        (ssh,) = children_of(pid)
        os.kill(ssh, signal.SIGKILL)
        wait_for("the end there", lambda there=said["pid"]: not Path(f"/proc/{there}").exists())
        line = "Error: the connection to login ended: what it has submitted there goes on"
        if terminal:
            assert line.encode() in read_until(fd, b"status shows it")
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        else:
            assert process.communicate()[1].startswith(line)
            code = process.returncode
        assert code == 4


@pytest.mark.long
def test_a_connection_that_fails_is_no_lost_one(login: Login) -> None:
    line = "Error: gone did not answer (exit code 255)"
    assert line in login.run("--host", "gone", "status", code=4).stderr
    pid, terminal = on_terminal(login, "--host", "gone", "status")
    assert line.encode() in read_until(terminal, b"hint: try: ssh gone true")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
    os.close(terminal)


@pytest.fixture
def experiment(login: Login) -> Path:
    """An experiment on the laptop, with the one that it extends, and a job script beside it."""
    (folder := login.here / "my work").mkdir(exist_ok=True)
    (folder / "parts").mkdir(exist_ok=True)
    (folder / "parts" / "base.toml").write_text('extends = "demo"\n[train]\nlog_every = 1\n')
    text = 'extends = "parts/base"\n[layout]\ngpus = 1\ntp = 1\npp = 1\nmicro_batches = 1\n[data]\nsource = "random"\n'
    (folder / "mine.toml").write_text(text)
    (folder / "train.slurm").write_text('#!/bin/bash\n#SBATCH -N 1 --gpus-per-node=4\nsrun python3 train.py "$@"\n')
    return folder / "mine.toml"


def sent(login: Login) -> set[str]:
    """The files that were sent, without the folder that is named after their content."""
    top = login.home / ".hpc-gpt" / "sent"
    return {str(path.relative_to(top)).partition("/")[2] for path in top.rglob("*") if path.is_file()}


@pytest.fixture
def nothing_sent(login: Login) -> Login:
    shutil.rmtree(login.home / ".hpc-gpt", ignore_errors=True)
    return login


def test_the_name_of_a_profile_goes_there_as_a_name(nothing_sent: Login, experiment: Path) -> None:
    login = nothing_sent
    (login.here / "generic-slurm").mkdir(exist_ok=True)
    (login.here / "generic-slurm" / "weights.safetensors").touch()
    assert login.run("render", "my work/mine", "--cluster", "generic-slurm").stdout.startswith("#!/bin/bash")
    assert sent(login) == {"mine.toml", "parts/base.toml"}
    (login.here / "site.toml").write_text('extends = "generic-slurm"\npartition = "big"\n')
    assert "#SBATCH --partition=big" in login.run("render", "my work/mine", "--cluster", "site.toml").stdout


def test_a_missing_ssh_is_one_line(login: Login) -> None:
    done = login.run("status", code=4, PATH="/nowhere")
    assert done.stderr == "Error: ssh is not installed, so login cannot be reached\n\nhint: install OpenSSH's client\n"


def test_an_experiment_goes_there_once_with_what_it_extends(nothing_sent: Login, experiment: Path) -> None:
    login = nothing_sent
    local = ("--cluster", "local")
    done = login.run("submit", "my work/mine.toml", *local, "--dry-run", "--json")
    assert json.loads(done.stdout)["dry_run"] is True
    assert "note: --cluster local is login itself" in done.stderr
    assert sent(login) == {"mine.toml", "parts/base.toml"}
    (folder,) = (login.home / ".hpc-gpt" / "sent").iterdir()
    began = (folder / "mine.toml").stat().st_ino
    done = login.run("render", "my work/mine", "--cluster=generic-slurm")
    assert done.stdout.startswith("#!/bin/bash")
    assert [path.stat().st_ino for path in folder.parent.glob("*/mine.toml")] == [began]
    own = REPOSITORY / "experiments" / "demo.toml"  # the host has it
    assert "demo" in login.run("render", str(own), "--cluster=generic-slurm").stdout
    script = login.run("render", "--cluster", "generic-slurm", "my work/train.slurm", "my work/mine.toml", code=None)
    assert sent(login) == {"mine.toml", "parts/base.toml", "train.slurm"}, script.stderr


@pytest.mark.long
def test_two_submissions_at_once_send_one_folder(nothing_sent: Login, experiment: Path) -> None:
    login = nothing_sent
    begun = [login.start("submit", str(experiment), "--cluster", "local", "--dry-run", "--json") for _ in range(2)]
    assert [json.loads(process.communicate()[0])["dry_run"] for process in begun] == [True, True]
    assert len(list((login.home / ".hpc-gpt" / "sent").iterdir())) == 1


@pytest.mark.long
def test_a_program_that_lacks_or_is_older_is_named_with_pip(login: Login) -> None:
    (login.config / "config.toml").write_text('[hosts.login]\npython = "/nowhere/python"\n')
    said = login.run("status", code=2).stderr.replace("Authorized use only\n", "")
    assert f"Error: there is no hpc-gpt on login, and this one is {__version__}\n" in said
    assert "hint: pip install 'hpc-gpt==" in said
    old = login.home / "old"
    answers = 'echo "hpc-gpt 0.3.1"; exit; }\necho "Error: No such option: $3" >&2; exit 2'
    old.write_text(f'#!/bin/sh\n[ "$3" != --version ] || {{ {answers}\n')
    old.chmod(0o755)
    (login.config / "config.toml").write_text(f'host = "login"\n[hosts.login]\npython = "{old}"\n')
    own = {name: login.environment[name] for name in login.environment}
    done = subprocess.run([*PROGRAM, "status"], cwd=login.here, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"Error: hpc-gpt on login is 0.3.1, and this one is {__version__}\n" in done.stderr
    for here in (["--host", "", "status"], ["--version"], ["completion", "bash"]):
        done = subprocess.run([*PROGRAM, *here], cwd=login.here, env=own, capture_output=True, text=True, check=False)
        assert (done.returncode, "0.3.1" in done.stderr) == (0, False)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (".env", "a credential"),
        ("id_ed25519", "a credential"),
        ("some.tokens", "data, weights or a checkpoint"),
        ("model.safetensors", "data, weights or a checkpoint"),
        ("large.txt", "larger than 10.00 MiB"),
        ("out", "a link that leads out of its folder"),
    ],
)
def test_what_is_never_copied_is_refused_with_the_reason(tmp_path: Path, name: str, why: str) -> None:
    (folder := tmp_path / "with").mkdir()
    if name == "out":
        (folder / name).symlink_to("/etc/hostname")
    else:
        (folder / name).write_bytes(b"x" * ((10 << 20) + 1 if name == "large.txt" else 1))
    with pytest.raises(ConfigError, match=f"{name} is not copied to the host: it is {why}"):
        check_file(folder / name, folder)
    (folder / "plain.py").write_text("x = 1\n")
    check_file(folder / "plain.py", folder)


@pytest.mark.long
def test_each_verb_of_the_readme_works_there(login: Login, experiment: Path) -> None:
    job = ("--set", "train.steps=3")
    done = login.run("submit", str(experiment), "--cluster", "local", *job, "--json", "--wait")
    run = json.loads(done.stdout)["runs"][0]["run"]
    assert (login.logs / "mine" / run / "record.json").is_file()
    assert run in login.run("status").stdout
    assert "done" in login.run("why", run).stdout
    assert "step 3/3" in login.run("logs", run).stdout
    assert "step 3/3" in login.run("logs", "-f", run).stdout
    assert run in login.run("top", run).stdout
    assert "tp1-pp1" in login.run("plan", "--model", "gpt2", "--gpus", "1", "--cluster", "jean-zay-v100-32g").stdout
    done = login.run("report", "logs/", "--html", "page.html")
    assert run in done.stdout
    assert "brought page.html from login" in done.stderr
    assert run in (login.here / "page.html").read_text()
    login.run("report", "--html", "./page.html")  # a page of ours is written again
    (login.here / "page.html").write_text("mine")
    assert "is not overwritten" in login.run("report", "--html=page.html", code=2).stderr
    assert list((login.home / ".hpc-gpt").glob("*.html")) == []
    login.run("init", "big", "--model", "llama3.1-8b", "--gpus", "64", "--cluster", "jean-zay-v100-32g")
    assert (login.home / "big.toml").is_file()
    assert "bad nodes of local" in login.run("doctor", "--cluster", "local").stdout
    raced = ("--race", "--dry-run", "--cluster", "local", "--grid", "engine.recompute=none,full")
    assert "race: 6 visits" in login.run("submit", "my work/mine", *raced).stderr
    (login.here / "logs").mkdir(exist_ok=True)
    (login.here / "only").mkdir(exist_ok=True)
    (login.here / "only" / "here.log").write_text("step 1 loss 2.0\n")
    refused = login.run("report", "only/here.log", code=2).stderr
    assert "Error: only/here.log is on this machine, and not on login" in refused
    assert "2.0" in login.run("report", "-", given="step 1 loss 2.0\nstep 2 loss 1.9\n", code=None).stdout


@pytest.mark.long
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_tab_completes_names_of_the_host(login: Login, shell: str) -> None:
    (login.home / "experiments").mkdir(exist_ok=True)
    (login.home / "only-there.toml").write_text('extends = "demo"\n')
    line = "hpc-gpt --host login submit only"
    words = {"COMP_WORDS": line, "COMP_LINE": line, "COMP_CWORD": "only" if shell == "fish" else "4"}
    if shell == "bash":  # which has this as three words
        words["COMP_WORDS"], words["COMP_LINE"] = line.replace("host ", "host = "), line.replace("host ", "host=")
    ask = login.environment | words | {"_HPC_GPT_COMPLETE": f"{shell}_complete"}
    done = subprocess.run(PROGRAM, cwd=login.here, env=ask, capture_output=True, text=True, check=False)
    assert "only-there" in done.stdout, done


@pytest.mark.long
def test_a_killed_ssh_ends_a_wait_and_leaves_the_run_alone(login: Login, experiment: Path) -> None:
    words = ("submit", str(experiment), "--cluster", "local", "--set", "train.steps=1000000", "--wait")
    process = login.start(*words, stderr=subprocess.PIPE)
    wait_for("an attempt", lambda: [*login.logs.glob("mine/*/attempts/1/attempt.json")] or process.poll() is not None)
    (run,) = [folder.name for folder in login.logs.glob("mine/*")]
    (ssh,) = children_of(process.pid)
    os.kill(ssh, signal.SIGKILL)
    assert "what it has submitted there goes on" in process.communicate()[1]
    assert process.returncode == 4
    assert "running" in login.run("status", run).stdout
    reader = login.start("logs", "-f", run)
    assert reader.stdout.readline()
    reader.stdout.close()
    assert reader.wait() == 0
    assert "saved after step" in login.run("save", run, "--wait").stdout
    login.run("stop", run, "--wait")
    assert "stopped" in login.run("status", run).stdout
    for verb in ("requeue", "cancel"):
        assert "ended as stopped" in login.run(verb, run, "--yes", code=1).stderr


def test_clean_removes_what_was_sent_and_no_run_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    now = time.time()
    for name, days in (("named", 40), ("old", 40), ("new", 20)):
        (folder := tmp_path / ".hpc-gpt" / "sent" / name).mkdir(parents=True)
        os.utime(folder, (now, now - days * 86400))
    run = make_run(logs_dir())
    (run.path / "provenance.json").write_text('{"experiment_file": "/home/me/.hpc-gpt/sent/named/mine.toml"}')
    remove_sent(logs_dir())
    assert sorted(path.name for path in (tmp_path / ".hpc-gpt" / "sent").iterdir()) == ["named", "new"]
