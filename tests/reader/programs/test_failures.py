"""Patterns of failures: each is there for a line, has a class and words, and takes no long time."""

import re
from pathlib import Path

import pytest

from hpc_gpt.core.ends.failures import ENDED
from hpc_gpt.reader.failures.part_failures import one_a_line
from hpc_gpt.reader.lines.dialects import dialects
from hpc_gpt.reader.lines.matches import all_patterns
from tests.reader.reading import read_lines, specimen_of
from tests.reader.test_printed import FILES, MADE, logs_of

FAILURES, ENDS = (Path(__file__).with_name(name) for name in ("failures.txt", "ends.txt"))
FAMILIES = ("failure_families", "amd_faults", "fabric_faults")
OURS = {
    "collectives",
    "gpu_faults",
    "launchers",
    "memory_exhausted",
    "python_exceptions",
    "slurm_words",
    "training_stopped",
}


def test_every_pattern_matches_a_line_of_its_specimen() -> None:
    """Or one whose figures are stated in printed/."""
    stated = [file.read_text(encoding="utf-8").split("\n") for file in FILES if file.stem not in MADE]
    printed = [line for given in stated for lines in logs_of(given).values() for line in lines]
    for dialect in dialects():
        if dialect.name in (*FAMILIES, "program_ends"):  # failures.txt, ends.txt
            continue
        own = specimen_of(dialect.name).splitlines()
        for each in all_patterns():
            if each.dialect is dialect and each.pattern.kind != "traceback":
                lines = own if dialect.name in OURS else [*own, *printed]
                assert any(each.pattern.literal in line and each.regex.search(line) for line in lines), (
                    each.pattern.regex
                )
        for line in own if dialect.name in OURS else ():
            assert any(part.failures or part.ends or part.facts for part in read_lines("a", [line])), line


CUDA = {
    802: ("SystemNotReady", "SYSTEM_NOT_READY", "system not yet initialized", "node_failure"),
    803: ("SystemDriverMismatch", "SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver", "node_failure"),
    804: ("CompatNotSupportedOnDevice", "COMPAT_NOT_SUPPORTED_ON_DEVICE", "forward compatibility was attempted on non",
          "node_failure"),
    999: ("Unknown", "UNKNOWN", "CUDA unknown error", "node_failure"),
    214: ("ECCUncorrectable", "ECC_UNCORRECTABLE", "uncorrectable ECC error encountered", "node_failure"),
    220: ("NvlinkUncorrectable", "NVLINK_UNCORRECTABLE", "uncorrectable NVLink error", "node_failure"),
    35: ("InsufficientDriver", "INSUFFICIENT_DRIVER", "driver version is insufficient", "user_error"),
    209: ("NoKernelImageForDevice", "NO_KERNEL_IMAGE_FOR_DEVICE", "no kernel image is available", "user_error"),
    222: ("UnsupportedPtxVersion", "UNSUPPORTED_PTX_VERSION", "compiled with an unsupported toolchain", "user_error"),
    200: ("InvalidKernelImage", "INVALID_KERNEL_IMAGE", "device kernel image is invalid", "user_error"),
    34: ("StubLibrary", "STUB_LIBRARY", "CUDA driver is a stub library", "user_error"),
    98: ("InvalidDeviceFunction", "INVALID_DEVICE_FUNCTION", "invalid device function", "user_error"),
    100: ("NoDevice", "NO_DEVICE", "no CUDA-capable device is detected", "user_error"),
    101: ("InvalidDevice", "INVALID_DEVICE", "invalid device ordinal", "user_error"),
}  # fmt: skip


@pytest.mark.parametrize("code", CUDA)
def test_an_error_of_cuda_is_read_by_number_name_and_words(code: int) -> None:
    name, constant, words, ended = CUDA[code]
    forms = (
        f"CUDA error {code}", f"CUDA error: {code}", f"CUDA error ({code})", f"CUDA failure {code}",
        f"cuda code {code}", f"cudaError{name}", f"CUDA_ERROR_{constant}", f"hipError{name}", f"CUDA error: {words}",
    )  # fmt: skip
    for form in forms:
        failures = [each for part in read_lines("a", [f"RuntimeError: {form}"]) for each in part.failures]
        assert {each.ended for each in failures if each.ended != "error"} == {ended}, form
        assert all("RuntimeError" in each.message for each in failures)


def test_every_family_has_a_line_with_its_class_and_advice() -> None:
    """failures.txt: class, rank, node and cure, or none, and below them lines that report this one failure."""
    stated, kind = set(), ""
    for line in FAILURES.read_text(encoding="utf-8").splitlines():
        if not line.startswith("> "):
            kind = line
            continue
        line = line.removeprefix("> ")
        failures = one_a_line([each for part in read_lines("a", [line]) for each in part.failures])
        if kind == "none":
            assert not failures, line
            continue
        (found,) = failures
        rank, node = f" rank {found.rank}" * (found.rank is not None), f" on {found.node}" * bool(found.node)
        of = f"{found.ended}{' of another' * found.echo}"
        assert f"{of}{rank}{node}" + f": {found.to_do}" * bool(found.to_do) == kind, line
        assert line.endswith(found.message)
        stated.add((of, found.to_do))
    known = [each for dialect in dialects() if dialect.name in FAMILIES for each in dialect.patterns]
    assert stated >= {(f"{each.ended}{' of another' * each.echo}", each.to_do) for each in known}


def test_the_words_of_an_end() -> None:
    """They count after lines of steps if at most one follows, printed late; a launcher's without any."""
    steps = [f"step:{step}/100 train_time:{50 * step}ms step_avg:50.00ms" for step in range(6, 10)]
    for each in ENDS.read_text(encoding="utf-8").splitlines():
        kind, _, line = each.partition(" > ")
        ended, _, alone = kind.partition(" ")
        expected = set() if ended == "none" or kind.startswith("#") else {ended}
        for lines, found in (
            ([*steps, line], expected),
            ([*steps[:3], line, steps[3]], expected),
            ([*steps[:2], line, *steps[2:]], set()),
            ([line], expected if alone else set()),
        ):
            assert {kind for part in read_lines("a", lines) for kind, _ in part.ends} == found, lines


def test_every_class_is_a_records_and_every_failure_has_words() -> None:
    for dialect in dialects():
        for pattern in dialect.patterns:
            if pattern.kind == "failure":
                assert pattern.ended in ENDED, pattern
            if pattern.kind == "failure" and dialect.name in OURS:
                assert "words" in re.compile(pattern.regex).groupindex, pattern


HOSTILE = [
    " " * 60_000 + "rror",
    "|" * 60_000 + "Error",
    "a." * 30_000 + "Error",
    "[x]" * 20_000 + "Error: ",
    "1: " * 20_000 + "Exception",
    "A" * 60_000 + "Error",
    "x " * 30_000 + "No space left on device rror",
    "4711|" + "a" * 60_000 + "TIMEOUT FAIL CANCELLED",
    "NCCL WARN" * 6_000,
    "(" * 60_000 + "rror NCCL exit ignal Kill host  (local_rank srun: : line NaN",
    "host      " * 6_000,
    "Assertion `" * 5_000,
    "line 1: " * 8_000,
]


def test_a_hostile_line_is_read_in_a_moment() -> None:
    """A regex that goes back over its steps would take hours here."""
    for line in HOSTILE:
        assert len(read_lines("a", [line] * 3)) >= 1
