"""Real Slurm clusters of virtual nodes on this machine, as root: `python -m tests.slurm.cluster NAME`.

One slurmctld, one slurmd for each virtual node, pretend GPUs that are links to /dev/null. What each line
of the configuration is for was measured; see the comments.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tests.processes import all_pids, descendants, environment_of, name_of, send, state_of
from tests.slurm.daemons import (
    DaemonError,
    end_processes_of,
    held_ports,
    make_folder,
    start_daemon,
    stop_daemon,
    sweep,
    wait_until,
)
from tests.slurm.services import Services, daemon_environment
from tests.waiting import LIMIT_S, patient


@dataclass(frozen=True)
class Nodes:
    """`count` virtual nodes `<prefix>1…`, all alike."""

    prefix: str
    count: int
    gpus: int = 4
    cpus: int = 8
    features: tuple[str, ...] = ()
    memory_mib: int = 64000
    more: str = ""  # further settings of a node in slurm.conf

    @property
    def names(self) -> list[str]:
        """The node names in order."""
        return [f"{self.prefix}{number}" for number in range(1, self.count + 1)]


@dataclass(frozen=True)
class ClusterSpec:
    """What a cluster is made of. Without `accounting` it has none, as many small sites.

    A cluster that is not `powered` only answers `sbatch --test-only`: its nodes are cloud nodes that wait to be
    switched on. The scheduler counts them as free, so hundreds cost no slurmd, no memory and no second.
    """

    name: str
    nodes: tuple[Nodes, ...]
    partitions: tuple[str, ...]
    accounting: bool = True
    qos: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ("research",)
    min_job_age_s: int = 3600
    slurmd_timeout_s: int = 15
    kill_wait_s: int = 5
    # A step whose srun's node lost power tries that srun for several MessageTimeouts before it ends. At 60 s, Slurm's
    # default, its nodes are drained instead ("Kill task failed"): a requeued job starts on others, if there are any.
    unkillable_s: int = 60
    powered: bool = True
    options: tuple[str, ...] = ()  # further lines of slurm.conf


# Jobs of several tests are on it at once. Those that need certain nodes, or nodes side by side, have their own
# partitions. A slurmd that a test has stopped, or that gets no turn on a busy machine, must not count as dead;
# and a job that is to end needs its turn, too, before it is killed.
# A run of bench/torture has two or three nodes of its lane.
LANES, LANE_NODES = 3, 4
SMALL = ClusterSpec(
    "small",
    (Nodes("n", 9), Nodes("d", 3), Nodes("q", 3, cpus=32), Nodes("t", LANES * LANE_NODES)),
    (
        "PartitionName=low Nodes=n[1-9] Default=YES PriorityTier=1 GraceTime=60 MaxTime=INFINITE State=UP",
        f"PartitionName=high Nodes=n[1-9],t[1-{LANES * LANE_NODES}] PriorityTier=10 MaxTime=INFINITE State=UP "
        "PreemptMode=OFF",
        "PartitionName=ward Nodes=d[1-3] MaxTime=INFINITE State=UP",
        "PartitionName=quiet Nodes=q[1-3] MaxTime=INFINITE State=UP",
        *(
            f"PartitionName=lane{lane + 1} Nodes=t[{LANE_NODES * lane + 1}-{LANE_NODES * (lane + 1)}] GraceTime=60 "
            "MaxTime=INFINITE State=UP"
            for lane in range(LANES)
        ),
    ),
    slurmd_timeout_s=40,
    kill_wait_s=75,
)
BARE = ClusterSpec(
    "bare",
    (Nodes("b", 2),),
    ("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",),
    accounting=False,
    min_job_age_s=2,
)

LEDGER = replace(BARE, name="ledger", nodes=(Nodes("l", 2),), accounting=True)
# Enforces limits, and they are small.
NARROW = replace(
    LEDGER,
    name="narrow",
    nodes=(Nodes("w", 2),),
    options=("MaxArraySize=4", "MaxJobCount=40", "AccountingStorageEnforce=associations,limits,qos"),
    min_job_age_s=600,
)


class Cluster:
    """A running cluster. `environment` is what a command needs to talk to it."""

    def __init__(self, spec: ClusterSpec, services: Services) -> None:
        self.spec = spec
        self.services = services
        self.folder = services.folder / spec.name
        self.folder.mkdir()
        self.conf = self.folder / "slurm.conf"
        self.environment = {**daemon_environment(), "SLURM_CONF": str(self.conf)}
        self.ending = threading.Event()  # nobody waits for its jobs any more
        self.slurmds: dict[str, subprocess.Popen[bytes]] = {}
        self._held: list[socket.socket] = []  # keep the daemons' ports
        self._controller: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Brings everything up and waits until every node is idle."""
        dbd_port = self.services.start_accounting() if self.spec.accounting else None
        names = [name for nodes in self.spec.nodes for name in nodes.names]
        # Nodes without power have no daemon, and no port that anyone asks.
        daemons = ["slurmctld", *(names if self.spec.powered else ())]
        self._held = held_ports(len(daemons))
        ports = {name: int(held.getsockname()[1]) for name, held in zip(daemons, self._held, strict=True)}
        self._write_conf(dbd_port, ports)
        if dbd_port is not None:
            self._add_accounts()
        self.start_controller()
        if self.spec.powered:
            for name in names:
                self.start_slurmd(name)
            log = self.folder / "slurmctld.log"
            wait_until(f"{len(names)} idle nodes", lambda: self._idle() == len(names), log, self._controller)

    def start_controller(self) -> None:
        """Starts slurmctld, again after `stop_controller`."""
        log = self.folder / "slurmctld.log"
        self._controller = start_daemon(["slurmctld", "-D", "-i"], log, self.environment)
        wait_until("slurmctld", lambda: self.run("scontrol", "ping").returncode == 0, log, self._controller)

    @contextlib.contextmanager
    def hung_controller(self) -> Iterator[None]:
        """slurmctld is stopped, as if it hung: it takes connections and answers none."""
        assert self._controller is not None
        self._controller.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._controller.send_signal(signal.SIGCONT)

    def stop_controller(self) -> None:
        """slurmctld goes away; jobs and nodes stay."""
        if self._controller is not None:
            stop_daemon(self._controller)

    def start_slurmd(self, name: str) -> None:
        """Starts the slurmd of one virtual node."""
        self.slurmds[name] = start_daemon(
            ["slurmd", "-D", "-N", name], self.folder / f"slurmd-{name}.log", self.environment
        )

    @contextlib.contextmanager
    def without_power(self, name: str) -> Iterator[None]:
        """The node loses its power: slurmd and job steps are gone, and its ranks fall silent without a last packet.

        It is back at the end, and so are the nodes that Slurm has drained as their steps would not end meanwhile.
        """
        frozen = self._cut_power(name)
        try:
            yield
        finally:
            for pid in frozen:  # not before: other ranks would hear of it, as of no node that has lost its power
                send(pid, signal.SIGKILL)
            self.start_slurmd(name)
            for line in self.run("sinfo", "-h", "-N", "-t", "drain", "-o", "%N %E").stdout.splitlines():
                node, reason = line.split(maxsplit=1)
                if reason == "Kill task failed":
                    self.run("scontrol", "update", f"nodename={node}", "state=resume")

    def _cut_power(self, name: str) -> list[int]:
        """Gives the pids of the frozen ranks."""
        steps = [pid for pid in all_pids() if name_of(pid) == "slurmstepd" and self._node_of(pid) == name]
        ranks = [child for step in steps for child in descendants(step)]
        slurmd = self.slurmds.pop(name)
        slurmd.kill()
        slurmd.wait()
        for pid in steps:
            send(pid, signal.SIGKILL)
        # Not before they are gone: a stopped process gets SIGHUP when its parent dies, and ends with a last packet.
        log = self.folder / f"slurmd-{name}.log"
        wait_until(f"the end of {name}'s job steps", lambda: all(state_of(pid) in "ZX" for pid in steps), log, None)
        for pid in ranks:
            send(pid, signal.SIGSTOP)
        return ranks

    def run(self, *command: str, check: bool = False, **more: str) -> subprocess.CompletedProcess[str]:
        """Runs a Slurm command against this cluster; `more` are further environment variables."""
        done = subprocess.run(
            command,
            env={**self.environment, **more},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * LIMIT_S,
        )
        if check and done.returncode:
            raise DaemonError(f"{' '.join(command)}: rc {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def stop(self) -> None:
        """Ends jobs, steps and daemons, whatever state they are in."""
        for daemon in (*self.slurmds.values(), self._controller):
            if daemon is not None:
                daemon.kill()
        for daemon in (*self.slurmds.values(), self._controller):
            if daemon is not None:
                daemon.wait()
        self.slurmds.clear()
        end_processes_of(self.folder)
        for held in self._held:
            held.close()

    def _idle(self) -> int:
        states = self.run("sinfo", "-h", "-N", "-o", "%N %T").stdout.splitlines()
        return len({line.split()[0] for line in states if line.endswith(" idle")})

    def _node_of(self, pid: int) -> str | None:
        """The virtual node a slurmstepd serves: the slurmd that started it left its name in the environment."""
        names = (environment_of(child).get("SLURMD_NODENAME") for child in (pid, *descendants(pid)))
        return next(filter(None, names), None)

    def _write_conf(self, dbd_port: int | None, ports: Mapping[str, int]) -> None:
        host, folder = socket.gethostname(), self.folder
        kill_wait_s = int(patient(self.spec.kill_wait_s))
        lines = [
            f"ClusterName={self.spec.name}",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={ports['slurmctld']}",
            # A job's rendezvous port follows from its id: two clusters at once on this machine must not meet there.
            f"FirstJobId={1 + 37 * os.getpid() % 20000}",
            "SlurmUser=root",
            "AuthType=auth/munge",
            # cred_expire is also how long a requeued job must wait: 120 s by default. On a busy machine a step that
            # took 5 s to reach its slurmd was refused.
            f"AuthInfo=socket={self.services.munge_socket},cred_expire={int(patient(15))}",
            "CredType=cred/munge",
            "MpiDefault=none",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SwitchType=switch/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "SlurmdParameters=config_overrides",
            "SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=2,sched_min_interval=0,defer_batch=0",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            "ReturnToService=2",
            f"SlurmdTimeout={int(patient(self.spec.slurmd_timeout_s))}",
            f"KillWait={kill_wait_s}",
            # A step that --kill-on-bad-exit ends answers after its end, KillWait at most. slurmctld sends an unanswered
            # signal again 60 s later: a job requeued in between has a step of the same number, and that one is ended.
            # Elsewhere cred_expire, 120 s, keeps a requeued job waiting for longer than that.
            f"MessageTimeout={kill_wait_s + 15}",
            f"UnkillableStepTimeout={int(patient(self.spec.unkillable_s))}",
            "JobRequeue=1",
            f"MinJobAge={self.spec.min_job_age_s}",
            "GresTypes=gpu",
            "JobAcctGatherType=jobacct_gather/linux",
            f"StateSaveLocation={folder}/state",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmctldLogFile={folder}/slurmctld.log",
            f"SlurmdSpoolDir={folder}/spool-%n",
            f"SlurmdPidFile={folder}/slurmd-%n.pid",
            f"SlurmdLogFile={folder}/slurmd-%n.log",
        ]
        if dbd_port is not None:
            lines += [
                "AccountingStorageType=accounting_storage/slurmdbd",
                "AccountingStorageHost=127.0.0.1",
                f"AccountingStoragePort={dbd_port}",
                f"AccountingStoragePass={self.services.munge_socket}",
            ]
        if not self.spec.powered:
            # PrivateData=cloud makes sinfo list nodes that are off.
            lines += [
                "PrivateData=cloud",
                "SuspendProgram=/bin/true",
                "ResumeProgram=/bin/true",
                "SuspendTime=3600",
                "SuspendTimeout=10",
            ]
        state = "UNKNOWN" if self.spec.powered else "CLOUD"
        gres = []
        for nodes in self.spec.nodes:
            features = f" Features={','.join(nodes.features)}" if nodes.features else ""
            for name in nodes.names:
                lines.append(
                    f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports.get(name, 1)} "
                    f"CPUs={nodes.cpus} RealMemory={nodes.memory_mib} Gres=gpu:{nodes.gpus}{features} "
                    f"{nodes.more} State={state}"
                )
                # A Count without a File drains the node.
                gres.append(f"NodeName={name} Name=gpu File={folder}/gpu[0-{nodes.gpus - 1}]")
        lines += [*self.spec.partitions, *self.spec.options]
        self.conf.write_text("\n".join(lines) + "\n")
        (folder / "gres.conf").write_text("\n".join(gres) + "\n")
        (folder / "state").mkdir()
        for number in range(max(nodes.gpus for nodes in self.spec.nodes)):
            # Slurm wants a device file; a link to one needs no mknod, which containers often forbid.
            (folder / f"gpu{number}").symlink_to("/dev/null")

    def _add_accounts(self) -> None:
        """Cluster, accounts, qos and root's share in each, known before the first job."""
        site, accounts = f"cluster={self.spec.name}", ",".join(self.spec.accounts)
        if self.spec.qos:
            self.run("sacctmgr", "-i", "add", "qos", ",".join(self.spec.qos), check=True)
        self.run("sacctmgr", "-i", "add", "cluster", self.spec.name, check=True)
        self.run("sacctmgr", "-i", "add", "account", accounts, site, check=True)
        self.run("sacctmgr", "-i", "add", "user", "root", f"account={accounts}", site, check=True)
        allowed = ",".join(("normal", *self.spec.qos))
        modify = ("sacctmgr", "-i", "modify", "user", "root", "where", site, "set")
        self.run(*modify, f"qos={allowed}", "defaultqos=normal", check=True)


