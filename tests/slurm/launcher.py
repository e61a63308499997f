"""The command under test on a test cluster, and how a test watches, pauses and reads the runs it makes."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hpc_gpt.core.ends.failures import LIVE
from hpc_gpt.core.ends.state import slurm_state
from hpc_gpt.core.files import read_json_lines
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder, job_ids
from tests.cli.command import Done, in_process
from tests.processes import children_of, command_of, name_of, send, started_with, state_of
from tests.programs import put
from tests.slurm.cluster import Cluster
from tests.waiting import LIMIT_S, patient, wait_for

T = TypeVar("T")
REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = [sys.executable, "-m", "hpc_gpt"]
# What runs imports it at its start: a rank pauses where a test has named a step, and one without end makes way.
PAUSING = Path(__file__).parent / "pausing"

# Node names do not resolve here, and gloo looks up the host's own name.
PROFILE = """
gpus_per_node = 2
cpus_per_node = 4
time = "01:00:00"
exclusive = true
signal_lead_s = 5

[environment]
HPC_GPT_MASTER_ADDR = "127.0.0.1"
GLOO_SOCKET_IFNAME = "lo"
OMP_NUM_THREADS = "1"
"""


def is_under_way(state: str) -> bool:
    """Whether Slurm's state of a job is not its last: SIGNALING, too, while a signal is on its way to the nodes."""
    return slurm_state(state) in LIVE


STEPS = 24
# One rank, where more would show no more: it costs a ninth of four ranks of DeepSpeed. And two ranks on two nodes.
SINGLE = ("--engine", "ddp", "--gpus", "1", "--tp", "1", "--pp", "1")
PAIR = ("--engine", "ddp", "--gpus", "2", "--nodes", "2", "--tp", "1", "--pp", "1")
ENDLESS = ("--set", f"train.steps={10**6}")
UNSAVED = ("--set", "train.save_every=0")
# A checkpoint is complete before the next step begins: one that is killed, or paused, after it has it.
SAVED = ("--set", "train.save_in_background=false")
# For a controller that will not answer, however long one waits.
AWAY = {"HPC_GPT_SLURM_S": "1"}
# In the queue until it is released.
HELD = ("--set", 'job.sbatch=["--begin=now+1hour"]')

# A model that trains its steps at once, on the tokens that a launcher makes.
TINY = """
model = {{ hidden = 32, layers = 4, heads = 4, vocab = 256, seq = 32 }}
data = {{ source = "tokens", path = "{tokens}" }}
"""
EXPERIMENT = (
    f'name = "tiny"{TINY}'
    + """
layout = {{ gpus = 4, tp = 2, pp = 2, micro_batch = 2, micro_batches = 4 }}
train = {{ steps = {steps}, dtype = "fp32", lr = 1e-3, warmup_steps = 4, log_every = 1, save_every = 10 }}
"""
)


# A squeue that is silent until a file is there, and an sbatch that answers then: Slurm has the job before.
SILENT_SQUEUE = """#!/bin/bash
[ -e {answers} ] && exec {squeue} "$@"
echo "slurm_load_jobs error: Socket timed out on send/recv operation" >&2
exit 1
"""
SLOW_SBATCH = """#!/bin/bash
case " $* " in *" --test-only "* | *" --version "*) exec {sbatch} "$@" ;; esac
said=$({sbatch} "$@")
touch {accepted}
until [ -e {answers} ]; do sleep 0.1; done
echo "$said"
"""


def client_in(folder: Path, name: str, text: str) -> dict[str, str]:
    """The environment in which a client of Slurm is this script, whose files are in the folder."""
    files = {"answers": folder / "answers", "accepted": folder / "accepted", name: shutil.which(name)}
    put(folder / "bin" / name, text.format(**files))
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


