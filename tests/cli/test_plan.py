"""`hpc-gpt plan`, as a user has it."""

import json
import math
import re
import shlex
from pathlib import Path

import pytest

from hpc_gpt import cli
from hpc_gpt.core.settings.devices import DEVICES
from tests.cli.command import error_of, hpc_gpt, in_process, planned, profile_of, resolved_of, without_slurm
from tests.megatron_lm.checkout import make_checkout

JEAN_ZAY = ("--cluster", "jean-zay-v100-32g")
PUBLISHED_RUN = ("--model", "48b", "--gpus", "64", *JEAN_ZAY)
SMALL = ("--model", "gpt2", "--gpus", "8", "--engine", "ddp", "--cluster", "a100-80g-8")


def test_it_is_the_first_verb():
    assert next(iter(cli.verbs())) == "plan"


def test_a_short_table_best_first_and_the_next_command():
    done = in_process("plan", *PUBLISHED_RUN, code=0)
    head, empty, headings, first, *rest = done.stdout.splitlines()
    assert head.startswith("48b (52.0e9 parameters) on 64 v100-32g (")
    assert "global batch 1024 x 1024 tokens, fp16" in head
    assert not empty
    assert headings.split()[:3] == ["Layout", "Engine", "Batch"]
    assert first.startswith("tp")
    assert first.rstrip().endswith("best")
    assert any("300e9 tokens in " in line and "GPU-hours" in line for line in rest)
    assert done.stderr.startswith("next: hpc-gpt submit ")
    assert len(done.stderr.splitlines()) == 1
    assert len(done.stdout.splitlines()) < 30


def test_json_is_one_object_with_every_figure():
    done = in_process("plan", *PUBLISHED_RUN, "--json")
    assert not done.stderr
    page = json.loads(done.stdout)
    assert page["schema"] == 1
    assert page["model"]["params"] == 64 * (12 * 8192**2 + 13 * 8192) + (50304 + 1024 + 2) * 8192
    best = page["candidates"][0]
    assert best["fits"]
    assert best["tp"] * best["pp"] * best["dp"] == 64
    assert best["micro_batch"] * best["micro_batches"] * best["dp"] == 1024
    assert best["memory_gib"] == max(stage["nvidia_smi_gib"] for stage in best["stages"])
    figures = best["figures"]
    assert figures["tokens_per_s"] == pytest.approx(1024 * 1024 / figures["step_s"])
    assert figures["days"] == pytest.approx(300e9 / figures["tokens_per_s"] / 86400)
    assert figures["gpu_hours"] == pytest.approx(64 * 24 * figures["days"])
    assert all(each["memory_gib"] > page["machine"]["memory_gib"] for each in page["too_large"])

    def finite(value):
        if isinstance(value, dict | list):
            return all(map(finite, value.values() if isinstance(value, dict) else value))
        return not isinstance(value, float) or math.isfinite(value)

    assert finite(page)


def test_constants_are_the_profiles_or_a_named_others():
    profile_of("mine", 'extends = "jean-zay-v100-32g"\n[calibration]\nconstants = { gemm = 0.4 }\n')
    slow = planned(*PUBLISHED_RUN[:-1], "mine")
    assert (slow["constants"]["source"], slow["constants"]["gemm"]) == ("calibration of mine", 0.4)
    usual = planned(*PUBLISHED_RUN)
    assert usual["constants"]["source"] == "data sheets"
    assert slow["candidates"][0]["figures"]["step_s"] > 1.2 * usual["candidates"][0]["figures"]["step_s"]
    named = planned(*PUBLISHED_RUN, "--calibration", "mine")
    assert named["candidates"] == slow["candidates"]
    done = in_process("plan", *PUBLISHED_RUN, "--calibration", "jean-zay-v100-16g", code=2)
    assert error_of(done)[0] == "profile jean-zay-v100-16g has no [calibration]"


