"""What a job and its user see of Slurm: the same scripts, run under whatever is in PATH, as words to compare.

Names of nodes become their place among the job's, ids and times their kind: nothing else may differ between a real
Slurm and the stand-ins.
"""

import re

from tests.rehearsal.commands import Commands

# Of the script and of each rank; those that follow from the machine or the site are left out.
_SCRIPT = (
    "SLURM_JOB_ID SLURM_JOBID SLURM_JOB_NAME SLURM_JOB_NODELIST SLURM_NODELIST SLURM_JOB_NUM_NODES SLURM_NNODES "
    "SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE SLURM_CPUS_PER_TASK SLURM_CPUS_ON_NODE "
    "SLURM_JOB_CPUS_PER_NODE SLURM_NODEID SLURM_PROCID SLURM_LOCALID SLURMD_NODENAME SLURM_SUBMIT_DIR HOSTNAME "
    "SLURM_RESTART_COUNT SLURM_JOB_USER SLURM_GPUS_ON_NODE SLURM_ARRAY_JOB_ID SLURM_STEP_ID"
)
_RANK = (
    "SLURM_JOB_ID SLURM_NTASKS SLURM_NPROCS SLURM_NNODES SLURM_NODELIST SLURM_JOB_NODELIST SLURM_NTASKS_PER_NODE "
    "SLURM_TASKS_PER_NODE SLURM_CPUS_PER_TASK SLURM_NODEID SLURM_PROCID SLURM_LOCALID SLURMD_NODENAME "
    "SLURM_STEP_ID SLURM_STEPID SLURM_STEP_NODELIST SLURM_STEP_NUM_NODES SLURM_STEP_NUM_TASKS "
    "SLURM_STEP_TASKS_PER_NODE SLURM_SUBMIT_DIR SLURM_JOB_NUM_NODES SLURM_RESTART_COUNT"
)
FIELDS = ("JobState", "Reason", "Restarts", "ExitCode", "PreemptTime", "ExcNodeList", "NodeList", "NumNodes")

# Of the job's first start.
HOSTS = """
[ -e hosts.{name} ] || scontrol show hostnames "$SLURM_JOB_NODELIST" >hosts.{name}
"""
LOOK = f"""
say() {{ echo "$*"; }}
for name in {_SCRIPT}; do say "script $name=${{!name-unset}}"; done
shopt -s nullglob
say "shown $(scontrol --oneliner show job "$SLURM_JOB_ID")"
say "queue $(squeue --noheader --states=all --array -j "$SLURM_JOB_ID" --format='%i|%T|%r')"
say "hosts $(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr '\\n' ' ')"
export SRUN_CPUS_PER_TASK=2
srun --export=ALL --kill-on-bad-exit=1 --ntasks=4 --ntasks-per-node=2 bash -c '
for name in {_RANK}; do echo "rank $SLURM_PROCID $name=${{!name-unset}}"; done >rank.$SLURM_PROCID'
say "srun $?"
cat rank.0 rank.1 rank.2 rank.3
exit 3
"""
STEPS = """
export SRUN_CPUS_PER_TASK=1
try() { "$@" 2>&1; echo "code $?"; }
try srun --kill-on-bad-exit=1 bash -c 'if [ $SLURM_PROCID = 2 ]; then sleep 1; exit 3; fi; sleep 100'
try srun --kill-on-bad-exit=1 bash -c '[ $SLURM_PROCID = 1 ] && { sleep 1; kill -9 $$; }; sleep 100'
try srun -n400 -N2 --ntasks-per-node=200 true
try srun /no/such
second=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tail -n 1)
try srun -N1 -n1 --nodelist="$second" bash -c 'echo "on $SLURMD_NODENAME $SLURM_NODEID of $SLURM_STEP_NODELIST"'
try srun -l -n2 -N2 --ntasks-per-node=1 true
try srun bash -c 'exit $((SLURM_PROCID == 3))'
try scontrol show job 999999
try scontrol update jobid=999999 StartTime=now
try scancel 999999
"""
AGAIN = """
echo "start ${SLURM_RESTART_COUNT:-none}"
trap 'echo "script got TERM"' TERM
if [ -n "$SLURM_RESTART_COUNT" ]; then
  scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -qx "$(head -n 1 hosts.again)" || echo "not on node 1"
  exit 0
fi
scontrol requeue "$SLURM_JOB_ID" || [ $? = 143 ] && echo "requeued"
until state=$(scontrol --oneliner show job "$SLURM_JOB_ID" | grep -o 'JobState=[A-Z]*'); do sleep 0.1; done
echo "then $state"
# The requeue's TERM goes to every process of the script, these too: one that it ends says nothing, and is asked again.
until first=$(head -n 1 hosts.again) && [ -n "$first" ]; do sleep 0.1; done
until scontrol update "jobid=$SLURM_JOB_ID" "ExcNodeList=$first" StartTime=now+4; do sleep 0.1; done
echo "updated"
until nodes=$(scontrol --oneliner show job "$SLURM_JOB_ID" | grep -o 'ExcNodeList=[^ ]*'); do sleep 0.1; done
echo "without node 1: $nodes"
"""
RANKS_WAIT = """
trap 'echo "script got TERM"' TERM
trap 'echo "script got USR2"' USR2
srun bash -c '
trap "echo rank $SLURM_PROCID got TERM; exit 0" TERM
trap "echo rank $SLURM_PROCID got USR2" USR2
touch "ready.$SLURM_PROCID"
for i in {1..600}; do sleep 0.1; done' &
while kill -0 $! 2>/dev/null; do wait $!; code=$?; done
echo "srun ended"
exit 0
"""
TWO_NODES = ("--nodes=2", "--ntasks-per-node=2")


