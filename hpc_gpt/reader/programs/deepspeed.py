"""DeepSpeed's lines: its launcher, engine, configuration, pipeline and timers, and DeepSpeed-Chat."""

import base64
import json
from collections.abc import Mapping

from hpc_gpt.reader.lines.fields import Fields
from hpc_gpt.reader.lines.pattern import END, NUMBER, STEP, Dialect, Pattern, figures, line

_GB = r"\d{1,6}(?:\.\d{1,6})?"


def _launched(arguments: Mapping[str, str]) -> Fields:
    """The GPUs of the launcher's `--world_info`: base64 of `{"node": [0, 1, …], …}`."""
    try:
        nodes = json.loads(base64.urlsafe_b64decode(arguments.get("--world_info", "")))
        return {"nodes": len(nodes), "gpus": sum(map(len, nodes.values()))}
    except (ValueError, AttributeError, TypeError):
        return {}


_PRINTED = r"\[config\.py:\d{1,5}:print\] {1,8}"


def _configured(key: str, field: str) -> Pattern:
    return Pattern("fact", rf"{_PRINTED}{key} [. ]{{1,40}}(?P<{field}>\d{{1,12}})\s*$")


DIALECTS = (
    # DeepSpeed's own lines: its launcher's command, memory, timers, progress, checkpoints, versions, FLOPs profile.
    Dialect("deepspeed", interpret=_launched,
        flags=("memory by DeepSpeed's see_memory_usage is the peak up to its line; reserved memory is in whole GiB",),
        patterns=(
        Pattern("memory",
            rf"\bMA {_GB} GB {{1,20}}Max_MA (?P<memory_allocated_gib>{_GB}) GB {{1,20}}CA {_GB} GB {{1,20}}"
            rf"Max_CA (?P<memory_reserved_gib>{_GB}) GB"),
        Pattern("fact",
            rf"\bCPU Virtual Memory: {{1,4}}used = {_GB} GB, percent = (?P<host_used_percent>\d{{1,3}}(?:\.\d{{1,4}})?)%"),
        Pattern("timers", r"(?:\]|rank=\d{1,7}) time \(ms\)(?P<value>(?: \| [^|:]{1,60}: \d{1,12}\.\d{1,6}){1,200})"),
        # step=0 is printed before training begins.
        Pattern("step",
            r"\bstep=(?P<step>[1-9]\d{0,11}), skipped=(?P<skipped_so_far>\d{1,12}), lr=\[(?P<lr>[^\],\[]{1,32})(?=[,\]])"),
        Pattern("save", r"\bSaving model checkpoint: \S{0,1000}global_step(?P<step>\d{1,12})/"),
        Pattern("argument", r" cmd = [^\n]{1,400} (?P<key>--world_info)=(?P<value>[\w=-]{8,1000})(?=\s)"),
        Pattern("fact", r"DeepSpeed info: version=(?P<deepspeed_version>[^,\s]{1,64})"),
        Pattern("fact", r"^deepspeed info \.{2,40} (?P<deepspeed_version>[^,\s]{1,64})"),
        Pattern("fact", r"^torch version \.{2,40} (?P<torch_version>\S{1,64})"),
        # Printed only without model parallelism: then both sizes are the same.
        line("fact", "data_parallel_size: {gpus}, parameter_parallel_size: "),
        line("fact", "data_parallel_size: {dp}, parameter_parallel_size: "),
        Pattern("fact", r"^world size: {12,}(?P<gpus>\d{1,9})\s*$"),
        Pattern("fact", r"^data parallel size: {12,}(?P<dp>\d{1,9})\s*$"),
        Pattern("fact", r"^batch size per GPU: {12,}(?P<micro_batch>\d{1,9})\s*$"),
        Pattern("fact",
            r"^params of model = params per GPU \* mp_size: {2,70}(?P<params>\d{1,6}(?:\.\d{1,4})? ?[kKMGB])\s*$"),
        line("end", "[launch.py:{}:main] Process {} exits successfully", ended="done"),
    )),
    # DeepSpeed-Chat: a line with step and loss, counted from 0 in each epoch, and one with figures of its time. In the
    # first two stages a step is a micro-batch, and so is its latency: no step time is taken from it. A step of the
    # third stage also generates its samples.
    Dialect("deepspeed_chat", engine="deepspeed-chat",
        flags=("a step of DeepSpeed-Chat is a micro-batch, or includes the generation of its samples",), patterns=(
        # Each rank prints its own loss.
        line("step", "Epoch: {epoch}, Step: {step}, Rank: 0, loss = {loss}"),
        # After each step of rank 0.
        Pattern("fact",
            rf"\bModel Parameters: (?P<params_billions>{NUMBER}) B, Latency: [\d.]{{1,12}}s, TFLOPs: (?P<tflops>{NUMBER}), "
            r"[^\n]{0,200}? Batch Size: (?P<micro_batch>\d{1,7}), Sequence Length: (?P<seq>\d{1,9})(?=\s*$)"),
        figures(rf"\bEpoch: (?P<epoch>\d{{1,6}}) \| Step: {STEP}(?= \| PPO Epoch: )", "PPO Epoch: ", "loss=Actor_Loss"),
        figures(rf"\bepoch: (?P<epoch>\d{{1,6}})\|step: {STEP}(?=\|ppo_ep: )", "|ppo_ep: ", "loss=act_loss"),
        figures(rf"\|(?=E2E latency={NUMBER}s)", "|E2E latency=", "step_s[s]=E2E_latency samples_per_s=CurSamplesPerSec",
            kind="more"),
        figures(rf"\bEnd-to-End => (?=Latency: {NUMBER}s,)", "End-to-End => Latency: ",
            "step_s[s]=Latency tflops=TFLOPs samples_per_s=Samples/sec", kind="more"),
        Pattern("fact", r"\bBeginning of Epoch \d{1,6}/(?P<epochs>\d{1,6}), Total Micro Batches \d"),
        Pattern("eval", rf"^ppl: {NUMBER}, loss: (?P<loss_eval>{NUMBER})" + END, own=True),
    )),
    # The configuration that DeepSpeed's engine dumps at its start. Its `world_size` is the data-parallel size.
    Dialect("deepspeed_config", patterns=(
        _configured("train_batch_size", "global_batch"),
        _configured("train_micro_batch_size_per_gpu", "micro_batch"),
        _configured("gradient_accumulation_steps", "micro_batches"),
        _configured("world_size", "dp"),
        _configured("zero_optimization_stage", "zero_stage"),
        Pattern("fact", rf"{_PRINTED}fp16_enabled \.{{1,40}} True", facts={"dtype": "fp16"}),
        Pattern("fact", rf"{_PRINTED}bfloat16_enabled \.{{1,40}} True", facts={"dtype": "bf16"}),
        Pattern("fact", rf"{_PRINTED}float16_config \.{{1,40}} enabled=True", facts={"dtype": "fp16"}),
        Pattern("fact", rf"{_PRINTED}bfloat16_config \.{{1,40}} enabled=True", facts={"dtype": "bf16"}),
        Pattern("fact",
            rf"{_PRINTED}zero_config \.{{1,40}} .{{0,4000}}\boffload_optimizer=\w{{1,60}}\(device=[^,)]{{0,40}}\b(?:cpu|nvme)\b",
            facts={"optimizer_offload": True}),
        # The JSON entry may say device none, but CPUAdam runs only with offload.
        Pattern("fact", r"\bDeepSpeed (?:Basic|Final) Optimizer = DeepSpeedCPUAdam\b",
            facts={"optimizer_offload": True}),
        # The JSON that the user gave, a key a line; a value may be "auto".
        *(Pattern("fact", rf'^ {{2,8}}"{key}": (?P<{field}>\d{{1,9}})(?=,? *$)', literal=f'"{key}": ', own=True)
            for key, field in (("train_batch_size", "global_batch"), ("train_micro_batch_size_per_gpu", "micro_batch"),
            ("gradient_accumulation_steps", "micro_batches"))),
        Pattern("fact", r'^ {4,16}"cpu_offload": true', facts={"optimizer_offload": True}),
    )),
    # DeepSpeed's message that fp16 gradients overflowed and the step was skipped. It precedes the line of the step.
    Dialect("deepspeed_overflow", patterns=(
        # If every rank prints it, rank 0's line counts.
        Pattern("step", r"\bOVERFLOW! (?:Rank 0 )?Skipping step\.", facts={"skipped": 1}),
        line("step", "Overflow detected. Skipping step.", facts={"skipped": 1}),
    )),
    # DeepSpeed's pipeline engine: its step line, and the parameters of each stage.
    Dialect("deepspeed_pipe", engine="deepspeed-3d", patterns=(
        # Each line is the mean of the steps since the line before. Further losses can follow the sum.
        figures(rf"\bsteps: {STEP} (?=loss: [^ |\n]{{1,24}} [^\n]{{0,400}}iter time \(s\): {NUMBER} samples/sec: )", " iter time (s): ",
            "loss balance_loss=moe_loss step_s=iter_time_(s) samples_per_s$=samples/sec"),
        Pattern("fact", r"\bRANK=(?P<rank_name>\d{1,7} STAGE=\d{1,5}) LAYERS=\d{1,6} \[\d{1,6}, \d{1,6}\) "
            r"STAGE_PARAMS=(?P<rank_params>\d{1,15}) "),
        # Tied parameters count once, parameters that tensor-parallel ranks replicate count once per copy.
        line("fact", "UNIQUE_PARAMS={params} "),
        Pattern("fact",
            r"\bCONFIG: micro_batches=(?P<micro_batches>\d{1,9}) micro_batch_size=(?P<micro_batch>\d{1,9})\b"),
    )),
    # DeepSpeed's throughput timer since 2022: samples/s of the whole job, at the last step.
    Dialect("deepspeed_throughput", engine="deepspeed",
        flags=("DeepSpeed's throughput timer times the last step before its line, from forward to step, without the time "
        "between steps, such as for loading data",), patterns=(
        figures(rf"\bglobal_step={STEP},", "CurrSamplesPerSec=",
            "samples_per_s=CurrSamplesPerSec memory_allocated_gib[GB]=MaxMemAllocated"),
    )),
)  # fmt: skip
