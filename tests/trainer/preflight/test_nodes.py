"""A preflight with real ranks, on CPU and gloo: what is measured, who is blamed, how an attempt ends; room needed."""

import json
import os
import signal
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from hpc_gpt.core.ends.bad_nodes import listed
from hpc_gpt.core.runs.run_folder import create_run
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Data, Engine, Experiment, Job, LayoutRequest, Model, Train
from hpc_gpt.trainer.preflight.nodes import Preflight
from hpc_gpt.trainer.preflight.verdict import NodeReport, encode
from tests.conftest import REPOSITORY
from tests.programs import python
from tests.waiting import patient

RANKS = [sys.executable, "-m", "hpc_gpt.trainer.preflight.rank"]
WELL = {"matmul_tflops": 90.0, "pair_gb_s": 20.0, "all_reduce_gb_s": 20.0}
COMMAND = 'cat "$FIGURES/$SLURMD_NODENAME" 2>/dev/null || cat "$FIGURES/well"'


@pytest.fixture
def figures(tmp_path):
    (folder := tmp_path / "figures").mkdir()
    (folder / "well").write_text(json.dumps(WELL))
    return folder


def new_run(tmp_path, nodes=2, ranks_per_node=1, spares=0, hidden=32, heads=4, layers=2, ep=None, **layout):
    profile = ClusterProfile(name="site", gpus_per_node=ranks_per_node, preflight=True, spare_nodes=spares)
    experts = {"experts": ep, "experts_per_token": 1, "expert_ffn": 32, "bias": "none"} if ep else {}
    experiment = Experiment(
        name="tiny",
        model=Model(hidden=hidden, layers=layers, heads=heads, vocab=256, seq=32, **experts),
        data=Data(source="random"),
        engine=Engine(name="ddp") if not layout else Engine(),
        layout=LayoutRequest(gpus=nodes * ranks_per_node, micro_batch=1, micro_batches=2, ep=ep, **layout),
        train=Train(dtype="fp32", steps=3),
        job=Job(),
    )
    return create_run(tmp_path / "logs", resolve(experiment, profile), "#!/bin/sh\n", "", {})


def probe(run, nodes, ranks_per_node=1, command=None, ranks=RANKS, **environment):
    """(the line that the preflight says, preflight.json, the log) of a new attempt."""
    attempt = run.new_attempt()
    start = command or [sys.executable, "-m", "hpc_gpt.trainer.preflight.probe", nodes, str(ranks_per_node)]
    own = {
        "PYTHONPATH": str(REPOSITORY), "HPC_GPT_RUN": str(run.path), "HPC_GPT_ATTEMPT": str(attempt.number),
        "HPC_GPT_MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        "HPC_GPT_PREFLIGHT_S": str(patient(180)),
    }  # fmt: skip
    line = ["-m", "hpc_gpt.trainer.preflight.nodes", run.path, attempt.number, nodes, "--", *start]
    done = python(*line, *([] if command else ranks), env=os.environ | own | environment, code=0)
    assert not (attempt.folder / "preflight").exists(), "the probe files are taken away"
    return done.stdout.strip(), json.loads((attempt.folder / "preflight.json").read_text()), done.stderr


def test_ranks_measure_their_devices_and_each_other(tmp_path):
    run = new_run(tmp_path, nodes=2, ranks_per_node=2, tp=2, pp=2, dp=1)
    said, found, log = probe(run, "a b", 2)
    assert said == "nodes a,b", log
    assert len(found["ranks"]) == 4
    for rank in found["ranks"]:
        assert rank["device"] == "cpu"
        assert rank["failed"] is None
        for figure in ("matmul_tflops", "host_to_device_gb_s", "memory_free_gib"):
            assert rank[figure] > 0, figure
        for figure in ("write_mb_s", "free_gib"):
            assert (rank.get(figure, 0) > 0) == (rank["local_rank"] == 0), "one rank of a node writes"
        assert rank["versions"]["python"]
        assert abs(rank["clock_ahead_s"]) < 60
    made = {(each["kind"], each["axis"], tuple(each["ranks"])) for each in found["exchanges"]}
    assert made == {
        ("pair", "nodes", (0, 2)),
        ("ring", "node", (0, 1)), ("ring", "node", (2, 3)),
        ("pair", "tp", (0, 1)), ("pair", "tp", (2, 3)), ("ring", "tp", (0, 1)), ("ring", "tp", (2, 3)),
        ("pair", "pp", (0, 2)), ("pair", "pp", (1, 3)), ("ring", "pp", (0, 2)), ("ring", "pp", (1, 3)),
    }  # fmt: skip
    assert all(each["gb_s"] > 0 for each in found["exchanges"])
    assert found["limit_s"] == patient(180)
    assert "matmul TFLOP/s" in log
    assert listed("site") == {}


@pytest.mark.long
def test_a_slow_node_gives_its_place_to_a_spare(tmp_path, figures):
    run = new_run(tmp_path, nodes=2, spares=1)
    (figures / "b").write_text(json.dumps(WELL | {"pair_gb_s": 3.0, "all_reduce_gb_s": 3.0}))
    said, found, log = probe(run, "a b c", HPC_GPT_PROBE_COMMAND=COMMAND, FIGURES=str(figures))
    assert said == "nodes a,c"
    assert "bad node b: exchange of a pair of nodes 3 GB/s, median of its peers" in log
    assert "c takes the place of a bad node" in log
    bad = listed("site")["b"]
    assert (bad.run, bad.everyone) == (run.run_id, True)
    assert "3 GB/s" in bad.why
    assert found["findings"][0]["figure"] == 3.0


