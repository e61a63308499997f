"""Which GPUs of this machine a run gets, what it waits for, and what it hands on: each by its names and locks."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.launcher.launch.local import gpus
from tests.made_runs import make_run
from tests.programs import put


def test_a_run_takes_free_gpus_in_order_or_says_who_has_them(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "logs", submit=False) for _ in range(4)]

    def take(number: int, count: int, after: tuple[str, ...] = ()) -> tuple[gpus.HeldGpus | None, str]:
        return gpus.take_for(runs[number], replace(runs[number].resolved(), gpus=count), ["0", "a/1", "2"], after)

    first, second = take(0, 1)[0], take(1, 1)[0]
    assert (first.names, second.names, len(first.locks)) == (["0"], ["a/1"], 1)
    names = [runs[number].run_id for number in (0, 1)]
    taken = f"waits for 2 of GPUs 0,a/1,2; taken: 0 by run {names[0]}, a/1 by run {names[1]}"
    assert take(2, 2) == (None, taken)
    assert take(2, 1, ("x", "y")) == (None, "waits for 1 of GPUs 0,a/1,2, after run y")
    assert take(2, 4) == (gpus.HeldGpus(), ""), "too few for it: its ranks are on the CPU"
    first.free()
    held = take(3, 2)[0]
    assert (held.names, first.locks) == (["0", "2"], [])
    for each in (second, held):
        each.free()


def test_the_gpus_go_to_the_process_that_supervises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "bin/nvidia-smi", "#!/bin/sh\necho 'X, 1, 1'; echo 'X, 1, 1'\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for shown, names in ((None, ["0", "1"]), ("1, GPU-x", ["1", "GPU-x"]), ("", []), ("-1", []), ("NoDevFiles", [])):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if shown is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert gpus.choice_in(gpus.choice()) == names
    reads, writes = os.pipe()
    held = gpus.HeldGpus(["0", "1"], [reads, writes])
    assert held.visible() == {"CUDA_VISIBLE_DEVICES": "0,1"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert held.visible() == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert (gpus.HeldGpus().visible(), gpus.HeldGpus().environment()) == ({}, {})
    for name, value in held.environment().items():
        monkeypatch.setenv(name, value)
    os.set_inheritable(reads, True)
    assert gpus.handed_over() == held
    assert (os.get_inheritable(reads), gpus.handed_over()) == (False, gpus.HeldGpus())
    held.free()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reads)


def test_places_are_in_the_order_of_coming_and_a_dead_ones_goes() -> None:
    assert gpus.waiting() == []
    with gpus.place_in_queue("a") as first, gpus.place_in_queue("b") as second:
        assert (gpus.waiting(), gpus.waiting(first), gpus.waiting(second)) == (["a", "b"], [], ["a"])
        dead = gpus._folder() / "queue" / second.replace(str(os.getpid()), "0")
        dead.write_text("c")
        assert (gpus.waiting(), dead.exists()) == (["a", "b"], False)
    assert gpus.waiting() == []
