"""Profiles from the documentation of sites, against what Slurm would say there and what the sites' examples ask for."""

import re
import shlex
import tomllib
from dataclasses import dataclass, fields

import pytest

from hpc_gpt.core.settings.cluster import ClusterProfile, list_profiles, load_profile
from hpc_gpt.core.settings.experiment import limit_s
from tests.cli.command import in_process
from tests.launcher.doctor.fake_clients import fake_clients

DOCUMENTED = [name for name in list_profiles() if load_profile(name).to_add]
SLINGSHOT = "switch/hpe_slingshot"
# The keys of a profile that Slurm can tell.
OF_SLURM = ("device", "gpus_per_node", "cpus_per_node", "gpu_flag", "partition", "constraint", "qos", "time",
            "exclusive", "fabric")  # fmt: skip


@dataclass(frozen=True)
class Says:
    """What Slurm says at a site, composed from its documentation: CPUs, gres and features of a node as sinfo prints
    them, and scontrol's further words on the partition and the node. `more`: nodes of another kind. `left`: keys that
    detect leaves open or finds otherwise than the profile has them, and names in a comment."""

    partition: str
    cpus: int
    gres: str
    features: str = "(null)"
    most: str = "1-00:00:00"
    of_partition: str = ""
    of_node: str = "ThreadsPerCore=1"
    switch: str = "(null)"
    qos: str = "normal"
    more: str = ""
    left: str = "fabric gpu_flag"


OF_TRENTO = "CoresPerSocket=64 CPUEfctv=112 CPUTot=128 CoreSpecCount=8 ThreadsPerCore=2"
EXCLUSIVE = "OverSubscribe=EXCLUSIVE"
SITES = {
    "lumi-g": Says("standard-g", 128, "gpu:mi250:8(S:0-3)", "AMD_EPYC_7A53,x1001", "2-00:00:00", EXCLUSIVE, OF_TRENTO,
                   SLINGSHOT, left="fabric gpu_flag cpus_per_node"),
    "frontier": Says("batch", 128, "gpu:8(S:0-3)", most="12:00:00", of_partition=f"DefaultTime=00:10:00 {EXCLUSIVE}",
                     of_node="CPUTot=128 CoreSpecCount=8 ThreadsPerCore=2", switch=SLINGSHOT,
                     left="fabric gpu_flag cpus_per_node time device"),
    "alps-gh200": Says("normal", 288, "gpu:4", "gh,gpu,thp_always,nvidia_vboost_disabled", "12:00:00", EXCLUSIVE,
                       switch=SLINGSHOT, left="fabric gpu_flag device"),
    "jupiter": Says("booster", 288, "gpu:gh200:4(S:0-3)", most="12:00:00", left="fabric device"),
    "leonardo": Says("boost_usr_prod", 32, "gpu:a100:4(S:0)", left="fabric device"),
    "marenostrum5": Says("acc", 160, "gpu:4(S:0-1)", most="3-00:00:00", of_node="ThreadsPerCore=2", qos="acc_ehpc",
                         left="fabric device cpus_per_node"),
    "perlmutter": Says("gpu_ss11", 128, "gpu:a100:4(S:0-3)", "a100,gpu,hbm40g", "2-00:00:00",
                       of_node="ThreadsPerCore=2", switch=SLINGSHOT, qos="debug,regular", more="a100,gpu,hbm80g",
                       left="fabric gpu_flag constraint qos"),
    "jean-zay-h100": Says("gpu_p6", 192, "gpu:4(S:0-1)", "h100", "4-04:00:00", of_node="ThreadsPerCore=2",
                          qos="qos_gpu_h100-t3", left="fabric device cpus_per_node time constraint"),
    "isambard-ai": Says("workq", 288, "gpu:4", switch=SLINGSHOT, left="fabric gpu_flag device"),
    "snellius-h100": Says("gpu_h100", 64, "gpu:h100:4(S:0-1)", most="5-00:00:00", left="gpu_flag device"),
}  # fmt: skip


def test_the_sites_are_those_with_profiles_from_documentation():
    assert sorted(SITES) == sorted(DOCUMENTED)