@pytest.mark.long
def test_ranks_that_fall_silent_are_named(tmp_path, figures):
    run = new_run(tmp_path, nodes=2, spares=2)
    (figures / "b.sh").write_text("exec sleep 600")
    (figures / "c.sh").write_text("kill -9 $PPID")
    command = (
        'if [ -e "$FIGURES/$SLURMD_NODENAME.sh" ]; then . "$FIGURES/$SLURMD_NODENAME.sh"; else cat "$FIGURES/well"; fi'
    )
    said, _, log = probe(run, "a b c d", HPC_GPT_PROBE_COMMAND=command, FIGURES=str(figures))
    assert said == "nodes a,d", log
    assert list(listed("site")) == ["b", "c"]


# Stands in for the ranks of a preflight: it says what they would, and reads the plan as they do.
ACTOR = """
import json, os, sys
from hpc_gpt.trainer.preflight.verdict import encode
shared = os.environ["HPC_GPT_RUN"] + "/attempts/1/preflight/node-"
def say(node, **more):
    print(encode(node, 0, **more), end="", flush=True)
for node in NODES:
    open(shared + node, "w").close()
    say(node)
    say(node, figures={"devices": 1, **FIGURES}, port=1)
for node in SILENT:
    say(node)
ranks = json.loads(sys.stdin.readline())["nodes"]
"""


def act(tmp_path, nodes, figures, words, silent=""):
    (tmp_path / "actor.py").write_text(f"NODES, FIGURES, SILENT = {nodes!r}, {figures}, {silent!r}\n{ACTOR}{words}")
    return [sys.executable, str(tmp_path / "actor.py")]


JUDGED = {"judged": True}
FOREIGN = [[], "text", 1, None, {}, {"node": "a"}, {"node": "a", "local": 0}]


def line_of(fields):
    return f"hpc-gpt-preflight {json.dumps(fields)}\n"


def test_foreign_lines_among_a_ranks_do_not_end_the_preflight(tmp_path):
    lines = "".join(map(line_of, [*FOREIGN, {"node": "elsewhere", "local": 0, "time": 1.0}]))
    words = f"sys.stdout.write({lines!r})\nfor node in ranks: say(node, done=True)"
    said, found, log = probe(new_run(tmp_path), "a b", command=act(tmp_path, "ab", JUDGED, words))
    assert said == "nodes a,b", log
    assert log.count("preflight: hpc-gpt-preflight ") == len(FOREIGN)
    assert found["exchanges"] == []


def test_a_message_of_any_length_arrives_in_uncut_lines(tmp_path):
    trace = 'File "a.py", line 1\n\tü' * 300
    words = f"say('b', failed='it broke', trace={trace!r})\nsay('a', done=True)"
    assert max(map(len, encode("a" * 64, 0, trace=trace).splitlines())) <= 1024
    _, found, _ = probe(new_run(tmp_path), "a b", command=act(tmp_path, "ab", JUDGED, words))
    assert [rank["traceback"] for rank in found["ranks"]] == [None, trace]


def test_nodes_that_fall_silent_are_named_within_the_limit(tmp_path, monkeypatch):
    """The others have spoken before on the same pipe, so the limit is that of the silent ones alone."""
    run = new_run(tmp_path, nodes=2, spares=2)
    run.new_attempt()
    monkeypatch.setenv("HPC_GPT_RUN", str(run.path))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    words = "for node in ranks: say(node, done=True)"
    preflight = Preflight(run, 1, "abcd", act(tmp_path, "ad", JUDGED, words, silent="bc"))
    monkeypatch.setattr(preflight.probe, "read_figures", partial(preflight.probe.read_figures, late_s=0.2))
    preflight.judge()
    assert preflight.chosen == ["a", "d"]
    assert {node: found.words for node, found in preflight.bad.items()} == dict.fromkeys(
        "bc", "1 of its 1 ranks gave no figures in time"
    )
    preflight.note_bad_nodes()
    assert list(listed("site")) == ["b", "c"]


def test_what_a_rank_leaves_running_does_not_hold_the_judge(tmp_path):
    """It has the rank's stderr, which therefore does not end with the rank."""
    command = ["bash", "-c", f"sleep 3600 >/dev/null & echo $! >{tmp_path}/left; exit 1"]
    said, _, _ = probe(new_run(tmp_path), "a b", command=command)
    assert said.startswith("end error preflight: 2 of 2 nodes cannot be probed; a: it did not answer")
    os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)  # it was still there


def test_the_node_with_least_room_decides_on_space(tmp_path):
    run = new_run(tmp_path)
    reports = {node: NodeReport({0: {"figures": {"free_gib": free}}}) for node, free in (("a", 1e6), ("b", 0.0))}
    found = Preflight._space(SimpleNamespace(run=run, resolved=run.resolved()), reports)
    assert [finding.ended for finding in found] == ["disk_full"]
