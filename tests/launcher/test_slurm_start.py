"""Why a job would never start, from what Slurm shows of its partition's nodes."""

import pytest

from hpc_gpt.core.slurm.start_check import _Node, _too_many
from tests.launcher.test_render import resolved_demo


def node(name: str, cpus: int, gpus: int) -> _Node:
    return _Node(name, "main", "idle", cpus, gpus, (), "none")


@pytest.mark.parametrize(
    ("nodes", "fit", "words"),
    [
        ([], [], "1 node, and partition main has 0"),
        (
            [node("a", 64, 2), node("b", 32, 0)],
            [],
            "1 node of 4 CPUs and 4 GPUs each, and none of the 2 nodes of partition main can hold that: a node has at "
            "most 64 CPUs and 2 GPUs",
        ),
    ],
)
def test_it_says_how_many_nodes_are_large_enough(nodes, fit, words):
    assert _too_many("main", 1, nodes, fit, resolved_demo()) == words


def test_a_node_that_takes_no_new_job_is_known_by_its_state():
    """As sinfo's %T says them; a state with `~` is of a node that is switched on for a job, one with `*` of a node that
    does not answer."""
    usable = ["idle", "mixed", "allocated", "completing", "planned", "idle~", "mixed#"]
    others = ["down", "down*", "idle*", "mixed*", "drained", "draining", "drained*", "fail", "failing", "maint",
              "reserved", "inval", "unknown", "reboot^"]  # fmt: skip
    states = [*usable, *others]
    assert [state for state in states if _Node("a", "main", state, 4, 0, (), "none").is_usable] == usable