def in_submits_words(command):
    words = shlex.split(command)
    assert words[:2] == ["hpc-gpt", "submit"]
    return words[2:]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(PUBLISHED_RUN, id="seed", marks=pytest.mark.long),
        pytest.param(("--model", "7.5b", "--gpus", "4", *JEAN_ZAY), id="offload", marks=pytest.mark.long),
        pytest.param(("gpt2-meg-ds-zero", "--row", "full-48b", *JEAN_ZAY), id="row", marks=pytest.mark.long),
        pytest.param(("--gpus", "64", "--cluster", "a100-80g-8"), id="default", marks=pytest.mark.long),
        pytest.param(("demo", "--cluster", "a100-80g-8", "--set", "train.dtype=bf16"), id="demo"),
        pytest.param(("--model", "gpt2-xl", "--gpus", "3", "--cluster", "a100-80g-8"), id="batch of 3"),
        pytest.param(("--model", "gpt2", "--gpus", "2", "--engine", "ddp", "--seq", "512", *JEAN_ZAY), id="ddp"),
        pytest.param(("--hidden", "2048", "--layers", "24", "--heads", "16", "--vocab", "32000", "--nodes", "1",
                      "--gas", "8", "--recompute", "selective", *JEAN_ZAY), id="sizes"),
        pytest.param(("gpt2-meg", "--gpus", "16", "--model", "18b", "--pp", "4", *JEAN_ZAY), id="megatron"),
    ],
)  # fmt: skip
def test_the_next_command_runs_what_was_planned(arguments, tmp_path):
    page = planned(*arguments)
    best = page["candidates"][0]
    there = without_slurm(tmp_path) | {"MEGATRON_LM": str(make_checkout(tmp_path / "megatron-lm"))}
    done = in_process("submit", *in_submits_words(page["next"]), "--dry-run", "--script", environment=there)
    resolved = resolved_of(done)
    assert resolved["train"]["dtype"] == page["dtype"]
    # And predicts what was shown.
    said = re.search(r"predicted: (\S+) needs ([\d.]+) of .*; step (\S+) s, give or take \d+%", done.stderr)
    assert said[1] == best["layout"]
    assert float(said[2]) == pytest.approx(best["memory_gib"], abs=0.051)
    assert float(said[3]) == pytest.approx(best["figures"]["step_s"], rel=0.006)
    host = re.search(r", ([\d.]+) of [\d,]+ GiB of host memory; ", done.stderr)
    assert (float(host[1]) if host else 0) == pytest.approx(best["host_memory_gib"], abs=0.051)
    layout = {axis: best[axis] for axis in ("tp", "pp", "dp", "shard")}
    assert {"shard": None, **resolved["layout"]} == layout
    assert resolved["batch"] == {key: best[key] for key in ("micro_batch", "micro_batches", "global_batch")}
    engine = resolved["engine"]
    assert engine["name"] == best["engine"]
    assert {key: engine[key] for key in ("recompute", "offload", "sequence_parallel", "sharded_optimizer")} == {
        key: best[key] for key in ("recompute", "offload", "sequence_parallel", "sharded_optimizer")
    }
    assert engine["zero_stage"] == best["zero_stage"]
    for key in ("hidden", "layers", "heads", "vocab", "seq"):
        assert resolved["model"][key] == page["model"][key]


def test_an_experiment_gives_model_batch_and_engine_not_layout():
    page = planned("gpt2-meg-ds-zero", "--row", "full-48b", *JEAN_ZAY, "--recompute", "full")
    assert {each["recompute"] for each in page["candidates"]} == {"full"}, "what an option settles is not searched"
    assert page["settled"] == {"recompute": "full"}
    assert page["engines"] == ["deepspeed-zero"]
    assert len({(each["tp"], each["dp"]) for each in page["candidates"]}) > 1


def test_why_explains_one_layout_with_its_arithmetic():
    done = in_process("plan", *PUBLISHED_RUN, "--why", "tp4-pp16-dp1", "--mbs", "4", "--recompute", "full", code=0)
    text = done.stdout
    assert text.startswith("tp4-pp16-dp1 on 64 v100-32g, engine deepspeed-3d, ZeRO-1, recompute full")
    assert "micro-batch 4 x 256 micro-batches x dp 1 = 1024 samples" in text
    assert "every micro-batch" not in text
    assert "--pp 16" in done.stderr


