"""GPUs by AMD are listed by their tools or by the kernel, which also gives their figures. All here are stand-ins."""

from pathlib import Path

import pytest

from hpc_gpt.core.machine import amd_gpus, find_gpus
from hpc_gpt.core.machine.gpu_figures import GpuFigures
from hpc_gpt.launcher.local import gpus
from tests.amd_gpus import MODULE, amd_sysfs, put_amd_smi, put_json
from tests.programs import put

FIRST, SECOND = (f"GPU-{die['unique_id']}" for die in MODULE)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the tools, which has the shell's alone, on a machine whose kernel shows no GPU."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "cat", "sleep"):
        (folder / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("HPC_GPT_SYSFS", str(tmp_path / "none"))
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    return folder


@pytest.mark.parametrize("rocm", [6, 7])
def test_amd_smi_lists_them_in_both_of_its_formats(tools: Path, rocm: int) -> None:
    put_amd_smi(tools, rocm, {}, {"device_id": "0x7fff", "market_name": "AMD Instinct MI999"})
    first, second = find_gpus.list_gpus()
    assert first == {
        "name": "AMD Instinct MI300X", "memory_gib": 192.0, "driver": "6.12.12", "index": "0",
        "uuid": "GPU-5b00000000000000",
    }  # fmt: skip
    assert (second["name"], second["index"], second["uuid"]) == ("AMD Instinct MI999", "1", "GPU-5b00000000000001")


def test_partitions_of_a_gpu_are_told_apart_by_their_places(tools: Path) -> None:
    put_amd_smi(tools, 7, {"asic_serial": "0x9"}, {"asic_serial": "0x9"}, {"asic_serial": "N/A"})
    assert [gpu["uuid"] for gpu in find_gpus.list_gpus()] == ["0000:05:00.0", "0000:06:00.0", "0000:07:00.0"]


ROCM_SMI = {
    "card0": {"Unique ID": "0x1f9de0957d137942", "VRAM Total Memory (B)": "68702699520", "PCI Bus": "0000:C1:00.0",
              "Card Series": "AMD INSTINCT MI200 (MCM) OAM LC MBA HPE C2", "Card Model": "0x7408"},
    "card10": {"Unique ID": "N/A", "VRAM Total Memory (B)": "N/A", "PCI Bus": "0000:DE:00.0",
               "Card series": "N/A", "Device ID": "0x7ffe", "Card Model": "N/A"},
    "card2": {"Device Name": "AMD Instinct MI210", "Device ID": "0x740f", "Unique ID": "0x2"},
    "system": {"Driver version": "6.3.6"},
}  # fmt: skip


def test_rocm_smi_lists_them_without_amd_smi_or_if_that_fails(tools: Path) -> None:
    put(tools / "amd-smi", "#!/bin/sh\necho 'ERROR:root:Unable to detect any GPU devices'; exit 255\n")
    put_json(tools / "rocm-smi", ROCM_SMI, before="WARNING: AMD GPU device(s) is/are in a low-power state.\n\n")
    found = [(gpu["name"], gpu["memory_gib"], gpu["driver"], gpu["uuid"]) for gpu in find_gpus.list_gpus()]
    assert found == [
        ("AMD Instinct MI250X", 64.0, "6.3.6", FIRST),
        ("AMD Instinct MI210", None, "6.3.6", "GPU-0000000000000002"),
        ("AMD GPU 0x7ffe", None, "6.3.6", "0000:de:00.0"),
    ]


@pytest.mark.parametrize("answer", ["exit 255", "sleep 60", "echo '{\"gpu_data\": 3}'", "echo '[7, {}]'", "echo '['"])
def test_the_kernel_lists_them_if_no_tool_does(tools: Path, monkeypatch, answer: str) -> None:
    monkeypatch.setattr(find_gpus.ask_gpus, "__defaults__", (0.2,))
    monkeypatch.setenv("HPC_GPT_SYSFS", str(amd_sysfs(tools.parent / "sys", *MODULE)))
    for name in ("amd-smi", "rocm-smi"):
        put(tools / name, f"#!/bin/sh\n{answer}\n")
    first, second = find_gpus.list_gpus()
    assert (first["name"], first["memory_gib"], first["uuid"]) == ("AMD Instinct MI250X", 64.0, FIRST)
    assert (second["index"], second["uuid"]) == ("1", SECOND), "by their places on the bus, not by the cards' numbers"


def test_nvidias_count_first_and_amds_where_there_are_none(tools: Path, monkeypatch) -> None:
    monkeypatch.setenv("HPC_GPT_SYSFS", str(amd_sysfs(tools.parent / "sys", *MODULE)))
    put(tools / "nvidia-smi", "#!/bin/sh\necho 'No devices were found'; exit 6\n")
    assert len(find_gpus.list_gpus()) == 2
    put(tools / "nvidia-smi", "#!/bin/sh\necho 'NVIDIA H200, 143771, 1, 0, GPU-1'\n")
    assert [gpu["name"] for gpu in find_gpus.list_gpus()] == ["NVIDIA H200"]
    put(tools / "nvidia-smi", "#!/bin/sh\nexit 3\n")
    assert find_gpus.ask_gpus() == ([], "nvidia-smi ended with exit code 3")


@pytest.mark.parametrize(
    ("shown", "names"),
    [
        ({}, {"0": FIRST, "1": SECOND}),
        ({"ROCR_VISIBLE_DEVICES": "1"}, {"0": SECOND}),
        ({"ROCR_VISIBLE_DEVICES": SECOND, "HIP_VISIBLE_DEVICES": "0"}, {"0": SECOND}),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, {"1": SECOND}),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, {"1": SECOND, "0": FIRST}),
        ({"CUDA_VISIBLE_DEVICES": FIRST}, {FIRST: FIRST}),
        ({"ROCR_VISIBLE_DEVICES": "5,0"}, {}),
        ({"HIP_VISIBLE_DEVICES": ""}, {}),
    ],
)
def test_a_gpu_is_locked_by_its_uuid_whatever_hip_is_told(tools: Path, monkeypatch, shown, names) -> None:
    monkeypatch.setenv("HPC_GPT_SYSFS", str(amd_sysfs(tools.parent / "sys", *MODULE)))
    for variable, value in shown.items():
        monkeypatch.setenv(variable, value)
    assert gpus.choice_in(gpus.choice()) == names
    places = {FIRST: "card2", SECOND: "card1"}
    assert [path.parent.name for path in amd_gpus.shown_devices()] == [places[uuid] for uuid in names.values()]
    held = gpus.HeldGpus(["1"]).visible()
    assert (held["CUDA_VISIBLE_DEVICES"], held.get("HIP_VISIBLE_DEVICES")) == (
        "1", "1" if "HIP_VISIBLE_DEVICES" in shown else None
    )  # fmt: skip


