"""The rank and the node at fault, of failures that do not name them: each rule, and its bounds from both sides."""

from collections.abc import Mapping

import pytest

from hpc_gpt.reader.failures.blame import node_of_failure, node_the_launcher_names, only_one_that_left, rank_to_blame
from hpc_gpt.reader.lines.part import Fact, Failure, Part, Place
from tests.reader.made_logs import timeout

HERE = Place("a", 1)


@pytest.mark.parametrize(
    ("collectives", "gpus", "blamed"),
    [
        (dict.fromkeys(range(15), 12), 16, (15, "rank 15 did not report it, 15 of 16 ranks did")),
        (dict.fromkeys(range(4, 16), 12), 16, (0, "ranks 0, 1, 2, 3 did not report it, 12 of 16 ranks did")),
        (dict.fromkeys(range(5, 16), 12), 16, (None, "")),
        (dict.fromkeys(range(1, 3), 12), 3, (0, "rank 0 did not report it, 2 of 3 ranks did")),
        (dict.fromkeys(range(2), 12), 4, (None, "")),
        (dict.fromkeys(range(4), 12), 4, (None, "")),
        (dict.fromkeys((0, 1, 3), 12), None, (2, "rank 2 did not report it, 3 of 4 ranks did")),
        (dict.fromkeys((0, 1, 2), 12), None, (None, "")),
        (dict.fromkeys((0, 1, 4), 12), None, (None, "")),
        ({1: 12}, None, (None, "")),
        ({0: 12}, 2, (None, "")),
        ({}, 2, (None, "")),
        (dict.fromkeys(range(1, 9), 12), 100_001, (None, "")),
        (dict.fromkeys(range(8), 12) | {5: 11}, 8, (5, "rank 5 is at collective 11 (ALLREDUCE), the others at 12")),
        (
            dict.fromkeys(range(8), 12) | {5: 11, 6: 11},
            8,
            (5, "rank 5 is at collective 11 (ALLREDUCE), the others at 12"),
        ),
        (dict.fromkeys(range(8), 12) | {5: 11, 6: 11, 7: 11}, 8, (None, "")),
        (
            dict.fromkeys(range(8), 12) | {5: 11, 6: 13},
            8,
            (5, "rank 5 is at collective 11 (ALLREDUCE), the others at 12"),
        ),
        ({0: 12, 1: 11, 2: 12}, None, (1, "rank 1 is at collective 11 (ALLREDUCE), the others at 12")),
        ({0: 12, 1: 11}, 2, (None, "")),
    ],
)
def test_the_rank_that_others_wait_for(
    collectives: Mapping[int, int], gpus: int | None, blamed: tuple[int | None, str]
) -> None:
    reports = [Failure("collective_timeout", timeout(rank, each), HERE, rank) for rank, each in collectives.items()]
    reports += [
        Failure("collective_timeout", timeout(rank, 99), HERE, rank) for rank in collectives
    ]  # the first counts
    part = Part("a", facts={"gpus": [Fact(gpus, HERE, "x")]} if gpus else {})
    assert rank_to_blame(reports, [Part("b"), part]) == blamed


@pytest.mark.parametrize(
    ("words", "blamed"),
    [
        ("hang: no rank made a step for 600 s; rank 3 on n2 is silent", (3, "the ranks' heartbeats name rank 3")),
        ("hang: no rank made a step for 600 s; ranks 3-5 on n2 are late", (3, "the ranks' heartbeats name rank 3")),
        ("[Rank 0]: Rank 4 failed to pass monitoredBarrier", (4, "rank 4 did not reach the barrier")),
        ("[Rank 0]: Ranks 1, 12 failed to pass monitoredBarrier", (1, "ranks 1, 12 did not reach the barrier")),
        ("hang", (None, "")),
    ],
)
def test_the_rank_that_a_message_names(words: str, blamed: tuple[int | None, str]) -> None:
    assert rank_to_blame([Failure("hang", words, HERE, 9)], []) == blamed


