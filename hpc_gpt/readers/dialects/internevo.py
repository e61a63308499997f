"""InternEvo and InternLM: a line a step. Its TFLOPs and `tgs` are per GPU, of the last step."""

from hpc_gpt.readers.pattern import NUMBER, Dialect, Pattern


def _later(key: str, group: str) -> str:
    return rf"(?=(?:[^\n]{{0,1000}}?[ ,]{key}=(?P<{group}>{NUMBER})(?=[ ,]))?)"


DIALECT = Dialect(
    name="internevo",
    engine="internevo",
    patterns=(
        Pattern(
            "step",
            "tgs (tokens/gpu/second)=",
            rf"\btflops=(?P<tflops>{NUMBER})[ ,]{{1,2}}step=(?P<step>\d{{1,12}})[ ,]{{1,2}}loss=(?P<loss>{NUMBER})[ ,]"
            rf"[^\n]{{0,100}}?\btgs \(tokens/gpu/second\)=(?P<tokens_per_s_gpu>{NUMBER})(?=[ ,])"
            + _later("lr", "lr")
            + _later("grad_norm", "grad_norm")
            + _later("num_consumed_tokens", "consumed_tokens"),
        ),
        Pattern(
            "start",
            "Distributed environment is initialized, ",
            r"\bDistributed environment is initialized, data parallel size: (?P<dp>\d{1,7}), "
            r"pipeline parallel size: (?P<pp>\d{1,5}), tensor parallel size: (?P<tp>\d{1,5})(?=,|\s*$)",
        ),
    ),
    specimen="""\
2024-03-07 10:26:58,293 INFO launch.py:409 in launch -- Distributed environment is initialized, data parallel size: 2, pipeline parallel size: 1, tensor parallel size: 4
2024-03-07 10:28:57,802 INFO train.py:323 in record_current_batch_training_metrics -- tflops=61.2701,step=0,loss=11.6344,tgs (tokens/gpu/second)=1391.64,lr=4.0e-07,loss_scale=65536.0,grad_norm=63.6726,micro_num=4,num_consumed_tokens=131072,inf_nan_skip_batches=0
2024-03-07 10:29:01,802 INFO train.py:599 in record_current_batch_training_metrics -- tflops=184.6224 step=1 loss=11.6324 tgs (tokens/gpu/second)=3877.95 tgs/last_tgs_1=3877.97 lr=6.0e-07 loss_scale=65536.0 grad_norm={'0_default': 23.2976} micro_num=4 num_consumed_tokens=262144 inf_nan_skip_batches=0
""",
    seen="InternLM/InternEvo doc/en/usage.md, record_current_batch_training_metrics",
)
