"""Profiles of sites that are not at hand, from what their Slurm says."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.errors import ConfigError, JobRefused, SlurmUnreachable
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.launcher.doctor import site
from hpc_gpt.launcher.doctor.site import (
    NodeKind,
    Site,
    SlurmPartition,
    choice_lines,
    choose_kind,
    choose_partition,
    count_gpus,
    guess_device,
    lines_to_fill_in,
    profile_text,
    read_site,
)
from tests.cli.command import in_process
from tests.launcher.doctor.fake_clients import fake_clients

A100 = NodeKind(8, "a100", 128, 1031000, ("a100", "a100_80gb", "ib"))
V100 = NodeKind(4, "v100", 40, 192000, ("ib", "v100", "v100-32g"))
CPUS = NodeKind(0, None, 64, 256000, ("milan",))


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    monkeypatch.setattr(site, "node_settings", lambda nodes: {node: {"ThreadsPerCore": "2"} for node in nodes})


def partition(name, kinds, **settings):
    nodes = {kind: [f"{name}{at}-{number}" for number in range(count)] for at, (kind, count) in enumerate(kinds)}
    return SlurmPartition(name, {"State": "UP", "MaxTime": "2-00:00:00", **settings}, nodes)


def a_site(*partitions, **more):
    config = {"JobRequeue": "1", "MaxArraySize": "1001"}
    return Site("dahu", more.pop("config", config), {each.name: each for each in partitions}, **more)


GPU = partition("gpu", [(A100, 12), (V100, 5)], DefaultTime="01:00:00", AllowQos="gpu_normal,gpu_long")
CPU = partition("cpu", [(CPUS, 200)], Default="YES")


def loaded(tmp_path, text):
    (path := tmp_path / "found.toml").write_text(text)
    return load_profile(str(path))


EMPTY = partition("empty", [])
ALIKE = partition("alike", [(V100, 3), (replace(V100, cpus=20), 2)], MaxTime="3:00:00", DefaultTime="NONE")
WHOLE = partition("whole", [(NodeKind(4, None, 8, 2048, ()), 9)], MaxTime="UNLIMITED", OverSubscribe="EXCLUSIVE",
                  AllowAccounts="none")  # fmt: skip
ACCOUNTS, QOS = ("abc@a100", "xyz"), ("normal", "gpu_normal", "gpu_long")
SITES = {
    "gpu": a_site(CPU, GPU, EMPTY, accounts=ACCOUNTS, qos=QOS),
    "cpu": a_site(CPU, GPU, accounts=ACCOUNTS[:1], qos=QOS[:1], config={}),
    "alike": a_site(ALIKE, config={"JobRequeue": "0"}),
    "whole": a_site(WHOLE, accounts=ACCOUNTS, qos=QOS),
}
PROFILES = dict(
    re.findall(
        r"^== (\w+)\n(.*?)(?=^==|\Z)", Path(__file__).with_name("profiles.txt").read_text(), re.DOTALL | re.MULTILINE
    )
)


@pytest.mark.parametrize("name", SITES)
def test_a_profile_and_its_choice_are_as_written(name):
    """The first profile whole, of the others what Slurm says of them."""
    found = SITES[name]
    text = profile_text(found, found.partitions[name])
    shown = text if name == "gpu" else text.split("\n\n")[1] + "\n"
    choice = "".join(f"{line}\n" for line in choice_lines(found, found.partitions[name]))
    assert f"{shown}\n{choice}" == PROFILES[name]


def test_a_profile_with_all_that_slurm_says(tmp_path):
    chosen = choose_partition(SITES["gpu"], None)
    assert chosen is GPU, "the default partition has no GPUs"
    profile = loaded(tmp_path, profile_text(SITES["gpu"], chosen))
    asked = (profile.device, profile.gpus_per_node, profile.gpu_type, profile.cpus_per_node, profile.constraint)
    assert asked == ("a100-80g", 8, "a100", 128, "a100")
    assert (profile.partition, profile.account, profile.qos) == ("gpu", "abc@a100", "gpu_normal")
    # Slurm gives DefaultTime to a job without a limit; it is not the partition's limit.
    assert (profile.time, profile.chain, profile.gpu_flag) == ("24:00:00", "requeue", "gres")


ANSWERS = {
    "scontrol show config": "Configuration data as of now\nClusterName = dahu\nJobRequeue  = 1\n",
    "sinfo -h -N -o %N|%R|%c|%m|%G|%f": "n1|fast|96|515000|gpu:a100:4(S:0-1)|ib,big\n"
    "n2|fast|64+|256000+|(null)|(null)\nn3|fast|64|256000|(null)|(null)\nn1|all|96|515000|gpu:a100:4|ib,big\n"
    "slurmd: error\n",
    "scontrol --oneliner show partition": "PartitionName=fast Default=NO State=UP MaxNodes=2\n"
    "PartitionName=all Default=YES State=DOWN\nPartitionName=none\n\n",
    # A site's banner, and columns of its own.
    "sacctmgr -nP show assoc cluster=dahu user=ada format=Account,QOS,DefaultQOS": "Welcome to dahu\n"
    "abc|normal,long|long\nxyz|fast||more\n",
    "sacctmgr -nP show user ada cluster=dahu withassoc format=User,DefaultAccount": "Welcome to dahu\nada|xyz\n",
    "scontrol --oneliner show node n1": "NodeName=n1 ThreadsPerCore=2 CPUTot=8\n",
    "scontrol --oneliner show node n2": "NodeName=n2 CPUTot=8\n",
}


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """The folder of what Slurm's clients print to ada."""
    return fake_clients(tmp_path, monkeypatch, ANSWERS)


