"""A record's keys, its text, and how it is written."""

import json
import math
import pickle
import re
from dataclasses import replace

import pytest

from hpc_gpt.core.ends.failures import ENDED
from hpc_gpt.core.runs.record import RECORD_KEYS, Flag, Record

KEYS = """schema, run, name, dialect, engine, job_id, gpus, nodes, device, tp, pp, cp, dp, ep, zero_stage, micro_batch,
micro_batches, global_batch, seq, hidden, layers, heads, vocab, params, params_active, recompute, dtype, matmul,
settings, started, ended_at, step_s, step_s_p10, step_s_p90, steps_used, warmup_steps, tokens_per_s, tokens_per_s_gpu,
step_s_mean, tokens_total, tflops_seed, tflops_hardware, tflops_model, tflops_printed, mfu_printed, mfu, hfu,
memory_allocated_gib, memory_reserved_gib, predicted_memory_gib, memory_seed003_gib, predicted_step_s, gpu_util_mean,
gpu_util_spread, allocator_retries, attention_used, start_s, start_parts, compile_s, matmul_tflops_before,
matmul_tflops_after, sm_clock_mhz, power_w, rounds, tokens_per_s_spread, loss_first, loss_last, loss_eval,
loss_eval_by, bpb, bpb_by, balance_loss, z_loss, expert_load, experts_dead, skipped_steps, nan_steps, save_s,
gpu_hours, goodput, gpu_hours_by, node_list, failed_node, attempts, ended, cause, config_hash, versions,
flags, flag_kinds, sources"""


def test_the_whole_key_set_is_written_null_where_unmeasured():
    tables = json.loads(Record().to_json())
    assert list(tables) == re.split(r",\s+", KEYS) == list(RECORD_KEYS)
    assert tables["step_s"] is None
    assert tables["schema"] == 1


@pytest.mark.shared
def test_the_keys_and_the_ends_are_those_of_the_design(shared):
    page = (shared / "design.md").read_text()
    chapter = re.search(r"## A record's keys\n(.*?)\n## ", page, re.DOTALL).group(1)
    listed = " ".join(re.findall(r"`([^`]*)`", chapter.split("`ended`, for a run")[0]))
    named = [word for word in re.split(r"[,\s]+", listed) if word]
    # Keys are only ever added.
    assert named == [key for key in RECORD_KEYS if key in named]
    ends = re.search(r"`ended`, for a run and for each attempt: (.*?)\.", chapter, re.DOTALL).group(1)
    # Since then: no other class says that the same start can succeed at once, and must not for ever; nor that Slurm has
    # stopped a job's processes.
    assert re.split(r",\s+", ends) == [ended for ended in ENDED if ended not in ("port_taken", "suspended")]


def test_what_is_not_finite_is_null_and_the_text_is_strict_json():
    record = Record(loss_last=math.nan, step_s=math.inf, settings={"a": [math.nan, 1.0]})
    tables = json.loads(record.to_json(), parse_constant=lambda word: pytest.fail(word))
    assert tables["loss_last"] is None
    assert tables["settings"] == {"a": [None, 1.0]}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ([], "it is not an object"),
        (3, "it is not an object"),
        ({"gpus": "four"}, "gpus is 'four'"),
        ({"gpus": True}, "gpus is True"),
        ({"memory_allocated_gib": [1.0, "x"]}, "memory_allocated_gib is"),
        ({"settings": [1]}, "settings is"),
    ],
)
def test_what_is_no_record(tables, words):
    with pytest.raises((TypeError, ValueError), match=words):
        Record.from_tables(tables)


def test_flags_are_texts_with_their_kinds_beside_them():
    record = Record(flags=["old words", Flag("the program prints 9 tokens/s", "absurd")])
    tables = json.loads(record.to_json())
    assert tables["flags"] == ["old words", "the program prints 9 tokens/s"]
    assert tables["flag_kinds"] == ["", "absurd"]
    again = Record.from_tables(tables)
    assert again.all_flags == [("old words", ""), ("the program prints 9 tokens/s", "absurd")]
    more = replace(again, flags=[*again.flags, Flag("no number", "nan")])
    assert more.flag_kinds == ["", "absurd", "nan"]
    del tables["flag_kinds"]
    assert Record.from_tables(tables).flag_kinds == ["", ""], "of a file without the kinds"
    assert pickle.loads(pickle.dumps(more)) == more
