"""The machine of a device, a fabric, a profile; and what is asked for if they do not say."""

import math
from pathlib import Path

import pytest

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.cluster import list_profiles, load_profile
from hpc_gpt.core.settings.devices import DEVICES
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.launcher.request import compiles
from hpc_gpt.planner.constants import GENERATIONS, VALUES
from hpc_gpt.planner.links import Links
from hpc_gpt.planner.machine import DEFAULT, check_reach, generation_of, machine_of, parse_fabric
from hpc_gpt.planner.training import with_choices
from tests.planner.machines import machine_named


def write(folder: Path, text: str) -> str:
    (path := folder / "site.toml").write_text(text)
    return str(path)


def test_every_device_has_its_rates_and_a_source():
    for device in DEVICES.values():
        check_device(device)


def check_device(device):
    machine = machine_named(device.name, 4, None)
    rates = (machine.memory_gib, machine.memory_gb_s, machine.node_gb_s, machine.host_gb_s, *device.peaks.values())
    assert all(math.isfinite(rate) and rate > 0 for rate in rates)
    assert machine.host_gb_s <= machine.memory_gb_s
    assert device.source
    # Seconds to read the whole memory once: no data sheet is off by a power of ten.
    assert 0.01 < machine.memory_gib * 2**30 / (machine.memory_gb_s * 1e9) < 0.5


@pytest.mark.parametrize(
    "device", [device for device in DEVICES.values() if not device.nominal], ids=lambda it: it.name
)
def test_every_device_has_the_constants_of_its_generation(device):
    generation = generation_of(machine_named(device.name, 4, None))
    assert generation in GENERATIONS
    assert device.cuda is (device.generation is None), "NVIDIA's follow from their formats"
    assert {f"products.{generation}.none", f"kernels.fa2.{generation}"} <= set(VALUES)


@pytest.mark.parametrize(
    ("words", "gb_s"),
    [
        ("omni-path 4x100G", 50),
        ("infiniband 8x200G", 200),
        ("infiniband 8xHDR", 200),
        ("ib 3200 Gbps", 400),
        ("roce 1600G", 200),
        ("RoCE 8 x 400 Gb/s", 400),
        ("roce 1.6T", 200),
        ("ethernet 100GbE", 12.5),
        ("nvlink + infiniband 4x200G", 100),
        ("infiniband 4x200G + ethernet 2x100G", 125),
        ("InfiniBand HDR 4x200G", 100),
        ("infiniband NDR", 50),
        ("Infiniband 8xNDR400 (8x400Gb/s)", 400),
        ("infiniband 25GB/s", 25),
        ("omni_path 4x100G", 50),
        ("slingshot-11 4x200G", 100),
        ("nvlink", 0),
        ("nvlink 600GB/s", 0),
        ("pcie", 0),
    ],
)
def test_what_a_fabric_brings_a_node(words, gb_s):
    assert parse_fabric(words).network_gb_s == pytest.approx(gb_s)


def test_nvlink_that_joins_hosts_makes_one_node_of_them():
    machine = machine_named("gb200", 4, "infiniband 4x400G")
    assert (machine.gpus_per_node, machine.network_gb_s) == (72, 18 * 200)
    assert machine_named("gb200", 72, "nvlink").gpus_per_node == 72
    assert machine_named("b200", 8, "nvlink").gpus_per_node == 8


@pytest.mark.parametrize("name", list_profiles())
def test_shipped_profiles_tell_all_or_say_what_is_missing(name):
    profile = load_profile(name)
    if profile.device is not None:
        assert (machine_of(profile).network_gb_s > 0) == ("fabric" not in (profile.to_add or {}))
    else:
        with pytest.raises(ConfigError, match=f"^profile {name} names no device$") as fault:
            machine_of(profile)
        assert "fabric and device" in fault.value.hint


