"""What Slurm's clients answer before a job is submitted, and what is made of it, whole: stand-ins print the answers.

tests/slurm asks a real Slurm, which has neither other users' limits nor every state of a node.
"""

import itertools
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.errors import UserError
from hpc_gpt.core.slurm.start_check import ask_start, check_reachable, other_scheduler
from hpc_gpt.launcher.watch.reasons import reason_text, with_maintenance
from tests.cli.command import in_process
from tests.launcher.test_render import resolved_demo

MAIN = "PartitionName=main Default=YES MaxTime=2:00:00 MaxNodes=UNLIMITED QoS=N/A State=UP\n"
FAST = "PartitionName=fast Default=NO MaxTime=1:00:00 MaxNodes=3 QoS=N/A State=DOWN\n"
NO = "sbatch: error: Requested node configuration is not available\n"
UP = {"sbatch": NO, "scontrol": MAIN}
NEVER = "Slurm would never start this job: {}|change the request, or the --partition; see sinfo{}"
ONE = {"sbatch": NO, "sinfo": "8 64000 gpu:4\n"}
LACKS = (
    "NeverStarts: Slurm would never start this job: it asks for 2 nodes with {} each; partition main has {}, at most "
    "8 CPUs, 64,000 MiB, 4 GPUs each|change the request, or the --partition; see sinfo{}"
)
LATER = "Requested node configuration is not available: once it is queued, hpc-gpt status has Slurm's reason"
MORE = "; a --qos or a --reservation may allow more"
STARTS = "sbatch: Job 7 to start at {}T10:00:00 using 8 processors on nodes n1 in partition main\n"


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Clients that print a text each on stdout, sbatch on stderr with an exit code."""

    def say(code: int = 0, **texts: str) -> None:
        for name, text in {"sbatch": "", "scontrol": "", "sinfo": "", "squeue": "", "sacctmgr": "", **texts}.items():
            (tmp_path / f"{name}.txt").write_text(text)
            # `sacctmgr … show WHAT` has the lines that begin with WHAT alone, without it.
            what = f"sed -n \"s/^$3 //p\" '{tmp_path}/sacctmgr.txt'"
            end = f"cat '{tmp_path}/{name}.txt' {f'>&2; exit {code}' if name == 'sbatch' else ''}"
            (tmp_path / name).write_text(f"#!/bin/bash\n{what if name == 'sacctmgr' else end}\n")
            (tmp_path / name).chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    return say


def of_nodes(count: int = 2, **job: str):
    resolved = resolved_demo({"layout.gpus": 4 * count, "data.source": "random"})
    return replace(resolved, job=replace(resolved.job, **{"time": "0:30:00", **job}))


def answered(call, *arguments: object) -> str:
    try:
        found = call(*arguments)
    except UserError as refusal:
        return f"{type(refusal).__name__}: {refusal}|{refusal.hint}"
    return found if isinstance(found, str) else found.waits


@pytest.mark.parametrize(
    ("job", "texts", "code", "words"),
    [
        ({}, {"sbatch": STARTS.format("2001-01-01"), "scontrol": MAIN}, 0, ""),
        ({}, {"sbatch": STARTS.format("2101-01-01"), "scontrol": MAIN}, 0,
         "Slurm expects to start it at 2101-01-01 10:00"),
        ({"partition": "fast"}, {"scontrol": MAIN + FAST}, 0, "partition fast is down: jobs wait until it is up"),
        ({"partition": "fast,main"}, {"scontrol": MAIN + FAST}, 0, ""),
        # A limit is that of all its partitions, unless a QOS may allow more.
        ({"time": "2:00:00"}, {"scontrol": MAIN}, 0, ""),
        ({"time": "2:00:01"}, {"scontrol": MAIN}, 0,
         f"NeverStarts: {NEVER.format('it asks for --time 2:00:01, and partition main allows 2:00:00', MORE)}"),
        ({"time": "3:00:00", "partition": "fast,main"}, {"scontrol": MAIN + FAST}, 0, "NeverStarts: " + NEVER.format(
            "it asks for --time 3:00:00, and partition main or fast allows 2:00:00, 1:00:00", f" -p fast,main{MORE}")),
        ({"time": "48:00:00", "reservation": "r"}, {"scontrol": MAIN}, 0, "it asks for --time 48:00:00, and partition "
         "main allows 2:00:00: Slurm starts it only if reservation r has a QOS or a partition that allows it"),
        ({"time": "1:30:00", "partition": "fast,main"}, {"scontrol": MAIN + FAST}, 0, ""),
        ({"time": "3:00:00", "qos": "long"}, {"scontrol": MAIN}, 0, ""),
        ({"time": "3:00:00"}, {"scontrol": MAIN.replace("QoS=N/A", "QoS=long")}, 0, ""),
        ({}, {"sbatch": "sbatch: error: Required node not available (down, drained)\n", "scontrol": MAIN}, 1,
         "Required node not available (down, drained)"),
        ({}, {"sbatch": "sbatch: error: Invalid account\n", "scontrol": MAIN}, 1,
         "JobRefused: sbatch refused the job: Invalid account|change the request, or the cluster profile"),
        ({}, {"sbatch": "sbatch: error: Unable to contact slurm controller\n"}, 1, "SlurmUnreachable: sbatch cannot "
         "reach Slurm: Unable to contact slurm controller|try again when slurmctld is up"),
        # An option of no Slurm.
        ({}, {"sbatch": "sbatch: unrecognized option '--partiton=x'\nTry \"sbatch --help\"\n", "scontrol": MAIN}, 1,
         "NeverStarts: sbatch has no option --partiton|did you mean --partition?"),
        # A request for more than the partition has, whatever its nodes' states; sinfo lists fewer if some are off.
        ({"partition": "main"}, {**UP, "sinfo": "8 64000 gpu:4\n8 64000 gpu:4\n"}, 1, LATER),
        ({"partition": "main", "mem": "500G"}, {**UP, "sinfo": "8 64000 gpu:4\n"}, 1, LACKS.format(
            "4 CPUs, 512,000 MiB, 4 GPUs", "0 such of its 1 node", " -p main")),
        ({}, {**ONE, "scontrol": f"{MAIN}JobSubmitPlugins = (null)\n"}, 1,
         LACKS.format("4 CPUs, 4 GPUs", "1 such of its 1 node", "")),
        ({}, {**ONE, "scontrol": f"{MAIN}JobSubmitPlugins = lua\n"}, 1, LATER),
        ({}, {**ONE, "scontrol": MAIN.replace("State", "TotalNodes=2 State")}, 1, LATER),
        # Nodes that are away: sbatch queues it.
        ({}, UP, 1, LATER),
    ],
)  # fmt: skip
def test_why_a_job_waits_or_never_starts(says, job, texts, code, words) -> None:
    says(code, **texts)
    mem = f"#SBATCH --mem={job['mem']}\n" if "mem" in job else ""
    script = f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=4 --gres=gpu:4\n{mem}"
    assert answered(ask_start, of_nodes(**job), script) == words


# Resources in the names of limits, and the reasons of Slurm 22.05 to 25.11 that are no limits.
LIMITED = "BB Billing Cpu CPU Energy GRES License Mem Memory Node Unknown"
OTHERS = """AccountNotAllowed AccountingPolicy BadConstraints BeginTime BurstBufferResources BurstBufferStageIn Cleaning
Constraints DeadLine Dependency DependencyNeverSatisfied FedJobLock InvalidAccount InvalidQOS JobArrayTaskLimit
JobHeldAdmin JobHeldUser JobHoldMaxRequeue Licenses MaxMemPerLimit MaxPoweredUpNodes MpiPortsBusy NodeDown
NvidiaImexChannels PartitionConfig PartitionDown PartitionInactive PartitionNodeLimit PartitionTimeLimit Priority Prolog
QOSNotAllowed QOSUsageThreshold ReqNodeNotAvail Reservation ReservationDeleted ReservationInvalid ReservationMaxTime
Resources SchedDefer"""
# How a job ended, or of machines that Slurm no longer has: of a waiting job they say nothing that words would add to.
BARE = """BlockFreeAction BlockMaxError BurstBufferOperation FrontEndDown InactiveLimit JobLaunchFailure NonZeroExitCode
OutOfMemory PowerNotAvail PowerReserved RaisedSignal SystemFailure TimeLimit"""
FORMS = {
    "it asks for less than": ["QOSMin{}", "QOSMinCpuNotSatisfied"],
    "it asks for more than": [
        *("{0}Max{1}PerJob", "{0}Max{1}PerJobLimit", "{0}Max{1}PerNode", "{0}Max{1}MinutesPerJob"),
        *("{0}Max{1}MinutesPerJobLimit", "{0}MaxWallDurationPerJobLimit"),
    ],
    "are used up": ["{0}Grp{1}Minutes", "{0}Grp{1}MinutesLimit"],
    "have reached a limit of": [
        *("{0}Grp{1}", "{0}Grp{1}Limit", "{0}Grp{1}RunMinutes", "{0}Grp{1}RunMinutesLimit", "{0}GrpJobsLimit"),
        *("{0}GrpSubmitJobsLimit", "{0}GrpWallLimit", "{0}MaxJobsLimit", "{0}MaxSubmitJobLimit", "Max{1}PerAccount"),
        *("Max{1}RunMinsPerAccount", "Max{1}RunMinsPerUser", "MaxJobsPerAccount", "MaxSubmitJobsPerAccount"),
        *("QOSMax{1}PerUser", "QOSMax{1}PerUserLimit", "QOSMaxJobsPerUserLimit", "QOSMaxSubmitJobPerUserLimit"),
        *("QOSJobLimit", "QOSResourceLimit", "QOSTimeLimit", "AssociationJobLimit", "AssociationResourceLimit"),
        "AssociationTimeLimit",
    ],
}


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("QOSMaxNodePerJobLimit", "it never starts: it asks for more than its QOS allows one job"),
        ("QOSMinGRES", "it never starts: it asks for less than its QOS requires of a job"),
        ("AssocGrpCPURunMinutes", "the running jobs have reached a limit of its account"),
        ("QOSGrpCPUMinutesLimit", "the minutes of its QOS are used up: it starts when more are granted"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "nodes that it asks for are down, drained or reserved"),
        ("ReqNodeNotAvail, UnavailableNodes:", "its nodes are busy"),
        ("launch failed requeued held", "its launch failed, and Slurm holds it; scontrol release starts it again"),
    ],
)
def test_a_reason_is_explained_and_stands_beside(reason: str, words: str) -> None:
    assert reason_text(reason) == f"{words} ({reason})"


def test_each_reason_of_slurm_has_words_or_is_bare() -> None:
    for words, forms in FORMS.items():
        names = {form.format(*pair) for form in forms for pair in itertools.product(("QOS", "Assoc"), LIMITED.split())}
        if "{}" in forms[0]:
            names = {form.format(resource) for form in forms for resource in LIMITED.split()}
        assert not [name for name in names if words not in reason_text(name)]
    assert [name for name in OTHERS.split() if reason_text(name) == name] == []
    assert [name for name in BARE.split() if reason_text(name) != name] == []


def test_a_maintenance_names_the_longest_time_before_it(says) -> None:
    reason, now = "ReqNodeNotAvail, Reserved for maintenance", time.mktime((2026, 12, 1, 3, 18, 30, 0, 0, -1))
    row = "ReservationName={} StartTime=2026-12-0{}T06:00:00 EndTime=2026-12-09T08:00:00 Nodes=n1 Flags={},SPEC_NODES\n"
    says(scontrol=row.format("service", 1, "IGNORE_JOBS,MAINT") + row.format("MAINT", 2, "FLEX"))
    told = with_maintenance(reason, now, None)
    assert told == f"{reason}: --time=2:41:00 ends before it"
    assert reason_text(told) == f"its nodes are reserved for maintenance; a shorter --time may start before it ({told})"
    says(scontrol=row.format("service", 1, "MAINT") + row.format("second", 2, "MAINT"))
    assert with_maintenance(reason, now, None) == reason
    assert with_maintenance("Priority", now, None) == "Priority"


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("slurm 25.11.0", ""),
        ("slurm-wlm 22.05.8", ""),
        ("Site wrapper 2.1\nslurm 23.02.7", ""),
        ("", ""),
        ("sbatch: unknown option", ""),
        ("spur 0.8.0 (linux)", "spur 0.8.0"),
    ],
)
def test_sbatch_is_another_schedulers_by_its_name(tmp_path: Path, says, printed: str, name: str) -> None:
    says(scontrol="Slurmctld(primary) at login is UP\n")
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\necho '{printed}'\necho asked >>'{tmp_path}/asked'\n")
    assert name == other_scheduler(keep=True) == other_scheduler()
    assert (tmp_path / "asked").read_text() == "asked\n"
    if not name:
        check_reachable()
        return
    for verb in (["submit", "demo"], ["submit", "demo", "--race"], ["profile", "detect"]):
        refused = in_process(*verb, *(["--cluster", "jean-zay-v100-32g"] if verb[0] == "submit" else []), code=1)
        assert "sbatch here is spur 0.8.0, not Slurm: a chain" in refused.stderr
    rendered = in_process("render", "demo", "--cluster", "generic-slurm", code=0)
    assert "note: sbatch here is spur 0.8.0, not Slurm" in rendered.stderr
    assert rendered.stdout.startswith("#!/bin/bash")
