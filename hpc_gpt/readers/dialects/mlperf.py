"""MLPerf's log: one line of JSON per event. Times of day are in ms; `step` and `samples_count` count samples, not steps.

v3.1 has `train_step_timing`, v5.0 `train_step_time`, both the mean over a block; v4 has only the samples/s of a block. The
end of a block (`block_stop`) has samples and time in every version. `eval_accuracy` is the validation loss of the GPT
benchmarks, and an accuracy in others.
"""

from __future__ import annotations

from hpc_gpt.readers.pattern import INT, NUMBER, Dialect, Pattern

_EVENT = r":::MLLOG \{{\"namespace\": \"[^\"\n]{{0,64}}\", \"time_ms\": ({}\d{{10,16}}), \"event_type\": \"\w{{1,24}}\", \"key\": \"{}\", "
_SAMPLES = r"\"metadata\": \{[^{}\n]{0,1000}?\"(?:samples_count|step)\": (?P<consumed_samples>\d{1,20})(?=[,}])[^{}\n]{0,1000}\}"


def _event(key: str, timed: bool = False) -> str:
    """The start of an event's line; `timed`: its time of day is read."""
    return _EVENT.format("?P<at_ms>" if timed else "?:", key)


def _value(key: str, group: str, number: str = INT) -> Pattern:
    return Pattern("fact", f'"key": "{key}"', _event(key) + rf"\"value\": (?P<{group}>{number}),")


def _tracked(key: str, group: str) -> str:
    return rf"(?=(?:[^{{}}\n]{{0,1000}}?\"{key}\": (?P<{group}>{NUMBER})(?=[,}}]))?)"


DIALECT = Dialect(
    name="mlperf",
    engine="mlperf",
    flags=("MLPerf's eval_accuracy is a loss in its GPT benchmarks, an accuracy in others",),
    patterns=(
        Pattern(
            "step",
            '"key": "tracked_stats"',
            _event("tracked_stats", timed=True)
            + r"\"value\": \{(?=[^{}\n]{0,1000}?\"(?:train_step_tim(?:e|ing)|throughput|reduced_train_loss|loss)\": )"
            + _tracked("train_step_tim(?:e|ing)", "step_s")
            + _tracked("throughput", "samples_per_s")
            + _tracked("(?:reduced_train_)?loss", "loss")
            + r"[^{}\n]{0,1000}\}, "
            + _SAMPLES,
        ),
        Pattern(
            "step",
            '"key": "train_loss"',
            _event("train_loss", timed=True) + rf"\"value\": (?P<loss>{NUMBER}), " + _SAMPLES,
        ),
        Pattern(
            "step", '"key": "block_stop"', _event("block_stop", timed=True) + r"\"value\": [\w\"]{1,40}, " + _SAMPLES
        ),
        # An evaluation follows its block, whose time does not include it: so it is a further figure of that block.
        Pattern(
            "more",
            '"key": "eval_accuracy"',
            _event("eval_accuracy") + rf"\"value\": (?P<loss_eval>{NUMBER}),",
        ),
        Pattern("start", '"key": "init_start"', _event("init_start")),
        Pattern(
            "end",
            '"key": "run_stop"',
            _event("run_stop") + r"[^\n]{0,1000}?\"status\": \"success\"",
            ended="done",
        ),
        Pattern(
            "end",
            '"key": "run_stop"',
            _event("run_stop") + r"[^\n]{0,1000}?\"status\": \"aborted\"",
            ended="stopped",
        ),
        _value("global_batch_size", "global_batch"),
        _value("micro_batch_size", "micro_batch"),
        _value("gradient_accumulation_steps", "micro_batches"),
        _value("max_sequence_length", "seq"),
        _value("seq_length", "seq"),
        _value("max_steps", "steps_planned"),
        Pattern("fact", ":::SYSJSON ", r"\"number_of_nodes\": ?\"?(?P<nodes>\d{1,6})\"?,"),
        Pattern("fact", ":::SYSJSON ", r"\"accelerators_per_node\": ?\"?(?P<gpus_per_node>\d{1,6})\"?,"),
        Pattern("fact", ":::SYSJSON ", r"\"accelerator_model_name\": ?\"(?P<device>[^\"\n]{1,80})\""),
        Pattern(
            "fact",
            '"key": "submission_benchmark"',
            _event("submission_benchmark") + r"\"value\": \"(?P<name>[\w.-]{1,64})\"",
        ),
    ),
    specimen="""\
:::SYSJSON {"submitter":"NVIDIA","division":"closed","status":"onprem","system_name":"eos_n64","number_of_nodes":"64","accelerators_per_node":"8","accelerator_model_name":"NVIDIA H100-SXM5-80GB","framework":"NeMo"}
:::MLLOG {"namespace": "", "time_ms": 1696466380017, "event_type": "POINT_IN_TIME", "key": "tracked_stats", "value": {"train_step_timing": 11.039475679397583}, "metadata": {"file": "/workspace/llm/custom_callbacks.py", "lineno": 277, "step": 8388608}}
:::MLLOG {"namespace": "", "time_ms": 1745500000000, "event_type": "POINT_IN_TIME", "key": "tracked_stats", "value": {"throughput": 102.4, "train_step_time": 11.25}, "metadata": {"file": "/workspace/code/callbacks.py", "lineno": 230, "step": 46080}}
:::MLLOG {"namespace": "", "time_ms": 1721026805975, "event_type": "POINT_IN_TIME", "key": "tracked_stats", "value": {"throughput": 1.9257918929116467}, "metadata": {"file": "/workspace/ft-llm/custom_callbacks.py", "lineno": 161, "step": 3072}}
:::MLLOG {"namespace": "", "time_ms": 1721026805975, "event_type": "INTERVAL_END", "key": "block_stop", "value": null, "metadata": {"file": "/workspace/ft-llm/custom_callbacks.py", "lineno": 133, "samples_count": 3072}}
:::MLLOG {"namespace": "", "time_ms": 1721026805980, "event_type": "POINT_IN_TIME", "key": "eval_accuracy", "value": 2.7012, "metadata": {"file": "/workspace/llm/custom_callbacks.py", "lineno": 140, "samples_count": 3072}}
:::MLLOG {"namespace": "", "time_ms": 1696466000000, "event_type": "POINT_IN_TIME", "key": "global_batch_size", "value": 2048, "metadata": {"file": "/workspace/llm/mlperf_logger.py", "lineno": 110}}
:::MLLOG {"namespace": "", "time_ms": 1696466999000, "event_type": "INTERVAL_END", "key": "run_stop", "value": null, "metadata": {"file": "/workspace/llm/custom_callbacks.py", "lineno": 210, "step": 8388608, "status": "success"}}
""",
    seen="mlcommons/training_results_v3.1 NVIDIA eos_n64 gpt3; NVIDIA/mlperf-common/pull/30",
)