def test_a_site_is_what_slurms_clients_print(answers):
    n1, n2 = NodeKind(4, "a100", 96, 515000, ("big", "ib")), NodeKind(0, None, 64, 256000, ())
    fast = {"PartitionName": "fast", "Default": "NO", "State": "UP", "MaxNodes": "2"}
    whole = {"PartitionName": "all", "Default": "YES", "State": "DOWN"}
    found = Site(
        "dahu",
        {"ClusterName": "dahu", "JobRequeue": "1"},
        {
            "fast": SlurmPartition("fast", fast, {n2: ["n2", "n3"], n1: ["n1"]}),
            "all": SlurmPartition("all", whole, {n1: ["n1"]}),
            "none": SlurmPartition("none", {"PartitionName": "none"}, {}),
        },
        ("xyz", "abc"),
        ("long", "normal", "fast"),
        frozenset({"big", "ib"}),
    )
    assert read_site() == found
    assert list(read_site().partitions["fast"].kinds) == [n2, n1], "the most frequent first"
    assert [count_gpus(each, 4) for each in found.partitions.values()] == [4, 4, 0]
    assert [each.is_up for each in found.partitions.values()] == [True, False, False]
    assert choose_partition(found, None).name == "fast", "which is up"
    associations, default = (words for words in ANSWERS if words.startswith("sacctmgr"))
    (answers / default).unlink()
    assert read_site() == replace(found, accounts=("abc", "xyz"))
    (answers / associations).unlink()
    assert read_site() == replace(found, accounts=(), qos=())
    (answers / "scontrol --oneliner show partition").unlink()
    with pytest.raises(JobRefused, match=r"^scontrol: cat: .*No such file") as refused:
        read_site()
    assert refused.value.hint == "is Slurm set up?"


