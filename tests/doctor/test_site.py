"""Profiles of sites that are not at hand, from what their Slurm says."""

import pytest

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.launcher.doctor import site
from hpc_gpt.launcher.doctor.site import (
    NodeKind,
    Site,
    SlurmPartition,
    choice_lines,
    choose_kind,
    choose_partition,
    guess_device,
    lines_to_fill_in,
    profile_text,
)
from tests.cli.command import in_process

A100 = NodeKind(8, "a100", 128, 1031000, ("a100", "a100_80gb", "ib"))
V100 = NodeKind(4, "v100", 40, 192000, ("ib", "v100", "v100-32g"))
CPUS = NodeKind(0, None, 64, 256000, ("milan",))


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    monkeypatch.setattr(site, "threads_per_core", lambda node: 2)


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


def test_a_profile_with_all_that_slurm_says(tmp_path):
    found = a_site(CPU, GPU, accounts=("abc@a100", "xyz"), qos=("normal", "gpu_normal", "gpu_long"))
    chosen = choose_partition(found, None)
    assert chosen is GPU, "the default partition has no GPUs"
    profile = loaded(tmp_path, profile_text(found, chosen))
    assert (profile.device, profile.gpus_per_node, profile.gpu_type, profile.cpus_per_node) == (
        "a100-80g",
        8,
        "a100",
        128,
    )
    assert (profile.partition, profile.account, profile.qos) == ("gpu", "abc@a100", "gpu_normal")
    assert profile.constraint in ("a100", "a100_80gb"), "which the partition's V100 nodes do not have"
    assert (profile.time, profile.chain, profile.gpu_flag) == ("01:00:00", "requeue", "gres")
    text = profile_text(found, chosen)
    assert "# or gpu_long" in text
    assert "hardware threads a core" in text
    assert "cannot be checked here" in text
    lines = "\n".join(choice_lines(found, chosen))
    for words in ("--partition takes another: cpu", "* 12 nodes: 8 a100 GPUs", "  5 nodes: 4 v100 GPUs"):
        assert words in lines


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
    text, lines = profile_text(a_site(gpus), gpus), lines_to_fill_in(gpus)
    *_, end = text.partition("take the # away.\n")
    assert end.splitlines() == [f"# {line}" for line in lines]
    (tmp_path / "mine.toml").write_text(text.removesuffix(end) + "".join(f"{line}\n" for line in lines))
    asked = ("init", "big", "--model", "gpt2-xl", "--gpus", "16", "--cluster", "mine.toml")
    in_process(*asked, cwd=tmp_path, code=0)
    assert (tmp_path / "big.toml").is_file()


def test_a_site_that_does_not_requeue_submits_the_chain_ahead(tmp_path):
    found = a_site(GPU, config={"JobRequeue": "0"})
    assert loaded(tmp_path, profile_text(found, GPU)).chain == "singleton"


def test_what_may_not_use_the_partition_is_not_written(tmp_path):
    found = a_site(GPU, accounts=("abc",), qos=("normal",))
    assert loaded(tmp_path, profile_text(found, GPU)).qos is None
    assert "none of yours (normal) may use this partition" in profile_text(found, GPU)


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
