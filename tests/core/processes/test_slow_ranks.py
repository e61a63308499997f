"""Slow ranks by their heartbeats: whose rate counts, what is said, and how seldom it is said of sound ranks."""

import math
from dataclasses import replace

import numpy as np
import pytest

from hpc_gpt.core.machine.gpu_figures import GpuFigures
from hpc_gpt.core.processes.heartbeats import LINE_BYTES, RankHeartbeat, line_of
from hpc_gpt.core.processes.slow_ranks import LEAST_PROBES, SLOW_SHARE, ProbeWindow, slow_ranks

BEAT = RankHeartbeat(0, "n0", 1, 1, 10, "training", 0.0, 0.0, 0.0)


def ranks_of(*seconds: float | None, first: float | None = None) -> list[RankHeartbeat]:
    """Two ranks a node, with these times of a probe."""
    return [
        replace(BEAT, rank=rank, host=f"n{rank // 2}", probe_s=probe_s, probe_first_s=first)
        for rank, probe_s in enumerate(seconds)
    ]


@pytest.mark.parametrize(
    ("ranks", "lines"),
    [
        (ranks_of(1.0, 1.0, 1.0, 1.1), []),
        (ranks_of(1.0, 1.0, 1.0, 1.12), ["rank 3 on n1 computes at 0.89 of the median of the other ranks"]),
        (
            ranks_of(1.0, 2.0, 1.0, 1.25, 1.0),
            [
                "rank 1 on n0 computes at 0.50 of the median of the other ranks, "
                "rank 3 on n1 computes at 0.80 of the median of the other ranks"
            ],
        ),
        (ranks_of(1.0, None, None), []),
        (ranks_of(1.0, 2.0), ["rank 1 on n0 computes at 0.50 of the median of the other ranks"]),
        ([replace(BEAT, clock_mhz=1980.0, elapsed_s=1300.0)], ["slow GPUs are not measured: no rank has 10 probes"]),
        ([], []),
        # A rank may have been slower than the others all along: it is not so named, but falls by itself.
        ([*ranks_of(1.0, 1.0, 1.0, 1.0), replace(BEAT, rank=4, host="n2", probe_s=1.08, probe_first_s=0.95)],
         ["rank 4 on n2 computes at 0.88 of its own first hour"]),
        # Two of eight may; three of eight have a cause that they share, and no node is named.
        ([*ranks_of(*[1.0] * 6, first=1.0), *ranks_of(1.0, 1.0, first=0.8)],
         ["rank 6 on n0 computes at 0.80 of its own first hour, rank 7 on n0 computes at 0.80 of its own first hour"]),
        ([*ranks_of(*[1.0] * 5, first=1.0), *ranks_of(1.0, 1.0, 1.0, first=0.8)],
         ["3 ranks of 8 compute below 0.9 of their own first hour, at 0.80 in the median: a cause that they share, "
          "such as heat or a power limit"]),
        (ranks_of(1.3, first=1.0),
         ["1 rank of 1 compute below 0.9 of their own first hour, at 0.77 in the median: a cause that they share, such "
          "as heat or a power limit"]),
    ],
)  # fmt: skip
def test_which_ranks_are_slow(ranks: list[RankHeartbeat], lines: list[str]) -> None:
    assert slow_ranks([replace(rank, rank=number) for number, rank in enumerate(ranks)]).lines == lines


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ({"n1": 1.0, "n2": 1.0, "n3": 1.17}, []),  # 14.5 % less
        ({"n1": 1.0, "n2": 1.0, "n3": 1.19}, ["n3"]),  # 16 % less
        ({"n1": 1.0, "n2": 1.3}, ["n2"]),
        ({"n1": 1.0, "n2": 1.5, "n3": 2.0, "n4": 1.0}, ["n2", "n3"]),
        ({"n1": 1.0}, []),
        ({"n1": None, "n2": 9.0}, []),
    ],
)
def test_a_node_is_slow_beside_the_median_of_its_peers(seconds: dict[str, float | None], slow: list[str]) -> None:
    beats = [replace(BEAT, rank=rank, host=host, probe_s=probe) for rank, (host, probe) in enumerate(seconds.items())]
    assert sorted(slow_ranks(beats).nodes) == slow


def test_a_node_is_as_slow_as_its_slowest_device() -> None:
    beats = [replace(BEAT, rank=rank, host=f"n{rank // 2}", probe_s=2.0 if rank == 3 else 1.0) for rank in range(8)]
    (node,) = slow_ranks({beat.rank: beat for beat in beats}).nodes.items()
    assert (node[0], str(node[1])) == ("n1", "rank 3 on n1 computes at 0.50 of the median of the other ranks")