@pytest.mark.parametrize("name", SITES)
def test_detect_finds_the_documented_values_or_names_them(tmp_path, monkeypatch, name):
    says, documented = SITES[name], load_profile(name)
    node = f"%s|{says.partition}|{says.cpus}|500000|{says.gres}|%s\n"
    fake_clients(tmp_path, monkeypatch, {
        "scontrol show config": f"ClusterName = there\nJobRequeue = 1\nSwitchType = {says.switch}\n",
        "sinfo -h -N -o %N|%R|%c|%m|%G|%f": node % ("n1", says.features) + node % ("n2", says.features)
        + (node % ("n3", says.more) if says.more else ""),
        "scontrol --oneliner show partition": f"PartitionName={says.partition} State=UP MaxTime={says.most} "
        f"{says.of_partition}\n",
        "scontrol --oneliner show node n1": f"NodeName=n1 {says.of_node}\n",
        "sacctmgr -nP show assoc cluster=there user=ada format=Account,QOS,DefaultQOS": f"project|{says.qos}|\n",
        "sacctmgr -nP show user ada cluster=there withassoc format=DefaultAccount": "project\n",
    })  # fmt: skip
    text = in_process("profile", "detect", code=0).stdout
    found = tomllib.loads(text)
    defaults = {entry.name: entry.default for entry in fields(ClusterProfile)}
    # A default QOS and the only partition are named by detect alone; the job is the same.
    same = {"qos": "normal", "partition": says.partition} if documented.partition is None else {"qos": "normal"}
    wanted = {key: getattr(documented, key) for key in OF_SLURM}
    wanted = {key: same.get(key) if value is None else value for key, value in wanted.items()}
    found["time"], wanted["time"] = (limit_s(tables["time"]) for tables in (found, wanted))
    left = {key for key in OF_SLURM if found.get(key, defaults[key]) != wanted[key]}
    assert left == set(says.left.split())
    comments = "\n".join(re.findall(r"#(.*)", text))
    named = {key: str(wanted[key]) for key in left}
    named |= {"time": "a QOS may allow less", "constraint": "its nodes offer|has it"}
    named |= {"fabric": str(documented.fabric or "infiniband").partition(" ")[0]}
    assert [key for key in left if not re.search(named[key], comments)] == []


# What LUMI's own example asks for: run_ddp_srun_4.sh of Lumi-supercomputer/LUMI-AI-Guide at a7e3387.
ASKED_BY_LUMI = ("--partition=standard-g", "--nodes=4", "--gpus-per-node=8", "--ntasks-per-node=8", "--cpus-per-task=7",
                 "--mem=480G")  # 60G for each of 8 GPUs  # fmt: skip
MASKS = (0xFE << 48, 0xFE << 56, 0xFE << 16, 0xFE << 24, 0xFE, 0xFE << 8, 0xFE << 32, 0xFE << 40)


def test_a_job_on_lumi_asks_for_what_its_guide_does():
    options = ("--gpus", "32", "--tp", "1", "--pp", "1", "--mbs", "1", "--gbs", "32", "--account", "project_465000001")
    done = in_process("submit", "demo", "--cluster", "lumi-g", *options, "--dry-run", "--script", code=0)
    assert "from documentation" not in done.stderr, "the account is given"
    script = done.stdout
    directives = set(re.findall(r"^#SBATCH (\S+)$", script, re.MULTILINE))
    assert {*ASKED_BY_LUMI, "--account=project_465000001", "--hint=nomultithread", "--exclusive"} <= directives
    [bind] = {word for word in shlex.split(script, comments=True) if word.startswith("--cpu-bind=")}
    assert tuple(int(mask, 16) for mask in bind.removeprefix("--cpu-bind=mask_cpu:").split(",")) == MASKS
    modules = ("module purge", "module use /appl/local/laifs/modules", "module load lumi-aif-singularity-bindings")
    places = [script.find(step) for step in modules]
    assert -1 not in places
    assert places == sorted(places)
    of_ranks = ("NCCL_SOCKET_IFNAME:-hsn", "runtime=singularity", '"$runtime" exec --rocm', "lumi-multitorch-full-")
    assert [step for step in of_ranks if step not in script] == []


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_dry_run_names_what_the_user_must_add(name):
    profile = load_profile(name)
    said = " ".join(in_process("submit", "demo", "--cluster", name, "--dry-run", code=0).stderr.split())
    assert f"note: profile {name} is from documentation, not tried there, and leaves to you: " in said
    assert all(f"{key} ({' '.join(text.split())})" in said for key, text in (profile.to_add or {}).items())
    assert profile.account is None
    assert profile.venv is None


def test_doctor_names_it_too():
    done = in_process("doctor", "demo", "--cluster", "frontier")
    said = " ".join(done.stdout.split())
    assert "warn profile from documentation, not tried there; it lacks account: your project; venv: an env" in said
    assert 'do: give an option of submit, or the key in a profile of your own with extends = "frontier"' in said


def test_a_profile_of_ones_own_adds_them(tmp_path):
    (tmp_path / "mine.toml").write_text('extends = "frontier"\naccount = "abc123"\npython = "/opt/env/bin/python"\n')
    done = in_process("submit", "demo", "--cluster", "mine.toml", "--dry-run", cwd=tmp_path, code=0)
    assert "leaves to you" not in done.stderr
    (tmp_path / "odd.toml").write_text('extends = "frontier"\n[to_add]\naccont = "your project"\n')
    refused = in_process("submit", "demo", "--cluster", "odd.toml", "--dry-run", cwd=tmp_path, code=2)
    assert "odd.toml: to_add names accont, which is not a key of a profile" in refused.stderr


def test_the_list_says_which_profiles_are_from_documentation():
    lines = in_process("profile", "list", code=0).stdout.splitlines()
    marked = {line.split()[0] for line in lines if line.endswith("(from documentation, not tried there)")}
    assert marked == {*DOCUMENTED}
