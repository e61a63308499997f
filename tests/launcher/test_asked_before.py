"""What Slurm's clients answer before a job is submitted, and what is made of it, whole: stand-ins print the answers.

tests/slurm asks a real Slurm, which has neither other users' limits nor every state of a node.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.errors import UserError
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.core.settings.resolve import resolve
from hpc_gpt.core.slurm.directives import sbatch_directives
from hpc_gpt.core.slurm.start_check import _Node, _too_many, ask_after, ask_start, reason_text
from tests.launcher.test_render import resolved_demo

MAIN = "PartitionName=main Default=YES MaxTime=2:00:00 MaxNodes=UNLIMITED QoS=N/A State=UP\n"
FAST = "PartitionName=fast Default=NO MaxTime=1:00:00 MaxNodes=3 QoS=N/A State=DOWN\n"
IDLE = "".join(f"n{number}|main|idle|4|gpu:4|a100,big|none\n" for number in range(1, 5))
NO = "sbatch: error: Requested node configuration is not available\n"
UP = {"sbatch": NO, "scontrol": MAIN}
NEVER = "Slurm would never start this job: {}|change the request, or the --partition; see sinfo{}"
MORE = "; a --qos or a --reservation may allow more"
SBATCH = f"(sbatch: {NO.removeprefix('sbatch: error: ').strip()})"
AWAY = "it needs 2 of the {} nodes of partition main that can hold it, and some of these take no job now: {}"
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
        # Nodes that could hold it take no job now; the first partition that has them is named.
        ({}, {**UP, "sinfo": IDLE.replace("idle", "drained", 2).replace("none", "disk", 1)
              }, 1, AWAY.format(4, "2 drained (n1: disk)")),
        ({}, {**UP, "sinfo": IDLE.replace("idle", "down*", 1).replace("idle", "maint", 1)
              }, 1, AWAY.format(4, "1 down, 1 maint")),
        ({"constraint": "big"}, {**UP, "sinfo": IDLE.replace(",big", "", 2)}, 1,
         f"NeverStarts: {NEVER.format(NO.removeprefix('sbatch: error: ').strip(), '')}"),
        ({"constraint": "huge"}, {**UP, "sinfo": IDLE}, 1, "NeverStarts: " + NEVER.format(
            "it asks for 2 nodes of 4 CPUs and 4 GPUs with huge each, and none of the 4 nodes of partition main can "
            f"hold that: a node has at most 4 CPUs and 4 GPUs {SBATCH}", "")),
        ({"partition": "fast"}, {"sbatch": NO, "scontrol": FAST, "sinfo": IDLE.replace("main", "fast", 1)}, 1,
         f"NeverStarts: {NEVER.format(f'it asks for 2 nodes, and partition fast has 1 {SBATCH}', ' -p fast')}"),
        ({"partition": "fast"}, {"sbatch": NO, "scontrol": FAST.replace("=3", "=1"), "sinfo": ""}, 1, "NeverStarts: "
         + NEVER.format(f"it asks for 2 nodes, and partition fast gives a job 1 at most {SBATCH}", " -p fast")),
    ],
)  # fmt: skip
def test_why_a_job_waits_or_never_starts(says, job, texts, code, words) -> None:
    says(code, **texts)
    assert answered(ask_start, of_nodes(**job), "#!/bin/bash\n") == words


LUMI = "".join(f"nid{number}|standard-g|idle|128|gpu:mi250:8|(null)|none\n" for number in range(3))
OF_LUMI = "PartitionName=standard-g Default=YES MaxTime=2-00:00:00 MaxNodes=1024 QoS=N/A State=UP\nNodeName=nid0 "
REFUSED = f"sbatch: error: CPU count per node can not be satisfied\n{NO}"


@pytest.mark.parametrize(
    ("node", "cpus", "sbatch", "job_cpus", "words", "hint"),
    [
        ("CPUTot=128 CPUEfctv=112 CoreSpecCount=8 ThreadsPerCore=2", 128, (), None, "128 CPUs and 8 GPUs each, and "
         "none of the 3 nodes of partition standard-g can hold that: a node has at most 112 CPUs",
         "set cpus_per_node = 112 in the profile: those are the CPUs that Slurm gives to jobs"),
        ("CPUTot=128 CoreSpecCount=8 ThreadsPerCore=2", 128, (), 15, "120 CPUs", "set job.cpus_per_task to 14 at most"),
        ("CPUTot=128 CPUEfctv=112 ThreadsPerCore=2", 64, ("--hint=nomultithread",), None, "64 CPUs and 8 GPUs each, "
         "and none of the 3 nodes of partition standard-g can hold that: a node has at most 56 CPUs",
         "set cpus_per_node = 56 in the profile: those are the CPUs that Slurm gives to jobs"),
        ("CPUTot=128 CPUEfctv=112 ThreadsPerCore=2", 56, ("--hint=nomultithread",), None, "", ""),
        ("CPUTot=8 CPUEfctv=6", 56, (), None, "56 CPUs", "change the request, or the --partition; see sinfo"),
    ],
)  # fmt: skip
def test_cores_that_slurm_keeps_are_not_counted(says, node, cpus, sbatch, job_cpus, words, hint) -> None:
    """As LUMI's scontrol says. A job that fits is refused in sbatch's words, which then are another reason."""
    says(1, sbatch=REFUSED, scontrol=f"{OF_LUMI}{node}\n", sinfo=LUMI)
    profile = replace(load_profile("generic-slurm"), gpus_per_node=8, cpus_per_node=cpus, sbatch=sbatch)
    overrides = {"layout.gpus": 16, "data.source": "random", "job.cpus_per_task": job_cpus}
    resolved = resolve(load_experiment("demo", overrides), profile)
    if cpus == 56 and sbatch:
        assert "--cpus-per-task=7" in sbatch_directives(resolved)
    refused = answered(ask_start, resolved, "#!/bin/bash\n")
    assert words in refused
    assert refused.endswith(f"|{hint or 'change the request, or the --partition; see sinfo'}")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (NO, "Slurm would not start the jobs of [after] now: Requested node configuration is not available"),
        ("sbatch: error: Partition not available\n", "Slurm would not start the jobs of [after] now: Partition not "
         "available"),
        ("sbatch: error: Invalid qos\n", "JobRefused: Slurm would refuse the jobs of [after]: Invalid qos|change "
         "after.sbatch"),
        ("sbatch: error: Unable to contact slurm controller\n", ""),
    ],
)  # fmt: skip
def test_the_jobs_of_after_are_asked_for_too(says, said: str, words: str) -> None:
    says(1, sbatch=said)
    resolved = resolved_demo({"after.run": ["true"]})
    assert answered(ask_after, resolved) == words
    says(0)
    assert answered(ask_after, resolved) == ""


NEVER_STARTS = "it never starts: cancel it, and change the request"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("QOSMaxNodePerJobLimit", f"it asks for more than its QOS allows one job; {NEVER_STARTS}"),
        ("AssocGrpCPURunMinutes", "the running jobs have reached a limit of its account"),
        ("QOSGrpCPUMinutesLimit", "the minutes of its QOS are used up: it starts when more are granted"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "nodes that it asks for are down, drained or reserved"),
        ("launch failed requeued held", "its launch failed, and Slurm holds it; scontrol release starts it again"),
    ],
)
def test_a_reason_is_explained_and_stands_beside(reason: str, words: str) -> None:
    assert reason_text(reason) == f"{words} ({reason})"


def node(name: str, cpus: int, gpus: int) -> _Node:
    return _Node(name, "main", "idle", cpus, gpus, (), "none")


@pytest.mark.parametrize(
    ("nodes", "fit", "words"),
    [
        ([], [], "1 node, and partition main has 0"),
        (
            [node("a", 64, 2), node("b", 32, 0)],
            [],
            "1 node of 4 CPUs and 4 GPUs each, and none of the 2 nodes of partition main can hold that: a node has at "
            "most 64 CPUs and 2 GPUs",
        ),
    ],
)
def test_it_says_how_many_nodes_are_large_enough(nodes, fit, words):
    assert _too_many("main", 1, nodes, fit, resolved_demo()) == words


def test_a_node_that_takes_no_new_job_is_known_by_its_state():
    """As sinfo's %T says them; a state with `~` is of a node that is switched on for a job, one with `*` of a node that
    does not answer."""
    usable = ["idle", "mixed", "allocated", "completing", "planned", "idle~", "mixed#"]
    others = ["down", "down*", "idle*", "mixed*", "drained", "draining", "drained*", "fail", "failing", "maint",
              "reserved", "inval", "unknown", "reboot^"]  # fmt: skip
    states = [*usable, *others]
    assert [state for state in states if _Node("a", "main", state, 4, 0, (), "none").is_usable] == usable
