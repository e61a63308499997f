"""A training in nanoGPT's manner: one file, its settings overridden by --key=value, DDP if torchrun has started it.

A small model of characters on its own text, the same losses on every start. Every `save_every` steps, and once SIGTERM
has reached any rank, rank 0 writes out_dir/ckpt-STEP.pt, whole or not at all.
"""

import ast
import os
import signal
import sys
import time

import torch
from model import CharModel  # beside this file, as nanoGPT's own
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

out_dir = "out"
init_from = "scratch"
max_iters = 40
save_every = 10
batch_size = 4
block_size = 16
step_s = 0.0
for argument in sys.argv[1:]:
    key, value = argument.removeprefix("--").split("=", 1)
    assert key in globals(), f"Unknown config key: {key}"
    try:
        globals()[key] = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        globals()[key] = value
    print(f"Overriding: {key} = {value}")

torch.set_num_threads(1)
ddp = int(os.environ.get("RANK", "-1")) != -1
if ddp:
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if ddp else (0, 1)
asked = torch.zeros(1)
signal.signal(signal.SIGTERM, lambda number, frame: asked.fill_(1))

with open(__file__, encoding="utf-8") as source:
    text = source.read()
data = torch.tensor([ord(char) % 128 for char in text])
torch.manual_seed(1337)
model = CharModel(128, block_size)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
iter_num = 0
if init_from != "scratch":
    saved = torch.load(init_from)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    iter_num = saved["iter_num"]
    print(f"Resuming training from {init_from}")
wrapped = DistributedDataParallel(model) if ddp else model

while iter_num < max_iters:
    began = time.time()
    time.sleep(step_s)
    order = torch.Generator().manual_seed(1000 * iter_num + rank)
    places = torch.randint(len(data) - block_size - 1, (batch_size,), generator=order)
    inputs = torch.stack([data[place : place + block_size] for place in places])
    targets = torch.stack([data[place + 1 : place + 1 + block_size] for place in places])
    loss = wrapped(inputs, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    iter_num += 1
    mean = loss.detach().clone()
    if ddp:
        dist.all_reduce(mean)
        mean /= world
        dist.all_reduce(asked)
    if rank == 0:
        print(
            f"iter {iter_num}: loss {mean.item():.4f}, time {1000 * (time.time() - began):.2f}ms, mfu -100.00%",
            flush=True,
        )
        if iter_num % save_every == 0 or asked.item():
            os.makedirs(out_dir, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
            torch.save(state, f"{out_dir}/writing")
            os.rename(f"{out_dir}/writing", f"{out_dir}/ckpt-{iter_num}.pt")
    if asked.item():
        break
if ddp:
    dist.destroy_process_group()