def test_why_shows_every_micro_batch():
    text = in_process("plan", *PUBLISHED_RUN, "--why", "tp4-pp16-dp1").stdout
    rows = text.partition("every micro-batch")[2].splitlines()[2:]
    sizes = [int(row.split()[0].rstrip("*")) for row in rows]
    assert sizes == [2**power for power in range(11)]
    assert sum("*" in row.split()[0] for row in rows) == 1
    assert "does not fit" in rows[-1]


@pytest.mark.parametrize(("seq", "batch"), [(1024, 1024), (131072, 32), (5000, 512)])
def test_a_batch_that_nobody_gave_has_a_few_million_tokens(seq, batch):
    asked = ("--model", "llama3.1-8b", "--gpus", "64", "--seq", str(seq), "--cluster", "h100-80g-8", "--tp", "8")
    assert planned(*asked, "--engine", "deepspeed-3d", "--recompute", "full", "--pp", "2")["global_batch"] == batch


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--model", "llama3.1-8b", "--gpus", "8"), marks=pytest.mark.long),
        ("demo", "--gpus", "8"),
    ],
)
def test_the_longest_sequence_fits_and_the_next_does_not(words):
    page = planned(*words, "--max-seq", "--cluster", "a100-80g-8", "--set", "train.dtype=bf16")
    longest = page["longest_seq"]
    assert page["model"]["seq"] == longest < page["next_longer"] <= 1.2 * longest
    assert not page["candidates"][0]["tight"]
    again = planned(*shlex.split(page["next"])[2:])
    assert {each["layout"] for each in again["candidates"]} == {each["layout"] for each in page["candidates"]}
    longer = in_process(
        "plan", *shlex.split(page["next"].replace(str(longest), str(page["next_longer"])))[2:], "--json"
    )
    assert longer.code == 2 or all(each["tight"] for each in json.loads(longer.stdout)["candidates"])


def test_products_in_8_bits_are_planned_where_an_engine_has_them():
    words = ("--model", "llama3.1-8b", "--gpus", "8", "--engine", "fsdp", "--cluster", "h100-80g-8")
    done = in_process("plan", *words, "--set", "train.matmul=fp8-tensor")
    assert (done.code, done.stderr.split(": ")[0]) == (0, "next")
    assert "bf16 with fp8-tensor products" in done.stdout
    of_16, of_8 = planned(*words), planned(*words, "--set", "train.matmul=fp8-tensor")
    assert ("matmul=fp8-tensor" in of_8["next"], "matmul" in of_16["next"]) == (True, False)
    figures = [page["candidates"][0]["figures"] for page in (of_16, of_8)]
    shares = [each["mfu"] / each["tflops_model"] for each in figures]
    assert shares[0] == pytest.approx(2 * shares[1], rel=1e-2)  # of twice the peak
    done = in_process("plan", *words, "--set", "train.matmul=fp8-row")
    assert done.stderr == "note: engine fsdp does not train with train.matmul fp8-row: only plan knows it\n"
    page = planned(*words, "--set", "train.matmul=fp8-row")
    assert (page["candidates"][0]["matmul"], page["next"]) == ("fp8-row", "")


def test_a_plan_compiles_splits_and_offloads_where_that_helps():
    words = ("--model", "llama3.1-8b", "--gpus", "8", "--engine", "fsdp", "--cluster", "a100-80g-8")
    assert all(each["compiled"] for each in planned(*words)["candidates"])
    assert not any(each["compiled"] for each in planned(*words, "--set", "engine.compile=none")["candidates"])
    long = planned(*words, "--seq", "262144", "--tp", "1", "--cp", "1")
    assert {(each["loss_chunks"] > 1, each["activation_offload"]) for each in long["candidates"]} == {
        (True, True),
        (False, True),
    }
    fast = ("compiled_head", "one_pass_loss", "keep_residuals")  # none of them beside a loss in chunks
    assert all({each[key] for key in fast} == {each["loss_chunks"] == 1} for each in long["candidates"])
    assert "engine.activation_offload=true" in long["next"]