def test_a_slow_rank_says_what_its_driver_says() -> None:
    slow = replace(BEAT, rank=2, host="n1", probe_s=2.0, clock_mhz=1005.0, throttle="power cap, heat")
    (line,) = slow_ranks([*ranks_of(1.0, 1.0), slow]).lines
    assert line == "rank 2 on n1 computes at 0.50 of the median of the other ranks (1,005 MHz, power cap, heat)"


def test_a_heartbeat_with_all_of_it_fits_its_line() -> None:
    gpus = tuple(GpuFigures(100, 139.9, 139.9, 700, 85) for _ in range(8))
    full = replace(
        BEAT, rank=100_000, host="n" * 64, pid=2**22, beat=10**9, step=10**9, quiet_s=86_400.5, limit_s=86_400.5,
        time=1795896413.8, collective="c" * 120, place="p" * 120, probe_s=0.00012345678901234567, elapsed_s=10**6 + 0.5,
        gpus=gpus, probe_first_s=0.00012345678901234567, clock_mhz=1980.0, throttle="power cap, heat, power brake",
        heard="SIGTERM",
    )  # fmt: skip
    line = line_of(full)
    assert (len(line), b'"gpus":[[100' in line, b'"throttle":"power cap' in line) == (LINE_BYTES, True, True)


def test_a_window_forgets_and_a_first_hour_stays() -> None:
    window, found = ProbeWindow(600.0, least=3), []
    assert window.every_s == 30.0
    for number in range(300):
        found.append(window.add(number * 30.0, 1.0 if number < 130 else 2.0))
    assert found[1] == (None, None)
    assert found[2] == found[119] == (1.0, None)
    assert found[120] == (1.0, 1.0)
    assert [now for now, _ in found[130:150]] == [1.0] * 9 + [1.5] + [2.0] * 10
    assert found[299] == (2.0, 1.0)
    assert ProbeWindow(2.0).every_s == 0.1


PROBES_A_DAY, QUARTER_HOUR, RANKS, WINDOW = 2880, 30, 64, 20


def medians_of(seconds: np.ndarray) -> np.ndarray:
    """The median of each window of the probes of some ranks, (probes, ranks)."""
    middle = WINDOW // 2
    windows = np.lib.stride_tricks.sliding_window_view(seconds, WINDOW, axis=0)
    return np.asarray(np.partition(windows, (middle - 1, middle), axis=-1)[..., middle - 1 : middle + 1].mean(axis=-1))


def probes_of_a_day(noise: np.random.Generator) -> np.ndarray:
    """Seconds of each probe, (probes, ranks): ranks of rate 1 with 3 % noise a probe, and swings of 5 % in minutes."""
    minutes, phases = noise.uniform(2, 10, RANKS), noise.uniform(0, 2 * math.pi, RANKS)
    at = np.arange(PROBES_A_DAY)[:, None] * 0.5
    rate = 1 + 0.05 * np.sin(2 * math.pi * at / minutes + phases)
    return np.asarray(1 / (rate * (1 + 0.03 * noise.standard_normal(rate.shape))))


def named_at(medians: np.ndarray, first: np.ndarray | None) -> list[tuple[int, list[int]]]:
    """(probe, ranks that are named then) where any is. Only rows near the limit are asked in full."""
    near = 1 / medians.max(axis=1) / np.median(1 / medians, axis=1)
    if first is not None:
        near = np.minimum(near, (first / medians).min(axis=1))
    found = []
    for row in np.flatnonzero(near < SLOW_SHARE + 0.02):
        heartbeats = [
            replace(
                BEAT, rank=rank, probe_s=float(probe_s), probe_first_s=None if first is None else float(first[rank])
            )
            for rank, probe_s in enumerate(medians[row])
        ]
        if (slow := slow_ranks(heartbeats)).lines:
            found.append((int(row) + WINDOW - 1, [one.rank for one in slow.ranks]))
    return found


@pytest.mark.parametrize("days", [1, pytest.param(200, marks=pytest.mark.long)])
def test_sound_ranks_are_never_named_and_a_fall_soon(days: int) -> None:
    noise, false, late = np.random.default_rng(7), [], []
    for day in range(days):
        probes = probes_of_a_day(noise)
        medians = medians_of(probes)
        first = np.median(probes[:120], axis=0)
        false += named_at(medians, first)
        growing = [np.median(probes[:count], axis=0) for count in range(LEAST_PROBES, WINDOW)]  # after each start
        false += named_at(np.array(growing), None)
        falls_at = 200 + 13 * (day % 200)
        probes[falls_at:, 0] /= 0.88
        medians[:, :1] = medians_of(probes[:, :1])
        begin = falls_at - WINDOW + 1  # the window that ends with the first slow probe
        named = named_at(medians[begin : begin + QUARTER_HOUR], first)
        late += [falls_at] if [0] not in [ranks for _, ranks in named] else []
        false += [entry for entry in named if entry[1] != [0]]
    assert (false, late) == ([], [])