@contextlib.contextmanager
def running_services() -> Iterator[Services]:
    """Services in a fresh folder; at the end nothing of them, nor of any cluster on them, is left."""
    sweep()
    folder = make_folder()
    services = None
    try:
        services = Services(folder)
        yield services
    finally:
        end_processes_of(folder)
        if services is not None:
            services.stop()
        shutil.rmtree(folder, ignore_errors=True)


def main(arguments: Sequence[str]) -> int:
    """Starts a cluster by name, prints how to reach it, and keeps it until Ctrl-C or SIGTERM."""
    from tests.slurm.site import checks_spec

    shared = {spec.name: spec for spec in (SMALL, BARE, LEDGER, NARROW)}
    specs: Mapping[str, ClusterSpec] = {**shared, "checks": checks_spec()}
    if len(arguments) != 1 or arguments[0] not in specs:
        print(f"usage: python -m tests.slurm.cluster {'|'.join(specs)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    began = time.monotonic()
    with running_services() as services:
        cluster = Cluster(specs[arguments[0]], services)
        try:
            cluster.start()
            print(f"export SLURM_CONF={cluster.conf}", flush=True)
            print(f"up after {time.monotonic() - began:.1f} s; Ctrl-C or kill {os.getpid()} ends it", file=sys.stderr)
            signal.pause()
        except KeyboardInterrupt:
            pass
        finally:
            cluster.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
