"""What stands in for the product on the device, and what is measured without one: nothing."""

from __future__ import annotations

import time

import pytest
import torch

from hpc_gpt.train.device_probe import DeviceProbe


def probed(monkeypatch: pytest.MonkeyPatch, command: str | None) -> DeviceProbe:
    if command is not None:
        monkeypatch.setenv("HPC_GPT_PROBE_COMMAND", command)
    probe = DeviceProbe(torch.device("cpu"))
    probe.measure()
    until = time.monotonic() + 240
    while command is not None and probe.probe_s is None and not probe._over:
        assert time.monotonic() < until
        time.sleep(0.01)
    return probe


def test_the_command_of_the_preflight_gives_the_figure_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probed(monkeypatch, """echo '{"matmul_tflops": 3, "probe_s": 0.25}'""").probe_s == 0.25


@pytest.mark.parametrize("command", ["exit 3", "echo no", "echo '{}'", """echo '{"error": "no device"}'"""])
def test_a_command_that_gives_none_is_not_asked_again(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    probe = probed(monkeypatch, command)
    assert (probe.probe_s, probe._over) == (None, True)


def test_on_a_cpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probed(monkeypatch, None).probe_s is None