def test_a_long_sequence_is_split_over_cp():
    words = ("--model", "llama3.1-8b", "--gpus", "16", "--seq", "65536", "--engine", "fsdp", "--cluster", "h100-80g-8")
    assert len({each["cp"] for each in planned(*words)["candidates"]}) > 1
    fixed = planned(*words, "--cp", "2")
    assert {each["cp"] for each in fixed["candidates"]} == {2}
    assert "--cp 2" in fixed["next"]
    assert "-cp2-" in fixed["candidates"][0]["layout"]


def test_llama_8b_at_128k_fits_8_gpus_by_plan_and_submit():
    words = ("--model", "llama3.1-8b", "--seq", "131072", "--gpus", "8", "--cp", "8", "--engine", "fsdp")
    found = planned(*words, "--cluster", "h100-80g-8")
    assert {each["layout"] for each in found["candidates"]} == {"tp1-pp1-cp8-dp1"}
    done = in_process("submit", *words, "--cluster", "h100-80g-8", "--dry-run", code=0)
    text = re.sub(r"\s+", " ", done.stdout + done.stderr)
    need, card = re.search(r"tp1-pp1-cp8-dp1 needs ([\d.]+) of ([\d.]+) GiB", text).groups()
    assert float(need) < float(card)
    small = in_process("submit", *words, "--smoke", "--dry-run")
    assert "tp1-pp1-cp8-dp1 on 8 GPUs -> tp1-pp1-cp2-dp1 on 2 GPUs" in re.sub(r"\s+", " ", small.stderr + small.stdout)


def test_bars_are_ascii_where_nothing_else_can_be_shown():
    done = hpc_gpt("plan", *SMALL, environment={"PYTHONIOENCODING": "ascii"}, code=0)
    assert done.stdout.isascii()
    assert "#...." in done.stdout


def test_the_largest_model():
    page = planned("--max-model", "--gpus", "16", "--cluster", "jean-zay-v100-16g")
    assert 3e9 < page["model"]["params"] < 20e9
    assert page["next_larger"]["params"] > page["model"]["params"]
    assert {each["micro_batch"] for each in page["candidates"]} == {1}
    assert (page["dtype"], page["candidates"][0]["tight"]) == ("fp16", False)  # a V100 has no bf16
    done = in_process("plan", "--max-model", "--gpus", "16", "--cluster", "jean-zay-v100-16g")
    assert done.stdout.startswith("largest without offload: ")
    assert "family: heads of 128" in done.stdout
    said = " ".join(done.stdout.split())
    params = float(re.search(r"largest without offload: ([\d.]+)e9 parameters", said)[1])
    tokens = re.search(
        r"20 tokens a parameter at global batch 1024 on \S+: ([\d.,]+)e9 tokens in ([\d.,]+) days on 16 GPUs", said
    )
    assert float(tokens[1].replace(",", "")) == pytest.approx(20 * params, rel=0.01)


@pytest.mark.parametrize(
    "asked",
    [
        ("--gpus", "16", "--offload", "full", "--engine", "fsdp", "--cluster", "jean-zay-v100-16g"),
        ("--nodes", "1", "--mbs", "2", "--gas", "4", "--tokens", "1e9", "--seq", "2048", "--vocab", "1000",
         "--cluster", "h100-80g-8"),
        ("demo", "--recompute", "full", "--set", "train.dtype=bf16", "--gpus", "8", "--cluster", "a100-80g-8"),
    ],
    ids=["offload", "batch", "experiment"],
)  # fmt: skip
def test_the_command_after_the_largest_model_shows_it_again(asked):
    page = planned("--max-model", *asked)
    words = shlex.split(page["next"])
    assert words[:2] == ["hpc-gpt", "plan"]
    again = planned(*words[2:])

    def without_reason(candidates):
        return sorted(({**each, "against_best": ""} for each in candidates), key=str)

    # What is tight is last in the one, and first in the other if it is far faster.
    assert without_reason(again["candidates"]) == without_reason(page["candidates"])
    assert not page["candidates"][0]["tight"]
    assert again["model"]["params"] == page["model"]["params"]