@pytest.mark.parametrize(
    ("echoes", "left"),
    [
        ({"1 exit code 1": 1}, 1),
        ({"1 ended by signal 9": 1}, 1),
        ({"1 ended by signal 15": None}, None),
        ({"1 exited on signal 9": 1}, 1),
        ({"1 gone": None}, None),
        ({"1 exit code 1": 1, "2 exit code 1": 2}, None),
        ({"1 exit code 1": 1, "2 exit code 1, the first that its launcher saw fail": 2}, 2),
        ({"1 tasks 1-3: exit code 1": 1}, None),
        ({"exit code 1": None}, None),
    ],
)
def test_the_rank_that_left(echoes: Mapping[str, int | None], left: int | None) -> None:
    found = only_one_that_left([Failure("error", words, HERE, rank) for words, rank in echoes.items()])
    assert (found and found.rank) == left


def test_the_node_of_a_failure() -> None:
    parts = [Part("a", failures=[Failure("node_failure", "x", HERE, 0, "n7"), Failure("error", "x", HERE, 0, "n8")])]
    job = Part("b", facts={"node_list": [Fact("n5", HERE, "slurm")]})
    many = Part("b", facts={"node_list": [Fact("n[5-6]", HERE, "slurm"), Fact("n9,n10", HERE, "slurm")]})
    plain, named = Failure("error", "x", HERE), Failure("error", "x", HERE, None, "n1")
    of_file = [Failure("error", "x", Place(f"logs/{name}", 1)) for name in ("n8.err", "n9.out", "n3.log", "n8.dat")]
    ranks = {3: "n3"}
    assert node_of_failure(named, 3, ranks, parts, False) == "n1"
    assert node_of_failure(named, 3, ranks, parts, True) == "n3"
    assert node_of_failure(plain, 4, ranks, parts, False) is None
    assert node_of_failure(Failure("node_failure", "x", HERE), None, ranks, parts, False) == "n7"
    assert node_of_failure(Failure("host_memory", "x", HERE), None, ranks, parts, False) is None
    assert [node_of_failure(each, None, {}, [*parts, many], False) for each in of_file] == ["n8", "n9", None, None]
    assert node_of_failure(plain, None, {}, [job], False) == "n5"
    assert node_of_failure(plain, None, {}, [job], True) is None
    assert node_of_failure(plain, None, {}, [many], False) is None
    assert node_of_failure(plain, None, {}, [Part("b", facts={"node_list": [Fact("n[5-6]", HERE, "")]})], False) is None


def test_the_node_that_a_launcher_names() -> None:
    cause = Failure("error", "x", Place("a", 5))
    said = [
        Failure("error", "srun: error: n3: task 1", Place("b", 1), None, "n3", None, True),
        Failure("error", "exit code 1", Place("a", 9), None, "n4", None, True),
        Failure("error", "exit code 1", Place("a", 5), None, "n5", None, True),
        Failure("cancelled", "srun: error: n6: task 1", Place("a", 7), None, "n6", None, True),
        Failure("error", "gone", Place("a", 8), None, "n7", None, True),
    ]
    first = "the launcher names this node first"
    assert node_the_launcher_names(cause, said) == ("n4", first)
    assert node_the_launcher_names(cause, [said[0], *said[2:]]) == ("n3", first)
    assert node_the_launcher_names(cause, said[2:]) == (None, "")
    nccl = [
        Failure("error", words, HERE, None, "n9", None, True) for words in ("NCCL WARN x", "NET/IB x", "Cuda failure")
    ]
    assert node_the_launcher_names(cause, nccl) == ("n9", "")
    assert node_the_launcher_names(cause, [*nccl, Failure("error", "NCCL WARN", HERE, None, "n8")]) == (None, "")
    assert node_the_launcher_names(Failure("node_failure", "x", HERE), nccl) == (None, "")