@pytest.mark.parametrize(
    ("device", "each_of", "all_four"), [("v100-32g", 50, 150), ("a100-80g", 100, 300), ("gh200", 150, 450)]
)
def test_a_pair_on_a_board_of_four_has_a_third_of_its_links(device, each_of, all_four, tmp_path):
    """2 of 6 links of 25 GB/s on V100, 4 of 12 on A100, 6 of 18 on GH200; eight have a switch."""
    board = Links(machine_named(device, 4, "infiniband 4x200G"), DEFAULT)
    rates = [board.inside_b_s(members) / 1e9 / DEFAULT.node for members in (2, 4)]
    assert rates == pytest.approx([each_of, all_four])
    assert board.ring_s(1e9, 2) == pytest.approx(0.5e9 / (each_of * 1e9 * DEFAULT.node), rel=1e-3)
    assert Links(machine_named(device, 8, "infiniband 4x200G"), DEFAULT).inside_b_s(2) == board.inside_b_s(4)
    profile = f'device = "{device}"\nfabric = "infiniband 4x200G"\ngpus_per_node = 4\n'
    assert not machine_of(load_profile(write(tmp_path, profile))).switched
    assert machine_of(load_profile(write(tmp_path, profile + "[machine]\nswitched = true\n"))).switched
    # Four GPUs of a rack that a switch joins are no board.
    assert machine_named("gb200", 4, "infiniband 4x400G").switched
    assert machine_named("b200", 4, "infiniband 4x400G").switched, "of NVLink 5"


def test_a_send_takes_as_long_as_its_slowest_boundary():
    """Eight stages of four GPUs on nodes of eight: every second boundary leaves its node, over ports that the four
    GPUs of its stage share; in a node, or with the stages of one node alone, none does."""
    links = Links(machine_named("a100-80g", 8, "ethernet 2x25G"), DEFAULT)
    size = 2 * 2048 * 4096
    inside, across = (
        size / links.node_b_s + links.node_latency_s,
        4 * size / links.network_b_s + links.network_latency_s,
    )
    assert across == pytest.approx(14.37e-3, rel=1e-3)
    assert links.send_s(size, 4, 8) == pytest.approx((across, (inside + across) / 2))
    assert links.send_s(size, 4, 2) == (inside, inside)
    whole = 8 * size / links.network_b_s + links.network_latency_s
    assert links.send_s(size, 8, 2) == links.send_s(size, 32, 2) == pytest.approx((whole, whole))


@pytest.mark.parametrize(("device", "inside"), [("l40s", "pcie"), ("rtx-4090", "pcie"), ("a100-80g", "nvlink")])
def test_a_node_without_a_fabric_has_its_cards_own_links(device, inside, tmp_path):
    machine = machine_of(load_profile(write(tmp_path, f'device = "{device}"\ngpus_per_node = 8\n')))
    assert machine == machine_named(device, 8, inside)
    assert machine.network_gb_s == 0.0
    check_reach(machine, 8)
    with pytest.raises(ConfigError, match="16 GPUs are more than the 8 of a node, and the profile names no fabric"):
        check_reach(machine, 16)


def test_a_profiles_own_figures_stand_before_the_data_sheets(tmp_path):
    text = 'device = "a100-80g"\n[machine]\nnetwork_gb_s = 90.0\nmemory_gib = 70.0\nhost_memory_gib = 900\n'
    machine = machine_of(load_profile(write(tmp_path, text)))
    assert (machine.network_gb_s, machine.memory_gib, machine.host_memory_gib) == (90.0, 70.0, 900)
    assert machine.memory_gb_s == DEVICES["a100-80g"].memory_gb_s


def test_a_device_of_ones_own_needs_its_figures(tmp_path):
    own = 'device = "mi999"\nfabric = "infiniband 8x400G"\n[machine]\nmemory_gib = 191.0\nmemory_gb_s = 5300.0\n'
    whole = own + "node_gb_s = 448.0\nhost_gb_s = 63.0\n[machine.peak_tflops]\nbf16 = 1307.4\n"
    machine = machine_of(load_profile(write(tmp_path, whole)))
    assert (machine.device, machine.network_gb_s, machine.peak_tflops) == ("mi999", 400, {"bf16": 1307.4})
    assert machine.network_latency_s == machine_named("h200", 8, "infiniband 8x400G").network_latency_s > 0


@pytest.mark.parametrize(("dtypes", "compile"), [("bf16 = 900.0, fp16 = 900.0", "block"), ("fp16 = 900.0", "none")])
def test_a_card_of_own_figures_compiles_as_its_formats_say(dtypes, compile, tmp_path):
    own = 'device = "mi999"\nfabric = "infiniband 8x400G"\n[machine]\nmemory_gib = 191.0\nmemory_gb_s = 5300.0\n'
    text = f"{own}node_gb_s = 448.0\nhost_gb_s = 63.0\n[machine.peak_tflops]\n"
    profile = load_profile(write(tmp_path, text + dtypes.replace(", ", "\n") + "\n"))
    assert with_choices(Engine(), (), profile).compile == compile
    assert compiles(profile, {}) == (compile == "block")
