"""MLPerf's log: one line of JSON per event. Times of day are in ms; counts are in steps, samples or tokens.

Batch and sequence show what a count counts (`counted_in` in runs/log_steps.py), and whether `throughput` is in
samples or tokens. v3.1 has `train_step_timing`, v4.1 `train_step_timing in s`, v5.0 `train_step_time`,
all in seconds. Where a step is not timed, the times of day of the events between evaluations time it: an evaluation
begins and ends at the same count. The counts of a block's own events are its length in some submissions, its begin in
others and the total in a third kind, so they are not read. `eval_accuracy` is the validation loss of the GPT benchmarks,
and an accuracy in others. Each rank of NVIDIA's and AMD's code prints `init_start`. A whole number may end in `.0`.
"""

from hpc_gpt.reader.lines.pattern import INT, NUMBER, Dialect, Pattern, figures

_EVENT = r":::MLLOG \{{(?:\"namespace\": \"[^\"\n]{{0,64}}\", )?\"time_ms\": ({}\d{{10,16}}), (?:\"event_type\": \"\w{{1,24}}\", )?\"key\": \"{}\", "
# The first of these keys with a number: `"step": [2, 3321]` does not count.
_COUNT = (
    r"\"metadata\": \{(?![^{}\n]{0,1000}\"step_num\": )[^{}\n]{0,1000}?\"(?:samples_count|step|epoch_num)\": (?P<consumed>\d{1,20}(?:\.0)?)(?=[,}])"
    r"[^{}\n]{0,1000}\}"
)


# MLPerf HPC's, which is a number of steps whatever the batch.
_STEP = r"\"metadata\": \{[^{}\n]{0,1000}?\"step_num\": (?P<step>\d{1,12})(?=[,}])[^{}\n]{0,1000}\}"


def _event(key: str, timed: bool = False) -> str:
    """The start of an event's line; `timed`: its time of day is read."""
    return _EVENT.format("?P<at_ms>" if timed else "?:", key)


def _value(key: str, group: str) -> Pattern:
    return Pattern("fact", _event(key) + rf"\"value\": (?P<{group}>{INT}(?:\.0)?),")


# Names of devices, as submitters put them into the names of their systems.
_DEVICE = r"(?:GB|GH|[ABH])\d{3}|L40S?|MI3\d{2}X|RTXPro\d{4}"


def _platform(name: str, **facts: int) -> Pattern:
    return Pattern("fact", _event("submission_platform") + rf"\"value\": \"{name}\"", facts=facts)


DIALECT = Dialect(
    name="mlperf",
    engine="mlperf",
    flags=("MLPerf's eval_accuracy is a loss in its GPT benchmarks, an accuracy in others",),
    patterns=(
        figures(
            _event("tracked_stats", timed=True) + r"\"value\": \{" + rf"(?=[^{{}}\n]{{0,1000}}\}}, {_COUNT})"
            r"(?=[^{}\n]{0,1000}?\"(?:train_step_tim(?:e|ing)(?: in s)?|throughput|(?:reduced_)?train_loss|loss)\": )",
            '"tracked_stats"',
            "step_s=train_step_timing|train_step_time|train_step_timing_in_s|train_step_time_in_s throughput"
            " loss=loss|train_loss|reduced_train_loss",
            until="}",
        ),
        Pattern("step", _event("train_loss", timed=True) + rf"\"value\": (?P<loss>{NUMBER}), " + _COUNT),
        Pattern("step", _event("train_loss", timed=True) + rf"\"value\": (?P<loss>{NUMBER}), " + _STEP),
        Pattern("step", _event("eval_accuracy", timed=True) + rf"\"value\": (?P<loss_eval>{NUMBER}), " + _COUNT),
        *(
            Pattern("step", _event(f"eval_{key}", timed=True) + r"\"value\": [\w\"]{1,40}, " + _COUNT)
            for key in ("start", "stop")
        ),
        Pattern("step", _event("run_stop", timed=True) + r"\"value\": [\w.\"]{1,40}, " + _COUNT),
        Pattern("step", _event("run_start", timed=True), facts={"consumed": 0}),
        Pattern("start", _event("init_start")),
        Pattern("end", _event("run_stop") + r"[^\n]{0,1000}?\"status\": \"success\"", ended="done"),
        Pattern("end", _event("run_stop") + r"[^\n]{0,1000}?\"status\": \"aborted\"", ended="stopped"),
        _value("global_batch_size", "global_batch"),
        _value("micro_batch_size", "micro_batch"),
        _value("gradient_accumulation_steps", "micro_batches"),
        _value("max_sequence_length", "seq"),
        _value("seq_length", "seq"),
        _value("max_steps", "steps_planned"),
        _value("num_layers", "layers"),
        _value("num_heads", "heads"),
        _value("hidden_size", "hidden"),
        _value("ffn_hidden_size", "ffn"),
        _value("number_of_ranks", "gpus"),
        _value("number_of_nodes", "nodes"),
        _value("accelerators_per_node", "gpus_per_node"),
        Pattern("fact", r"\"number_of_nodes\": ?\"?(?P<nodes>\d{1,6})\"?,", literal=":::SYSJSON "),
        Pattern("fact", r"\"accelerators_per_node\": ?\"?(?P<gpus_per_node>\d{1,6})\"?,", literal=":::SYSJSON "),
        Pattern("fact", r"\"accelerator_model_name\": ?\"(?P<device>[^\"\n]{1,80})\"", literal=":::SYSJSON "),
        # `8xNVIDIA DGX H100` has 8 GPUs a node, as every DGX and HGX; `gaudi-256` and `1xXE9680x8H100` count chips. A node
        # of GB200 has 4 or 8, one of L40S any number.
        _platform(r"(?P<nodes>\d{1,5})x(?P<device>(?:NVIDIA )?(?:DGX|HGX) [^\"\n]{2,40})", gpus_per_node=8),
        _platform(rf"(?P<nodes>\d{{1,5}})x(?P<device>(?:NVIDIA )(?:{_DEVICE}))"),
        _platform(r"(?:gaudi|tpu-v5l)-(?P<gpus>\d{1,6})"),
        _platform(
            rf"(?P<nodes>\d{{1,5}})x[A-Z]\w{{2,12}}[x_-](?P<gpus_per_node>\d{{1,2}})x?(?P<device>(?:{_DEVICE})(?:[-_][\w-]{{0,30}})?)"
        ),
        _platform(r"(?:(?P<nodes>\d{1,5})x)?(?P<device>MI3\d{2}X|[AH]\d00)"),
        _platform(
            rf"[A-Z][A-Za-z\d]{{1,20}}(?:[_-][A-Z]{{2,6}})?[_-](?P<device>{_DEVICE})(?:_\w{{1,20}})?x(?P<gpus>\d{{1,2}})"
        ),
        _platform(rf"(?:\d{{1,5}}x)?[A-Z][\w-]{{1,30}}_(?:\dx)?(?P<device>{_DEVICE})"),
        Pattern("fact", _event("submission_benchmark") + r"\"value\": \"(?P<name>[\w.-]{1,64})\""),
        Pattern(
            "fact",
            _event("submission_benchmark") + r"\"value\": \"(?!gpt|llama|mixtral|deepseek|qwen)\w",
            facts={"evaluates_accuracy": 1},
        ),
    ),
)