def test_a_site_without_a_partition_and_one_that_does_not_answer(answers):
    with pytest.raises(ConfigError, match=r"^dahu has no partition that you may see$") as refused:
        choose_partition(a_site(), None)
    assert refused.value.hint == "ask its administrators"
    (answers.parent / "sinfo").write_text("#!/bin/bash\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    with pytest.raises(SlurmUnreachable, match=r"^sinfo: Unable to contact slurm controller") as unreachable:
        read_site()
    assert unreachable.value.hint == "is slurmctld up?"


def test_a_partition_of_its_own_choice(tmp_path):
    found = a_site(CPU, GPU)
    profile = loaded(tmp_path, profile_text(found, choose_partition(found, "cpu")))
    assert (profile.device, profile.gpu_flag, profile.gpus_per_node) == ("cpu", "none", 1)
    with pytest.raises(ConfigError, match="no partition 'gqu' on dahu") as refused:
        choose_partition(found, "gqu")
    assert "gpu" in refused.value.hint


@pytest.mark.parametrize("gpu_type", ["a100_80gb", "a100", "tesla", None])
def test_with_its_last_lines_filled_in_init_has_what_it_wants(tmp_path, gpu_type):
    gpus = partition("gpu", [(NodeKind(8, gpu_type, 128, 1031000, ()), 12)])
    text, lines = profile_text(a_site(gpus), gpus), lines_to_fill_in(a_site(gpus), gpus)
    *_, end = text.partition("remove the #.\n")
    assert end.splitlines() == [f"# {line}" for line in lines]
    (tmp_path / "mine.toml").write_text(text.removesuffix(end) + "".join(f"{line}\n" for line in lines))
    asked = ("init", "big", "--model", "gpt2-xl", "--gpus", "16", "--cluster", "mine.toml")
    in_process(*asked, cwd=tmp_path, code=0)
    assert (tmp_path / "big.toml").is_file()


def test_names_that_would_break_the_file_do_not(tmp_path):
    odd = partition('g"p\\u', [(NodeKind(4, 'a"b', 8, 1000, ('x"y',)), 1)], MaxTime="1\n00")
    found = a_site(odd, accounts=('a"\nb = 1',))
    profile = loaded(tmp_path, profile_text(found, odd))
    assert (profile.partition, profile.gpu_type, profile.account) == ('g"p\\u', 'a"b', 'a"\nb = 1')


@pytest.mark.parametrize(
    ("gpu_type", "features", "devices"),
    [
        ("a100", (), ["a100-40g", "a100-80g", "a100-64g"]),
        ("a100_80gb", (), ["a100-80g"]),
        ("a100", ("gpu-80g",), ["a100-80g"]),
        (None, ("v100-16g",), ["v100-16g"]),
        ("h200", (), ["h200"]),
        ("nvidia_h100_80gb_hbm3", (), ["h100-80g"]),
        ("nvidia_h100_nvl", (), ["h100-nvl"]),
        ("nvidia_a100_80gb_pcie", (), ["a100-pcie-80g"]),
        ("a100", ("gpu", "hbm80g"), ["a100-80g"]),
        (None, ("gh", "gpu"), ["gh200", "gh200-144g"]),
        ("tesla", ("ib",), []),
        (None, (), []),
    ],
)
def test_devices_are_guessed_from_type_and_features(gpu_type, features, devices):
    assert guess_device(NodeKind(4, gpu_type, 8, 1000, features)) == devices


@pytest.mark.parametrize(
    ("gres", "gpus", "gpu_type"),
    [
        ("gpu:4(S:0-1)", 4, None),
        ("gpu:a100:8(S:0,1)", 8, "a100"),
        ("gpu:a100:3,gpu:t4:1", 3, "a100"),
        ("craynetwork:4,gpu:2", 2, None),
        ("(null)", 0, None),
        ("gpu:1g.5gb:7", 7, "1g.5gb"),
    ],
)
def test_gres_as_sinfo_prints_it(gres, gpus, gpu_type):
    kind = site._kind("96+", "1031000+", gres, "(null)")
    assert (kind.gpus, kind.gpu_type, kind.cpus, kind.memory_mib, kind.features) == (gpus, gpu_type, 96, 1031000, ())


def test_a_partition_without_nodes_has_no_kind():
    empty = partition("empty", [])
    assert choose_kind(empty) is None
    with pytest.raises(ConfigError, match="has no nodes"):
        profile_text(a_site(empty), empty)


def test_the_few_nodes_with_gpus_go_before_the_many_without():
    assert choose_kind(partition("mixed", [(CPUS, 200), (A100, 4)])) == A100