def own_profile(**machine):
    """The name of a profile of nodes of 4 V100 16 GB with these figures in [machine]."""
    figures = "\n".join(f"{key} = {value}" for key, value in machine.items())
    return profile_of("mine", f'device = "v100-16g"\nfabric = "omni-path 4x100G"\n[machine]\n{figures}\n')


def test_a_hosts_memory_that_is_not_known_is_no_reason_to_submit():
    asked = ("--model", "48b", "--gpus", "8", "--cluster")
    done = in_process("plan", *asked, own_profile())
    assert (done.code, done.stderr) == (0, "next: hpc-gpt plan --cluster mine --model 48b --gpus 84\n")
    said = " ".join(done.stdout.split())
    need = re.search(
        r"no layout is known to fit: all that fit on the cards offload, and (\S+) needs ([\d.]+) GiB of host",
        said,
    )
    assert ", or use --gpus 84, on which a layout fits" in said
    assert "-shard" not in need[1]  # as fast with replicas of shards, but these need twice as much
    assert planned(*asked, "mine")["next"] == done.stderr.strip().removeprefix("next: ")
    in_process(*shlex.split(done.stderr.removeprefix("next: hpc-gpt ")), code=0)
    explained = in_process("plan", *asked, "mine", "--why", need[1])
    assert "next: " not in explained.stderr
    assert f", {need[2]} GiB of host memory (its size is unknown)" in explained.stdout
    assert "engine.offload=full" in in_process("plan", *asked, own_profile(host_memory_gib=500)).stderr
    short = in_process("plan", *asked, "jean-zay-v100-16g", code=2)
    assert error_of(short)[0].endswith(", offload full, needs 387.2 of 149 GiB of host memory")


def test_the_largest_model_with_offload_says_that_it_is_slow():
    asked = ("--max-model", "--offload", "full", "--engine", "fsdp", "--gpus", "16", "--cluster")
    done = in_process("plan", *asked, own_profile(host_memory_gib=4000))
    assert done.stdout.startswith("largest with offload full: 641e9 parameters")
    assert re.search(r"slow: the largest without offload, 10\.3e9 parameters, has 1,\d+ tokens/s, \d+ times",
                     done.stdout)  # fmt: skip
    assert "slow: " not in in_process("plan", *asked, "jean-zay-v100-16g").stdout


@pytest.mark.parametrize("more", [(), ("--why", "tp1-pp1-dp8"), ("--max-model",)])
def test_without_a_cluster_a_plan_is_for_nodes_of_a100(more):
    words = ("plan", "--model", "gpt2", "--gpus", "8", "--engine", "ddp", *more)
    done = in_process(*words, code=0)
    first, last = done.stderr.splitlines()
    assert first.startswith("no cluster is chosen: planned for a100-80g-8, ")
    assert "hpc-gpt profile list" in first
    assert "8 a100-80g" in done.stdout
    assert last.startswith("next: hpc-gpt plan " if more == ("--max-model",) else "next: hpc-gpt profile list")
    shown = in_process(*shlex.split(last.removeprefix("next: hpc-gpt ")))
    assert (shown.code, "a100-80g-8" in shown.stdout + shown.stderr) == (0, True)
    assert in_process(*words, "--cluster", "a100-80g-8").stdout == done.stdout


def test_the_users_cluster_without_a_device_is_refused():
    profile_of("mine", 'partition = "gpu"\n', default=True)
    assert error_of(in_process("plan", "--model", "gpt2", "--gpus", "8"))[0] == "profile mine names no device"


