"""Checks whose facts a site of its own would need."""

import pytest

from hpc_gpt.launcher.doctor.checks import check_gpus_here, check_signals
from tests.launch.test_render import resolved_demo


@pytest.mark.parametrize(
    ("auth", "kill_wait", "timeout", "warned"),
    [
        ("(null)", 30, 10, False),  # Slurm's own values
        ("cred_expire=120", 30, 10, False),
        ("cred_expire=60", 30, 10, True),
        ("socket=/run/munge,cred_expire=5", 75, 10, True),
        ("cred_expire=5", 75, 90, False),
        ("cred_expire=5", 10, 10, False),
    ],
)
def test_a_site_where_a_late_signal_ends_the_next_attempt(auth, kill_wait, timeout, warned):
    config = {"AuthInfo": auth, "KillWait": f"{kill_wait} sec", "MessageTimeout": f"{timeout} sec"}
    found = check_signals(config)
    assert [check.level for check in found] == ["warn"] * warned
    assert check_signals({}) == []


@pytest.mark.parametrize(
    ("profile", "device", "level"),
    [("local", None, "ok"), ("local", "h100-80g", "fail"), ("generic-slurm", "h100-80g", "ok")],
)
def test_a_machine_without_the_gpus_of_its_profile_is_told(monkeypatch, profile, device, level):
    monkeypatch.setenv("PATH", "")  # without nvidia-smi there are none
    (found,) = check_gpus_here(resolved_demo(profile=profile, device=device))
    assert (found.level, "none here" in found.words) == (level, True)