def test_the_gpus_of_another_job_are_left_out(tools: Path, monkeypatch) -> None:
    """The kernel shows them all, and the job's cgroup closes their render nodes."""
    own, other = (
        {**die, f"drm/renderD{number}/dev": "226:128"} for die, number in zip(MODULE, (128, 129), strict=True)
    )
    monkeypatch.setenv("HPC_GPT_SYSFS", str(amd_sysfs(tools.parent / "sys", other, own)))
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(amd_gpus, "_RENDER_NODES", tools)
    (tools / "renderD128").touch()
    assert [path.parent.name for path in amd_gpus.shown_devices()] == ["card1"]


def test_each_figure_is_the_drivers_and_none_is_made_up(tools: Path, monkeypatch) -> None:
    mi300 = {"hwmon/hwmon3/power1_average": None, "hwmon/hwmon3/power1_input": 750_400_000,
             "hwmon/hwmon3/temp1_input": None, "pp_dpm_sclk": "S: 132Mhz *\n0: 500Mhz\n1: 2100Mhz"}  # fmt: skip
    bare = {"hwmon/hwmon3/temp1_input": None, "hwmon/hwmon3/temp2_input": None, "gpu_busy_percent": "N/A",
            "pp_dpm_sclk": None, "mem_info_vram_used": None}  # fmt: skip
    monkeypatch.setenv("HPC_GPT_SYSFS", str(amd_sysfs(tools.parent / "sys", *MODULE, mi300, bare)))
    read = [amd_gpus.read_device(device) for device in amd_gpus.shown_devices()]
    assert read[0] == (GpuFigures(97, 40.0, 64.0, 412, 61), 1700.0)
    assert read[1].figures.power_w is None, "of a module's second die"
    assert read[2] == (GpuFigures(97, 40.0, 64.0, 750, 61), 132.0)
    assert read[3] == (GpuFigures(None, None, 64.0, None, None), None)
