"""Which GPUs of this machine a run gets, what it waits for, and what it hands on: each by its names and locks."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.errors import JobRefused, RunFolderError
from hpc_gpt.core.machine import find_gpus
from hpc_gpt.launcher.local import gpus
from tests.made_runs import make_run
from tests.programs import put
from tests.waiting import patient


def named(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def take(run: str, count: int, may_have: dict[str, str], before: dict[str, list[str]] | None = None):
    return gpus.take_for(run, count, may_have, before or {})


def test_a_run_takes_free_gpus_in_order_or_says_who_has_them(tmp_path: Path) -> None:
    run = make_run(tmp_path / "logs", submit=False)
    assert [gpus.needed(replace(run.resolved(), gpus=count), "012") for count in (2, 4)] == [2, 0], (
        "too few: on the CPU"
    )
    three = named("0", "a/1", "2")
    first, second = take("r", 1, three)[0], take("s", 1, three)[0]
    assert (first.names, second.names, len(first.locks)) == (["0"], ["a/1"], 1)
    assert take("t", 2, three) == (None, "waits for 2 of GPUs 0,a/1,2; taken: 0 by run r, a/1 by run s")
    assert take("t", 1, three, {"x": [], "y": []}) == (None, "waits for 1 of GPUs 0,a/1,2, after run y")
    assert take("t", 0, three) == (gpus.HeldGpus(), "")
    first.free()
    held = take("u", 2, three)[0]
    assert (held.names, first.locks) == (["0", "2"], [])
    for each in (second, held):
        each.free()


def test_a_run_waits_behind_those_alone_that_want_the_same_gpus() -> None:
    four = named("0", "1", "2", "3")
    holder = take("holder", 1, named("0"))[0]
    with gpus.place_in_queue("first", named("0")):
        other = take("second", 2, four, gpus.waiting())[0]
        assert other.names == ["1", "2"]
        with gpus.place_in_queue("third", four) as place:
            words = "waits for 3 of GPUs 0,1,2,3, after run first; taken: 1,2 by run second"
            assert take("third", 3, four, gpus.waiting(place)) == (None, words)
            # One is free, and may not go to a later run again and again.
            last = (None, "waits for 1 of GPUs 3, after run third")
            assert take("last", 1, named("3"), gpus.waiting()) == last
    for each in (holder, other):
        each.free()


A, B, MIG = "GPU-a1111111-2222-3333-4444-555555555555", "GPU-b1111111-2222-3333-4444-555555555555", "MIG-c7"
LISTED = f"""GPU 0: NVIDIA A100 (UUID: {A})
  MIG 3g.20gb     Device  0: (UUID: {MIG})
  MIG 3g.20gb     Device  1: (UUID: MIG-d8)
