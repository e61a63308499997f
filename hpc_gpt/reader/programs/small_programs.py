"""Programs with a few lines each. The head of a step's line is followed by its figures, in any order."""

from hpc_gpt.core.runs.record import MIXTURE_FIGURES
from hpc_gpt.reader.lines.pattern import END, NUMBER, OF_STEPS, START, STEP, Dialect, Pattern, figures, line

_OURS = ("loss_eval", "grad_norm", *MIXTURE_FIGURES, "lr", "step_s", "tokens_per_s",
         "memory_allocated_gib", "memory_reserved_gib")  # fmt: skip

_INTERNEVO = "loss tokens_per_s_gpu=tgs_(tokens/gpu/second) lr grad_norm consumed_tokens=num_consumed_tokens"

_METRIC_LOGGER = "loss=loss|total_loss lr step_s=time memory_allocated_mib$=max_mem"
_OF_EPOCH = r"/(?P<epoch_steps>\d{1,12})"
_ETA = r"\](?= {1,4}eta: (?=[^\n]{0,3000} data: ))"

_TIMED = r"(?=[^\n]{0,400}? time: )"
_MMENGINE = "loss$ lr step_s=time grad_norm memory_allocated_mib=memory"

DIALECTS = (
    # NVIDIA NeMo Automodel: tokens/s of the job, and of one GPU in brackets.
    Dialect("automodel", engine="automodel", dtype="bf16", patterns=(
        figures(rf"\bstep {STEP}(?= \|[^\n]{{0,400}}? loss )", " | num_label_tokens ",
            "epoch loss grad_norm lr balance_loss=aux_loss|load_balance_loss|load_balancing_loss memory_allocated_gib=mem"
            " tokens_per_s[(]=tps tokens_per_s_gpu[/gpu)]="),
        # The benchmark recipe, which counts from 0 and prints the time on a line of its own.
        Pattern("step", r"\bRank \d{1,7} \| Iteration (?P<step>\d{1,12}) \| num_label_tokens=\d{1,12} \| "
            rf"Max Memory Allocated: (?P<memory_allocated_gib>{NUMBER}) GB \| loss=(?P<loss>{NUMBER})" + END),
        Pattern("more", rf"\bMax iter time: (?P<step_s>{NUMBER}) seconds" + END),
        Pattern("more", rf"(?<=\| )MFU: (?P<mfu_percent>{NUMBER})%" + END, literal="MFU: ", own=True),
        line("fact",
            "GA steps: {micro_batches}, DP size: {dp}, Local batch size: {micro_batch}, Global batch size: {global_batch}"),
    )),
    # ColossalAI's examples: rich's console, which wraps long lines; a step's time is on a line of its own, without a
    # number.
    Dialect("colossalai", engine="colossalai", patterns=(
        line("step", "colossalai - INFO: Step time: {step_s}"),
        line("fact", "colossalai - colossalai - INFO: ", facts={"engine": "colossalai"}),
        Pattern("memory", rf"\bMax CUDA memory usage: (?P<memory_allocated_mib>{NUMBER}) MB\b"),
    )),
    # This project's own metrics.jsonl, if it is read without its run folder.
    Dialect("hpc_gpt_metrics", engine="hpc-gpt", patterns=(
        figures(rf"\{{\"step\": {STEP}(?=, \"loss\": [^{{}}\n]{{0,1000}}\"time\": [\d.]{{1,24}}[,}}])", '"loss_eval": ',
            f"loss {' '.join(_OURS)} at=time"),
        Pattern("save",
            rf"\{{\"step\": (?P<step>\d{{1,12}}), \"loss\": [^{{}}\n]{{1,1000}}, \"save_s\": (?P<save_s>{NUMBER}), \"time\": "),
    )),
    # InternEvo and InternLM: a line a step. Its TFLOPs and `tgs` are per GPU, of the last step.
    Dialect("internevo", engine="internevo", patterns=(
        figures(rf"\btflops=(?P<tflops>{NUMBER})[ ,]{{1,2}}step={STEP}[ ,]{{1,2}}(?=loss={NUMBER}[ ,])", " (tokens/gpu/second)=",
            _INTERNEVO),
        Pattern("start", r"\bDistributed environment is initialized, data parallel size: (?P<dp>\d{1,7}), "
            r"pipeline parallel size: (?P<pp>\d{1,5}), tensor parallel size: (?P<tp>\d{1,5})(?=,|\s*$)"),
    )),
    # LeRobot: a line every `log_freq` steps, whose number is rounded (`step:30K`): the lines are counted. `updt_s` is a
    # step without the wait for data: no step time is taken from it.
    Dialect("lerobot", engine="lerobot", flags=("lerobot rounds the numbers of steps: the lines are counted",),
        patterns=(
        figures(
            r"\bstep:\d{1,6}[KMB]? smpl:\d{1,6}[KMB]? ep:\d{1,6}[KMB]? (?=epch:[^\n]{0,200}? loss:[^\n]{0,200}? updt_s:)",
            " updt_s:", "epoch=epch loss grad_norm=grdn lr samples_per_s=smp/s"),
        Pattern("fact", r"'log_freq': (?P<log_interval>\d{1,9})(?=[,}])"),
        Pattern("fact", START + r"cfg\.steps=(?P<steps_planned>\d{1,12}) \("),
        Pattern("fact", START + r"num_total_params=(?P<params>\d{1,15}) \("),
        Pattern("fact", START + r"num_learnable_params=(?P<params_trainable>\d{1,15}) \("),
        Pattern("fact", START
            + r"Effective batch size: (?P<micro_batch>\d{1,7}) x (?P<gpus>\d{1,7}) = (?P<global_batch>\d{1,9})(?=\s*$)"),
        Pattern("save", r"\bCheckpoint policy after step (?P<step>\d{1,12})(?=\s*$)"),
        line("end", "End of training", START, ended="done", own=True),
    )),
    # torchvision's MetricLogger, and the programs with a copy of it: DETR, DeiT, MAE, DINO, V-JEPA, BLIP, LAVIS. A
    # figure is the median of the last 20 steps, with the mean so far in brackets, which LAVIS leaves out; the time is
    # the mean of these 20 steps. In `Epoch: [3]` and LAVIS' `data epoch: [3]` the count is in batches of an epoch, in
    # `Training` in all steps. Peak memory is allocated, in MiB.
    Dialect("metric_logger", patterns=(
        figures(rf"\b(?:E|data e)poch: \[(?P<epoch>\d{{1,6}})(?:/\d{{1,6}})?\] {{1,4}}\[ {{0,12}}{STEP}{_OF_EPOCH}" + _ETA,
            "  eta: ", _METRIC_LOGGER),
        figures(rf"\bTraining {{1,4}}\[ {{0,12}}{STEP}{OF_STEPS}" + _ETA, "  eta: ", _METRIC_LOGGER),
    )),
    # mlx-lm and its descendants, on Apple's GPUs: iterations, rates since the line before, memory in units of 1e9
    # bytes.
    Dialect("mlx_lm", engine="mlx", patterns=(
        figures(rf"\bIter {STEP}: ", ": Train loss ", "loss=Train_loss lr=Learning_Rate steps_per_s=It/sec"
            " tokens_per_s=Tokens/sec consumed_tokens=Trained_Tokens memory_allocated_gb[GB]=Peak_mem"),
        line("eval", "Iter {step}: Val loss {loss_eval}, Val took {}s"),
    )),
    # MMEngine: OpenMMLab's trainers and XTuner before its version 1. Peak memory is allocated, in MiB; the time is per
    # iteration. `Iter(train)` counts all iterations, `Epoch(train)` the iterations of an epoch. With accumulated
    # gradients an iteration is not a step.
    # Before, MMCV's runner: `Epoch [3][50/5005]`, and `Iter [50/160000]` of all iterations.
    Dialect("mmengine", engine="mmengine", patterns=(
        figures(rf"(?<!\S)Epoch \[(?P<epoch>\d{{1,6}})\]\[{STEP}{_OF_EPOCH}\]\s" + _TIMED, "Epoch [", _MMENGINE),
        figures(rf"(?<!\S)Iter \[{STEP}{OF_STEPS}\]\s" + _TIMED, "Iter [", _MMENGINE),
        figures(rf"\bIter\(train\) {{1,4}}\[ {{0,12}}{STEP}{OF_STEPS}\]" + _TIMED, "Iter(train) ", _MMENGINE),
        figures(rf"\bEpoch\(train\) {{1,4}}\[ {{0,6}}(?P<epoch>\d{{1,6}})\]\[ {{0,12}}{STEP}{_OF_EPOCH}\]" + _TIMED,
            "Epoch(train) ", _MMENGINE),
    )),
    # picotron. Its global batch is in tokens; its memory is the allocator's reserved memory, in 10^9 bytes.
    Dialect("picotron", engine="picotron", flags=("picotron rounds tokens to two decimals of K, M or B",), patterns=(
        figures(rf"\bStep: {STEP}(?= *\|)", "| Tokens/s/GPU: ", "loss=Loss mfu_percent[%]=MFU tokens_per_s=Tokens/s"
            " tokens_per_s_gpu=Tokens/s/GPU consumed_tokens=Tokens consumed_tokens[/]=Tokens memory_reserved_gb[GB]=Memory_usage"),
        Pattern("fact", START + r"Number of parameters: (?P<params>\d{1,4}\.\d\d[KMBT])\s*$", weak=True),
    )),
    # prime-rl: a line per step of the trainer, from step 0. Tokens/s are the job's, peak memory is reserved, in GiB. A
    # step of reinforcement learning also waits for its samples, and its loss is the policy's. The orchestrator's lines
    # have the same form without a loss, and are not read.
    Dialect("prime_rl", engine="prime-rl", patterns=(
        figures(rf"\bStep {STEP} \| (?=Time: {NUMBER}s [^\n]{{0,200}}? Loss: )", " | Time: ",
            "step_s[s]=Time loss=Loss grad_norm=Grad._Norm lr=LR tokens_per_s[tokens/s]=Throughput mfu_percent[%]=MFU"
            " memory_reserved_gib[/]=Peak_Mem. memory_reserved_gib[GiB]=Peak_Mem."),
        Pattern("start",
            r"\bStarting (?:SFT|RL) trainer in World\(world_size=(?P<gpus>\d{1,7}), [^\n]{0,200}?\bnum_nodes=(?P<nodes>\d{1,6})\)"),
        Pattern("fact", r"\bStarting training loop \(max_steps=(?P<steps_planned>\d{1,12})\)"),
    )),
    # XTuner: a line per step from each rank. The loss is `reduced_llm_loss`, the mean over the ranks; `tgs` is per GPU.
    # `local_loss` and, in versions of 2025, `total_loss` are one rank's, or include the losses of the router.
    # `text_tokens` are one rank's, the consumed tokens those of all ranks. `time` is the step without the wait for
    # data.
    Dialect("xtuner", engine="xtuner", patterns=(
        figures(rf"\bStep {STEP}{OF_STEPS} (?=data_time: [^\n]{{1,1000}}? reduced_llm_loss: )", " reduced_llm_loss: ",
            "loss=reduced_llm_loss lr step_s=time grad_norm balance_loss=reduced_balancing_loss z_loss=reduced_z_loss"
            " tokens_per_s_gpu=tgs consumed_tokens=reduced_consumed_tokens|total_consumed_tokens"
            " memory_allocated_gib=max_memory memory_reserved_gib=reserved_memory"),
    )),
)  # fmt: skip
