"""The configuration that DeepSpeed's engine dumps at its start. Its `world_size` is the data-parallel size."""

from hpc_gpt.reader.pattern import Dialect, Pattern

_BEFORE = r"\[config\.py:\d{1,5}:print\] {1,8}"


def _whole(key: str, field: str) -> Pattern:
    return Pattern("fact", rf"{_BEFORE}{key} [. ]{{1,40}}(?P<{field}>\d{{1,12}})\s*$")


DIALECT = Dialect(
    name="deepspeed_config",
    patterns=(
        _whole("train_batch_size", "global_batch"),
        _whole("train_micro_batch_size_per_gpu", "micro_batch"),
        _whole("gradient_accumulation_steps", "micro_batches"),
        _whole("world_size", "dp"),
        _whole("zero_optimization_stage", "zero_stage"),
        Pattern("fact", rf"{_BEFORE}fp16_enabled \.{{1,40}} True", facts={"dtype": "fp16"}),
        Pattern("fact", rf"{_BEFORE}bfloat16_enabled \.{{1,40}} True", facts={"dtype": "bf16"}),
        Pattern("fact", rf"{_BEFORE}float16_config \.{{1,40}} enabled=True", facts={"dtype": "fp16"}),
        Pattern("fact", rf"{_BEFORE}bfloat16_config \.{{1,40}} enabled=True", facts={"dtype": "bf16"}),
        Pattern(
            "fact",
            rf"{_BEFORE}zero_config \.{{1,40}} .{{0,4000}}\boffload_optimizer=\w{{1,60}}\(device=[^,)]{{0,40}}\b(?:cpu|nvme)\b",
            facts={"optimizer_offload": True},
        ),
        # The JSON entry may say device none, but CPUAdam runs only with offload.
        Pattern(
            "fact", r"\bDeepSpeed (?:Basic|Final) Optimizer = DeepSpeedCPUAdam\b", facts={"optimizer_offload": True}
        ),
        # The JSON that the user gave, a key a line; a value may be "auto".
        *(
            Pattern("fact", rf'^ {{2,8}}"{key}": (?P<{field}>\d{{1,9}})(?=,? *$)', literal=f'"{key}": ', own=True)
            for key, field in (
                ("train_batch_size", "global_batch"),
                ("train_micro_batch_size_per_gpu", "micro_batch"),
                ("gradient_accumulation_steps", "micro_batches"),
            )
        ),
        Pattern("fact", r'^ {4,16}"cpu_offload": true', facts={"optimizer_offload": True}),
    ),
)
