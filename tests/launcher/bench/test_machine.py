"""bench --machine: what real ranks on CPUs measure is a profile; a GPU's stand-ins too; plan then predicts what was
measured."""

import json
import shlex
from dataclasses import replace

import pytest

from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.launcher.bench.machine import as_profile, machine_text, medians
from hpc_gpt.planner.constants import VALUES
from hpc_gpt.planner.links import Links
from hpc_gpt.planner.machine import DEFAULT, Rates, constants_from, generation_of, machine_of
from hpc_gpt.planner.step_time import layer_time
from tests.cli.command import hpc_gpt, in_process

# What ranks of a GPU would print.
OF_A_GPU = {
    "memory_gib": 79.1, "rows": 8192, "tflops": {"fp32": 51.0, "tf32": 402.0, "bf16": 702.0, "fp8": 1230.0},
    "attention": [2, 16, 8192], "attention_s": 2.6e-3, "memory_gb_s": 2810.0, "host_to_device_gb_s": 41.0,
}  # fmt: skip
LINKS = {"node_pair_gb_s": 310.0, "node_gather_gb_s": 331.0, "node_ring_gb_s": 344.0}
NETWORK = {"nodes_pair_gb_s": 38.0, "nodes_gather_gb_s": 290.0, "nodes_ring_gb_s": 283.0}
H100, CARD = "NVIDIA H100 80GB HBM3", "Some Card 9000"


def measured(device=H100, nodes=1, **more):
    return {"nodes": nodes, "ranks_per_node": 8, "device": device, **OF_A_GPU, **LINKS, **more}


def read_back(text, tmp_path):
    """(machine, constants) of a profile with that text."""
    path = tmp_path / "measured.toml"
    path.write_text(text)
    profile = load_profile(str(path))
    return machine_of(replace(profile, gpus_per_node=8)), constants_from(profile.calibration.constants)


def check_predictions(found, machine, constants):
    """Plan predicts what was measured."""
    samples, heads, tokens = found["attention"]
    shape = ModelShape(128 * heads, 1, heads, vocab=51200, seq=tokens)
    training = Training(shape, micro_batch=samples, dtype="bf16", engine="ddp", flash=True, attention="te")
    rates, links = Rates(machine, constants, training), Links(machine, constants)
    best = rates.flops / VALUES[f"products.{generation_of(machine)}.none"] / 1e12
    assert best == pytest.approx(found["tflops"]["bf16"], rel=2e-3)
    assert rates.bytes == pytest.approx(1e9 * found["memory_gb_s"], rel=2e-3)
    assert layer_time(training, rates).core_s == pytest.approx(found["attention_s"], rel=2e-3)
    assert links.host_b_s == pytest.approx(1e9 * found["host_to_device_gb_s"], rel=2e-3)
    assert links.node_b_s == pytest.approx(1e9 * found["node_gather_gb_s"], rel=2e-3)
    if found["nodes"] > 1:
        assert links.network_b_s == pytest.approx(8e9 * found["nodes_pair_gb_s"], rel=2e-3)
        assert links.reduction_b_s == pytest.approx(1e9 * found["nodes_ring_gb_s"], rel=2e-3)


_RATES = """
# products of 8192 rows, TFLOP/s: fp32 51, tf32 402, bf16 702, fp8 1230
# attention of 2 x 8192 tokens, 16 heads of 128: 2.6 ms
# GB/s: memory 2810, from the host 41
# GB/s per rank in a node: send 310, all-gather 331, all-reduce 344
"""
_BETWEEN = "# GB/s per rank between nodes: send 38, all-gather 290, all-reduce 283\n"
TEXTS = {
    (
        device,
        nodes,
    ): f"# {device}, {count} with 8 ranks each: measured by hpc-gpt bench --machine{_RATES}{between}{toml}"
    for device, toml in (
        (H100, 'device = "h100-80g"\nfabric = "nvlink"\n'),
        (CARD, 'device = "some-card-9000"\nfabric = "pcie"\n'),
    )
    for nodes, count, between in ((1, "1 node", ""), (2, "2 nodes", _BETWEEN))
}


