"""transformers' Trainer with a small GPT-2, as `accelerate launch` starts it: its own checkpoints, its own log."""

import argparse
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--resume_from_checkpoint")
parser.add_argument("--max_steps", type=int, default=30)
parser.add_argument("--step_s", type=float, default=0.0)
asked = parser.parse_args()

torch.set_num_threads(1)
set_seed(1)
data = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(1))
config = GPT2Config(
    vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
)


class Slow(TrainerCallback):
    def on_step_begin(self, args, state, control, **more):
        time.sleep(asked.step_s)


trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=TrainingArguments(
        output_dir=asked.output_dir,
        max_steps=asked.max_steps,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_steps=10,
        use_cpu=True,
        report_to=[],
        learning_rate=1e-2,
        dataloader_drop_last=True,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in data],
    callbacks=[Slow()],
)
trainer.train(resume_from_checkpoint=asked.resume_from_checkpoint)