def test_a_model_that_fits_nowhere_near_says_how_many_gpus_do():
    done = in_process("plan", "--model", "48b", "--gpus", "16", "--offload", "none", *JEAN_ZAY, code=2)
    said, hinted = error_of(done)
    assert "does not fit on 16 v100-32g: the nearest, " in said
    count = hinted.removeprefix("use --gpus ").partition(",")[0]
    in_process("plan", "--model", "48b", "--gpus", count, "--offload", "none", *JEAN_ZAY, code=0)


def test_batches_every_dp_divides_are_named_beside_a_fixed_one():
    said = in_process("plan", "--model", "gpt2-xl", "--gpus", "3", "--gbs", "512", "--cluster", "a100-80g-8").stdout
    assert "global batch 512 x 1024" in said
    assert "every dp of 3 GPUs divides --gbs 510 or 513" in said
    assert planned("--model", "gpt2-xl", "--gpus", "3", "--cluster", "a100-80g-8")["global_batch"] == 1023


@pytest.mark.parametrize(
    ("device", "name", "nodes"),
    [
        ("NVIDIA L40S", "l40s", "nodes of 8 l40s with PCI Express inside and InfiniBand 1x200G between them"),
        ("gb200", "gb200", "nodes of 4 gb200 with NVLink 5 inside and InfiniBand 8x400G between them"),
    ],
)
def test_a_plan_for_a_gpu_needs_no_profile(device, name, nodes, monkeypatch):
    monkeypatch.setenv("HPC_GPT_CLUSTER", "a100-80g-8")  # the option counts
    done = in_process("plan", "--model", "llama3.1-8b", "--gpus", "16", "--device", device, code=0)
    assert done.stderr.splitlines()[0].startswith(f"planned for {nodes}; ")
    assert f" on 16 {name} (" in done.stdout
    assert done.stderr.splitlines()[-1].startswith(f"next: hpc-gpt submit --cluster {name} --model llama3.1-8b ")
    assert f'  device = "{name}"' in done.stderr.splitlines()
    again = in_process("plan", "--max-seq", "--model", "gpt2", "--gpus", "8", "--device", device, code=0)
    words = shlex.split(again.stderr.splitlines()[-1].removeprefix("next: "))
    assert words[:4] == ["hpc-gpt", "plan", "--device", device]
    assert f" on 8 {name} (" in in_process(*words[1:], code=0).stdout


def test_every_gpu_of_the_table_can_be_planned_for():
    for device in DEVICES.values():
        if not device.nominal:
            words = ("--model", "gpt2", "--gpus", "16", "--engine", "ddp", "--mbs", "1")
            assert planned(*words, "--device", device.name)["candidates"]


def test_constants_are_told_by_why_alone():
    assert "constants" not in in_process("plan", *SMALL, code=0).stdout
    why = in_process("plan", *SMALL, "--why", "tp1-pp1-dp8", code=0).stdout
    assert "\nconstants, from data sheets; " in why
    assert why.count("--calibrate") == 1


def test_the_two_lines_for_an_unknown_cluster_are_a_profile(tmp_path, monkeypatch):
    monkeypatch.setenv("HPC_GPT_CONFIG", f"{tmp_path}/config")
    asked = ("plan", "--model", "gpt2", "--cluster", "nowhere")
    _, hint = error_of(in_process(*asked, code=2))
    head, *lines = hint.splitlines()
    file = Path(head.split()[-1].removesuffix(":"))
    assert file == tmp_path / "config/clusters/nowhere.toml"
    assert len(lines) == 2
    file.parent.mkdir(parents=True)
    file.write_text("\n".join(lines))
    assert "--cluster nowhere" in in_process(*asked, code=0).stderr


def test_what_no_engine_trains_has_no_line_to_submit():
    words = ("--gpus", "8", "--cluster", "h100-80g-8")
    program = in_process("plan", "--model", "gpt-oss-20b", *words, code=0)
    assert "megatron-lm" in program.stdout
    assert "hpc-gpt submit" not in program.stdout + program.stderr
    trained = in_process("plan", "--model", "qwen3-30b-a3b", "--gpus", "16", *words[2:], code=0)
    assert "submit --cluster h100-80g-8 --model qwen3-30b-a3b" in trained.stdout + trained.stderr