class Launcher:
    """`hpc-gpt` with its own config, data and logs folders, talking to one cluster.

    `within`: verbs run within this process, which is for clusters without stories: those have threads of their own.
    """

    def __init__(self, cluster: Cluster, folder: Path, within: bool = False) -> None:
        self.cluster = cluster
        self.within = within
        self.folder = folder
        self.logs = folder / "logs"
        self.numbers = itertools.count()
        self.experiment = folder / "tiny.toml"
        (folder / "config" / "clusters").mkdir(parents=True)
        (folder / "config" / "clusters" / "site.toml").write_text(PROFILE)
        self._make_tokens(folder / "some.tokens")
        self.experiment.write_text(EXPERIMENT.format(tokens=folder / "some.tokens", steps=STEPS))
        own = {name: text for name, text in cluster.environment.items() if not name.startswith("HPC_GPT_")}
        self.environment = own | {
            "HPC_GPT_CONFIG": str(folder / "config"),
            "HPC_GPT_STATE": str(folder / "state"),
            "HPC_GPT_LOGS": str(self.logs),
            "HPC_GPT_DATA": str(folder / "data"),
            "HPC_GPT_CLUSTER": "site",
            "HPC_GPT_EXPERIMENT": str(self.experiment),
            "HPC_GPT_SLURM_S": f"{patient(60):.0f}",  # a busy controller answers late
            "PYTHONPATH": f"{REPOSITORY}:{PAUSING}",
        }

    def _make_tokens(self, path: Path) -> None:
        from hpc_gpt.trainer.tokens.build import build_tokens

        (source := path.with_suffix(".txt")).write_text(Path(os.__file__).read_text(encoding="utf-8"), encoding="utf-8")
        build_tokens(source, path)

    def run(self, *arguments: str, code: int = 0, cwd: Path | None = None, **more: str) -> tuple[str, str]:
        """(stdout, stderr) of `hpc-gpt ARGUMENTS`, which must exit with `code`. `more` are environment variables."""
        own, folder = self.environment | more, cwd or self.folder
        done = (in_process if self.within else started)(*arguments, environment=own, cwd=folder)
        assert done.code == code, f"{arguments}: exit {done.code}\n{done.stdout}\n{done.stderr}"
        return done.stdout, done.stderr

    def submit(self, *arguments: str, cwd: Path | None = None, **more: str) -> Job:
        """Submits and gives the job. It has its own list of bad nodes: one that another story kills is none of its."""
        more = {"HPC_GPT_STATE": str(self.folder / "states" / str(next(self.numbers)))} | more
        said, noted = self.run("submit", *arguments, code=0, cwd=cwd, **more)
        found = re.search(r"submitted (\S+) as job (\d+)", said)
        assert found, said
        folders = list(Path(more.get("HPC_GPT_LOGS", str(self.logs))).glob(f"*/{found[1]}"))
        assert len(folders) == 1, folders
        return Job(self.cluster, RunFolder(folders[0]), found[2], noted)

    def profile(self, name: str, top: str = "", site: str = PROFILE) -> str:
        """Writes a profile of its own name, and gives the name."""
        (self.folder / "config" / "clusters" / f"{name}.toml").write_text(top + site)
        return name

    def place(self, name: str) -> Path:
        """A folder of one story's own."""
        (path := self.folder / name).mkdir()
        return path

    def start(self, *arguments: str, until: str, **more: str) -> tuple[subprocess.Popen[str], str, re.Match[str]]:
        """`hpc-gpt ARGUMENTS` in the background, in a process group of its own as a shell would have it.

        Gives the process, what it has said, and what the last line of that has of `until`.
        """
        process = subprocess.Popen(
            [*PYTHON, *arguments],
            env={**self.environment, **more},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        said, found = "", None
        while found is None:  # what is predicted, or why nothing is, may be said first
            line = process.stdout.readline()
            said += line
            found = re.search(until, line)
            assert found or line, said
        return process, said, found

    def commands(self) -> list[int]:
        """Pids of the commands on this cluster that this process has started and that still run."""
        mine = set(children_of(os.getpid())) & set(started_with(SLURM_CONF=str(self.cluster.conf)))
        return [pid for pid in mine if not name_of(pid).startswith("slurm")]

    def job_of(self, run: RunFolder) -> Job:
        """The last job of a run."""
        return Job(self.cluster, run, job_ids(run)[-1])

    def state(self, job: Job) -> str:
        """What `hpc-gpt status` says of the run."""
        found = json.loads(self.run("status", str(job.run.path), "--json")[0])
        (row,) = found["runs"]
        return str(row["state"])


def started(*arguments: str, environment: dict[str, str], cwd: Path) -> Done:
    """`hpc-gpt ARGUMENTS` as a process."""
    done = subprocess.run(
        [*PYTHON, *arguments], env=environment, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


class Job:
    """One run's job on a cluster."""

    def __init__(self, cluster: Cluster, run: RunFolder, job_id: str, noted: str = "") -> None:
        """`noted` is what submit wrote to stderr."""
        self.cluster = cluster
        self.noted = noted
        self.run = run
        self.id = job_id

    def shown(self) -> dict[str, str]:
        """`scontrol show job`, the first of each key."""
        text = self.cluster.run("scontrol", "--oneliner", "show", "job", self.id).stdout
        fields: dict[str, str] = {}
        for key, value in re.findall(r"(\w+)=(\S*)", text):
            fields.setdefault(key, value)
        return fields

    @property
    def slurm_state(self) -> str:
        return self.shown().get("JobState", "unknown")

    @property
    def is_over(self) -> bool:
        return not is_under_way(self.slurm_state)

    @property
    def restarts(self) -> int:
        return int(self.shown()["Restarts"])

    def nodes(self) -> list[str]:
        """The nodes of the last attempt, the batch host first."""
        listed = self.run.attempts()[-1].started()["node_list"]
        return self.cluster.run("scontrol", "show", "hostnames", listed).stdout.split()

    def log(self) -> str:
        """All that the run's attempts have said."""
        return "\n".join(a.log.read_text(errors="replace") for a in self.run.attempts() if a.log.exists())

    def wait(self, what: str, ready: Callable[[], T]) -> T:
        """The first true value of `ready`; fails with everything known about the job, or as soon as the tests end."""

        def state() -> T:
            assert not self.cluster.ending.is_set(), f"job {self.id}: the tests end before {what}"
            return ready()

        def known() -> str:
            return f"{self.shown()}\n{self.cluster.run('sinfo', '--list-reasons').stdout}\n{self.log()}"

        # Where several nodes die at once, Slurm takes minutes to see it, and to end what ran on their neighbours.
        return wait_for(f"job {self.id}: {what}", state, known, 2 * LIMIT_S)

    def wait_end(self, *states: str) -> None:
        """Waits until Slurm shows one of `states`, COMPLETED if none is given."""
        wanted = states or ("COMPLETED",)
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        self.wait(f"{wanted}", lambda: self.slurm_state in (*wanted, *ended))
        assert self.slurm_state in wanted, f"{self.slurm_state}\n{self.log()}"

    def wait_step(self, step: int, attempt: int = 1) -> None:
        """Waits until the attempt has done `step`."""
        self.wait(f"step {step} of attempt {attempt}", lambda: self.last_step(attempt) >= step)

    def last_step(self, attempt: int) -> int:
        return max(self.metrics(attempt), default=0)

    def metrics(self, attempt: int) -> dict[int, float]:
        """Step -> loss of one attempt."""
        return {line["step"]: line["loss"] for line in read_json_lines(self.run.attempt(attempt).metrics)}

    def ranks(self) -> list[int]:
        """Pids of the run's ranks on this machine, whichever of its jobs they belong to."""
        ours = started_with("hpc_gpt.", HPC_GPT_RUN=str(self.run.path), SLURM_CONF=str(self.cluster.conf))
        return [pid for pid in ours if command_of(pid)[1:3] == ["-m", "hpc_gpt.trainer"]]

    def start_soon(self) -> None:
        """Lets a requeued job start before its time, unless it has, but not at once: a node refuses a job that starts
        in the second in which it ended ("Job credential revoked"), and Slurm 22.05 then counts the job as failed."""
        self.cluster.run("scontrol", "update", f"jobid={self.id}", "StartTime=now+2")

    def preempt(self) -> str:
        """Submits a job of higher priority for its nodes; gives that one's id."""
        nodes = self.nodes()
        asked = ("-p", "high", "-w", ",".join(nodes), f"-N{len(nodes)}", "--gres=gpu:4", "-o", "/dev/null")
        return self.cluster.run("sbatch", "--parsable", *asked, "--wrap", "sleep 1", check=True).stdout.strip()

    def wait_paused(self, attempt: int = 1) -> None:
        """Waits until the attempt has stopped itself, as `paused` had it: nothing happens, and no time is taken."""
        self.wait(
            f"the pause of attempt {attempt}",
            lambda: self.last_step(attempt) > 0 and any(state_of(pid) in "Tt" for pid in self.ranks()),
        )

    def resume(self) -> None:
        """Lets paused ranks go on."""
        for pid in self.ranks():
            send(pid, signal.SIGCONT)

    def hears(self, number: signal.Signals) -> None:
        """Waits until a signal has reached the paused run, or has ended it, and lets the run go on."""
        attempt = self.run.attempts()[-1]
        self.wait(f"{number.name}", lambda: attempt.ended() or any_has_pending(self.ranks(), number))
        self.resume()

    def wait_checkpoint(self) -> None:
        """Waits until there is one."""
        self.wait("a checkpoint", lambda: list(self.run.checkpoints.glob("step-*/complete.json")))

    def ended(self) -> list[str]:
        """How each attempt has ended."""
        return [settled_class(attempt) for attempt in self.run.attempts()]

    def losses(self) -> dict[int, float]:
        """Step -> loss over all attempts. A step that was done twice must have had the same loss."""
        merged: dict[int, float] = {}
        for attempt in self.run.attempts():
            for step, loss in self.metrics(attempt.number).items():
                assert merged.setdefault(step, loss) == loss, f"step {step} differs between attempts"
        return merged

    def history(self) -> list[str]:
        """The state of each start of the job in Slurm's accounting."""
        return self.cluster.run("sacct", "-D", "-X", "-n", "-P", "-o", "State", "-j", self.id).stdout.split()

    def near_its_limit(self) -> None:
        """Brings the time limit so near that Slurm signals the job within half a minute, and leaves time to save.

        For jobs of `LONG_LEAD`. Slurm looks at time limits every 30 s and signals what is due before the next look.
        """
        self.cluster.run("scontrol", "update", f"jobid={self.id}", f"EndTime=now+{_LEAD_S + 15}", check=True)

    def far_from_its_limit(self) -> None:
        """Gives the job its time back, now or when it starts again."""
        self.cluster.run("scontrol", "update", f"jobid={self.id}", "TimeLimit=60", check=True)


def settled_class(attempt: Attempt) -> str:
    """How an attempt ended by the judge's word, which knows more than a rank's or the script's; else by that."""
    return str(attempt.verdict().get("attempt_ended") or attempt.ended().get("ended"))


_LEAD_S = int(patient(240))
LONG_LEAD = ("--set", f"job.signal_lead_s={_LEAD_S}", "--time", "1:00:00")


def paused(*steps: int) -> dict[str, str]:
    """Environment of a submission whose attempts stop themselves, each after its step."""
    return {"PAUSE_AFTER": " ".join(map(str, steps))}


def any_has_pending(pids: list[int], number: signal.Signals) -> bool:
    """Whether a signal waits for one of these processes, stopped as they are."""
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        masks = re.findall(r"^(?:ShdPnd|SigPnd):\s*(\w+)", status, re.MULTILINE)
        if any(int(mask, 16) >> (number - 1) & 1 for mask in masks):
            return True
    return False