GPU 1: NVIDIA A100 (UUID: {B})
"""


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: str = "", then: str = "", instances: str = LISTED) -> None:
    text = f"#!/bin/sh\nif [ \"$1\" = -L ]; then cat <<'E'\n{instances}E\nexit; fi\ncat <<'E'\n{rows}E\n{then}\n"
    put(folder / "bin/nvidia-smi", text)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("shown", "names"),
    [
        (None, {"0": A, "1": B}),
        (f"GPU-b, 0,{B},0", {"GPU-b": B, "0": A}),
        ("GPU-,1", {}),  # the first letters of two
        ("1,GPU-c,0", {"1": B}),
        ("0,7,1", {"0": A}),
        ("0,-1,1", {"0": A}),
        ("MIG-c7,MIG-d8,0", {"MIG-c7": "MIG-c7", "MIG-d8": "MIG-d8", "0": A}),
    ],
)
def test_a_gpu_is_locked_by_its_uuid_whatever_cuda_is_told(tmp_path, monkeypatch, shown, names) -> None:
    smi(tmp_path, monkeypatch, f"X, [N/A], 580.95, 0, {A}\nX, [N/A], 580.95, 1, {B}\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert gpus.choice_in(gpus.choice()) == names
    assert gpus.choice(asks=False) == {}


@pytest.mark.parametrize(
    ("rows", "then", "words"),
    [
        (f"X, 1, 1, 1, {B}\n", "echo 'GPU is lost'; exit 15", "ended with exit code 15: GPU is lost"),
        (f"X, 1, 1, 0, {A}\n[GPU is lost], [N/A], 1, 1, {B}\n", "", "ended with exit code 0: [GPU is lost], "),
        ("", "echo 'Failed to initialize NVML: Unknown Error'; exit 255", "exit code 255: Failed to initialize NVML"),
        ("", "exec sleep 6000", "nvidia-smi has not answered within 0.4 s"),
        ("", "exit 3", "nvidia-smi ended with exit code 3"),
    ],
)
def test_gpus_that_are_not_known_are_refused(tmp_path, monkeypatch, capfd, rows, then, words):
    smi(tmp_path, monkeypatch, rows, then)
    first_s, most_s = (0.2, 0.4) if "sleep" in then else (patient(300), patient(600))
    monkeypatch.setattr(gpus, "_PATIENCE_S", most_s)
    monkeypatch.setattr(find_gpus.ask_gpus, "__defaults__", (first_s,))
    for shown in (None, "0", "GPU-b1,GPU-e"):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if shown is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        with pytest.raises(JobRefused) as fault:
            gpus.choice()
        assert words in str(fault.value)
        assert "--now" in fault.value.hint
    assert (f"asking for up to {most_s:g} s" in capfd.readouterr().err) is (not rows)
    assert find_gpus.has_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", B)
    assert gpus.choice_in(gpus.choice()) == {B: B}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert gpus.choice() == {}


@pytest.mark.parametrize(
    ("rows", "then"),
    [
        ("", ""),
        ("No devices were found\n", ""),
        ("No devices were found\n", "exit 6"),
        ("", 'echo "NVIDIA-SMI has failed because it couldn\'t communicate with the NVIDIA driver."; exit 9'),
        ("", 'echo "NVIDIA-SMI couldn\'t find libnvidia-ml.so library in your system."; exit 12'),
    ],
)
def test_a_machine_without_gpu_or_driver_has_none(tmp_path, monkeypatch, rows, then):
    smi(tmp_path, monkeypatch, rows, then)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (gpus.choice(), find_gpus.has_gpus()) == ({}, False)


def test_a_slow_answer_is_waited_for(tmp_path, monkeypatch, capfd):
    smi(tmp_path, monkeypatch, "NVIDIA GB10, [N/A], 580.95\n", "sleep 1")
    monkeypatch.setattr(find_gpus.ask_gpus, "__defaults__", (0.2,))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus.choice_in(gpus.choice()) == {"0": "0"}
    assert capfd.readouterr().err == "nvidia-smi has not answered within 0.2 s; asking for up to 60 s\n"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_is_a_hint(monkeypatch, number):
    def flock(file: int, kind: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(gpus.fcntl, "flock", flock)
    for use in (lambda: take("r", 1, named("0")), lambda: gpus.await_gpus("r", 1, named("0"))):
        with pytest.raises(RunFolderError, match=os.strerror(number)) as fault:
            use()
        assert "HPC_GPT_STATE" in fault.value.hint
    assert not list((gpus._folder() / "queue").glob(".*"))


def test_the_gpus_go_to_the_process_that_supervises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "bin/nvidia-smi", "#!/bin/sh\necho 'X, 1, 1'; echo 'X, 1, 1'\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for shown, names in ((None, ["0", "1"]), ("1, GPU-x", ["1", "GPU-x"]), ("", []), ("-1", []), ("NoDevFiles", [])):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if shown is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert list(gpus.choice_in(gpus.choice())) == names
    reads, writes = os.pipe()
    held = gpus.HeldGpus(["0", "1"], [reads, writes])
    assert held.visible() == {"CUDA_VISIBLE_DEVICES": "0,1"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert held.visible() == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert (gpus.HeldGpus().visible(), gpus.HeldGpus().environment()) == ({}, {})
    for name, value in held.environment().items():
        monkeypatch.setenv(name, value)
    os.set_inheritable(reads, True)
    assert gpus.take_over() == held
    assert (os.get_inheritable(reads), gpus.take_over()) == (False, gpus.HeldGpus())
    held.free()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reads)


def test_places_are_in_the_order_of_coming_and_a_dead_ones_goes() -> None:
    assert gpus.waiting() == {}
    with gpus.place_in_queue("a", named("0")) as first, gpus.place_in_queue("b", named("0", "1")) as second:
        both = {"a": ["0"], "b": ["0", "1"]}
        assert (gpus.waiting(), gpus.waiting(first), gpus.waiting(second)) == (both, {}, {"a": ["0"]})
        dead = gpus._folder() / "queue" / second.replace(str(os.getpid()), "0")
        dead.write_text("c")
        assert (gpus.waiting(), dead.exists()) == (both, False)
    assert gpus.waiting() == {}