def observe(slurm: Commands) -> dict[str, object]:
    """Runs it all and gives what was to be seen, by what it was."""
    flags = ("--job-name=a look", "--cpus-per-task=2", "--gres=gpu:2", "--time=10", "--requeue", "--open-mode=append",
             "--signal=USR2@60")  # fmt: skip
    look = slurm.submit("look", HOSTS.format(name="look") + LOOK, *TWO_NODES, *flags)
    steps = slurm.submit("steps", HOSTS.format(name="steps") + STEPS, *TWO_NODES)
    again = slurm.submit("again", HOSTS.format(name="again") + AGAIN, *TWO_NODES, "--requeue", "--open-mode=append")
    cancelled = slurm.submit("cancelled", HOSTS.format(name="cancelled") + RANKS_WAIT, *TWO_NODES)
    singles = [
        slurm.submit(f"single{number}", "until [ -e go ]; do sleep 0.1; done", "-J", "one", "-d", "singleton")
        for number in range(2)
    ]
    slurm.wait("ranks", lambda: len(list(slurm.folder.glob("ready.*"))) == 4)
    seen: dict[str, object] = {}

    def queue() -> str:
        return slurm.run("squeue", "-h", "-t", "all", "--array", "-o", "%i|%r", f"-j{singles[1]}").stdout

    # Why a job waits is said once the scheduler has looked at it.
    slurm.wait("a singleton that waits", lambda: f"{singles[1]}|Dependency" in queue())
    (slurm.folder / "go").touch()
    slurm.run("scancel", "--signal=USR2", cancelled)
    slurm.wait("USR2", lambda: slurm.output("cancelled").count("got USR2") >= 4)
    seen["state after a signal"] = slurm.state(cancelled)
    slurm.run("scancel", cancelled)
    for name, job in (("look", look), ("steps", steps), ("again", again), ("cancelled", cancelled)):
        fields = slurm.wait_end(job)
        hosts = (slurm.folder / f"hosts.{name}").read_text().split()
        other_nodes = {"NodeList"} if name == "again" else set()
        keys = [key for key in FIELDS if key not in other_nodes]
        seen[f"{name}: fields"] = {key: _plain(fields.get(key, "none"), hosts, job, slurm) for key in keys}
        lines = [_plain(line, hosts, job, slurm) for line in slurm.output(name).splitlines()]
        seen[f"{name}: output"] = _in_order(name, lines)
        # The books are kept by another daemon, which hears of an end a moment later.
        slurm.wait("accounts", lambda job=job: not re.search("PENDING|RUNNING", _accounts(slurm, job)))
        seen[f"{name}: accounting"] = _accounts(slurm, job).splitlines()
    for job in singles:
        slurm.wait_end(job)
    over = slurm.run("scancel", steps)
    seen["cancel what is over"] = (over.returncode, over.stderr.replace(steps, "ID").strip())
    seen["ping"] = " is UP" in slurm.run("scontrol", "ping").stdout
    return seen


def _accounts(slurm: Commands, job: str) -> str:
    """A line of sacct for each start of the job, without who cancelled it."""
    rows = slurm.run("sacct", "-D", "-X", "-n", "-P", "-o", "State", "-j", job).stdout
    return re.sub(r" by \d+", "", rows)


def _plain(words: str, hosts: list[str], job: str, slurm: Commands) -> str:
    """Words without what is another one's each time."""
    text = words.replace(str(slurm.folder), "FOLDER")
    prefix = re.sub(r"\d+$", "", hosts[0])
    numbers = [int(re.sub(r"\D+", "", host)) for host in hosts]
    for both in (f"{prefix}[{numbers[0]}-{numbers[-1]}]", ",".join(hosts)):
        text = text.replace(both, "BOTH")
    for place, host in enumerate(hosts):
        text = re.sub(rf"\b{host}\b", f"HOST{place}", text)
    text = re.sub(rf"\b{job}(?=\b|\.)", "ID", text)
    text = re.sub(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d", "TIME", text)
    # A build with several daemons on a host says which one speaks.
    return re.sub(r"slurmstepd-\w+:", "slurmstepd:", text)


def _in_order(name: str, lines: list[str]) -> list[str]:
    """The lines to compare: what a shell says of its children is left out, and what comes in any order is sorted."""
    kept = []
    for line in lines:
        if re.fullmatch(r"(User defined signal 2|Terminated|Killed)", line) or "/bash: line" in line:
            continue
        if line.startswith("shown "):
            found = dict(re.findall(r"(\S+?)=(\S*)", line))
            line = "shown " + " ".join(f"{key}={found.get(key, 'none')}" for key in FIELDS if key not in ("NodeList",))
        if line.startswith(("srun: Job ", "srun: Step created", "srun: got SIGCONT", "srun: forcing",
                            "srun: Force Terminated", "srun: Warning")):  # fmt: skip
            continue
        if found := re.fullmatch(r"(srun: error: \w+: )tasks (\d+)-(\d+)(: .*)", line):
            # Ranks that end at the same moment are reported on one line, and how long a moment is varies.
            kept += [f"{found[1]}task {rank}{found[4]}" for rank in range(int(found[2]), int(found[3]) + 1)]
            continue
        kept.append(line)
    return sorted(kept)
