"""What the end of a step costs by mode of the optimizer: `python tests/benchmarks/update.py [MODEL [DEVICE]]`.

By itself, without a model's passes: gradients in bf16 are taken from the weights, their norm, clipping, AdamW over fp32
masters, the half weights; one micro-batch, one rank. The modes are built in one process and take turns, a step each,
so that what else the machine does falls on all of them. On a CPU a step's time is the processor's on one thread, which
waits for memory in it; on a GPU it is between events. Beside each mode: the median, GB/s by the bytes that the modules
count (`master_weights`, `one_pass_adamw`), and the ratio to fused taken within each round, median and quartiles.

MODEL is a preset, gpt2 unless given; it takes 32 bytes a parameter, as both modes hold their states and one has
gradients. DEVICE is cpu or cuda.
"""

import statistics
import sys
import time
from itertools import islice

import torch

from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.core.settings.resolve import resolve
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.train.engines.master_weights import FlatMasters, MasterWeights, OnePassAdamW
from hpc_gpt.trainer.train.engines.optimizer import LossScaler, Update, build_optimizer

ROUNDS = 10
BYTES = {"fused": 48, "compiled": 34}  # a parameter, read and written
HALF = torch.bfloat16


class End:
    """One mode's masters and update, over a model's weights of its own."""

    def __init__(self, mode: str, preset: str, device: torch.device) -> None:
        train = Train(dtype="bf16", clip=1.0)
        layout = LayoutRequest(gpus=1, tp=1, micro_batch=1)
        shape = resolve(Experiment(model=Model(preset=preset), layout=layout, train=train), load_profile("local")).model
        parts = Gpt(shape, 1).to(device).parts()
        self.masters: MasterWeights
        if mode == "fused":
            self.masters = MasterWeights(parts, HALF)
            optimizer = build_optimizer(train, self.masters.masters)
        else:
            self.masters = flat = FlatMasters(parts, HALF, HALF)
            optimizer = OnePassAdamW(train, flat, Engine("ddp"))
        self.update = Update(optimizer, self.masters.norms, None, train.clip, LossScaler("bf16", device), device)
        self.parts, self.count = parts, sum(weight.numel() for part in parts for weight in part)
        self.seconds: list[float] = []

    def step(self, gradients: list[torch.Tensor]) -> None:
        waiting = iter(gradients)
        for part in self.parts:
            self.masters.add(part, list(islice(waiting, len(part))))
        self.update.apply(1e-4)
        self.masters.refresh(self.masters.weights)
        self.masters.drop_gradients(self.masters.weights)


def measure(preset: str, device: torch.device) -> None:
    torch.set_num_threads(1)
    modes = {mode: End(mode, preset, device) for mode in BYTES}
    gradients = [torch.randn_like(weight) * 1e-3 for weight in modes["fused"].masters.weights]
    for number in range(-2, ROUNDS):
        order = list(modes.values())
        for end in order if number % 2 else reversed(order):
            seconds = _timed(end, gradients, device)
            if number >= 0:
                end.seconds.append(seconds)
    print(f"{preset}, {modes['fused'].count / 1e6:.0f}M parameters, {device}, {ROUNDS} rounds")
    for mode, end in modes.items():
        median = statistics.median(end.seconds)
        ratios = [own / fused for own, fused in zip(end.seconds, modes["fused"].seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rate = BYTES[mode] * end.count / median / 1e9
        print(f"{mode:9s} {1e3 * median:9.2f} ms {rate:7.1f} GB/s   {middle:.3f} of fused ({low:.3f} to {high:.3f})")


def _timed(end: End, gradients: list[torch.Tensor], device: torch.device) -> float:
    if device.type == "cpu":
        before = time.process_time()
        end.step(gradients)
        return time.process_time() - before
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    end.step(gradients)
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


if __name__ == "__main__":
    measure(sys.argv[1] if len(sys.argv) > 1 else "gpt2", torch.device(sys.argv[2] if len(sys.argv) > 2 else "cpu"))