@pytest.mark.parametrize(("device", "nodes"), TEXTS)
def test_plan_predicts_what_was_measured(device, nodes, tmp_path):
    found = measured(device, nodes, **(NETWORK if nodes > 1 else {}))
    profile = as_profile(found, None)
    text = machine_text(found, profile)
    assert text.partition("\n[machine]\n")[0] == TEXTS[device, nodes]
    check_predictions(found, *read_back(text, tmp_path))
    is_known = device == H100
    assert profile["device"] == ("h100-80g" if is_known else "some-card-9000")
    # A data sheet stays, as utilisations are over its peak; without one the figures are derived.
    assert (profile["machine"]["peak_tflops"]["bf16"] == 989.4) is is_known
    assert ("gemm" in profile["calibration"]["constants"]) is is_known


def test_a_fabric_that_the_profile_names_stays(tmp_path):
    site = tmp_path / "site.toml"
    site.write_text('device = "h100-80g"\nfabric = "infiniband 8x400G"\ngpus_per_node = 8\n')
    found = measured(nodes=2, **NETWORK)
    profile = as_profile(found, load_profile(str(site)))
    assert (profile["fabric"], profile["machine"]["network_gb_s"]) == ("infiniband 8x400G", 400.0)
    assert profile["calibration"]["constants"]["network"] == pytest.approx(8 * 38.0 / 400.0, rel=1e-3)
    check_predictions(found, *read_back(machine_text(found, profile), tmp_path))


def test_the_medians_of_the_ranks():
    ranks = [{"device": "x", "memory_gb_s": rate, "tflops": {"bf16": 10 * rate}} for rate in (1.0, 3.0, 2.0)]
    ranks[1]["nodes_pair_gb_s"] = 5.0
    assert medians(ranks) == {"device": "x", "memory_gb_s": 2.0, "tflops": {"bf16": 20.0}, "nodes_pair_gb_s": 5.0}


@pytest.mark.long
def test_on_this_machine(tmp_path):
    """Two real ranks; what they print is a profile of their own, which plan takes."""
    done = hpc_gpt("bench", "--machine")
    assert done.code == 0, done.stderr
    (tmp_path / "here.toml").write_text(done.stdout)
    constants = load_profile(str(tmp_path / "here.toml")).calibration.constants
    assert constants.keys() == {"attention"}
    shown = hpc_gpt("plan", "--model", "gpt2", "--gpus", 1, "--cluster", tmp_path / "here.toml", "--json")
    assert shown.code == 0, shown.stderr


@pytest.mark.long
def test_with_the_stand_ins_of_a_gpu():
    given = {**OF_A_GPU, "device": H100, "pair_gb_s": 310.0, "all_gather_gb_s": 331.0, "all_reduce_gb_s": 344.0}
    command = {"HPC_GPT_PROBE_COMMAND": f"echo {shlex.quote(json.dumps(given))}"}
    done = hpc_gpt("bench", "--machine", "--json", environment=command)
    assert done.code == 0, done.stderr
    tables = json.loads(done.stdout)
    assert (tables["schema"], tables["device"], tables["fabric"]) == (1, "h100-80g", "nvlink")
    assert tables["calibration"]["constants"]["node"] == pytest.approx(331 / 450, rel=1e-3)
    assert tables["calibration"]["constants"]["memory"] == pytest.approx(2810 / 3352, rel=1e-3)
    assert tables["measured"] == {"nodes": 1, "ranks_per_node": 2, **given_back(given)}
    assert DEFAULT.gemm != tables["calibration"]["constants"]["gemm"]


def given_back(given):
    renamed = {
        "pair_gb_s": "node_pair_gb_s",
        "all_gather_gb_s": "node_gather_gb_s",
        "all_reduce_gb_s": "node_ring_gb_s",
    }
    return {renamed.get(name, name): value for name, value in given.items()}


@pytest.mark.long
def test_ranks_that_fail():
    done = hpc_gpt("bench", "--machine", environment={"HPC_GPT_PROBE_COMMAND": "echo no driver >&2; exit 9"})
    assert done.code != 0
    assert "2 ranks gave no figures" in done.stderr
    assert "no driver" in done.stderr


def test_it_takes_nothing_of_a_run():
    done = in_process("bench", "--machine", "--mbs", 4, "--model", "gpt2")
    assert done.code == 2
    assert "--mbs" in done.stderr
    assert "--model" in done.stderr
