"""A tiny language model with Hugging Face's Trainer, over Sirtaki: it learns to count; nothing is downloaded.

sirtakirun -np 2 python examples/transformers_trainer.py
"""

import argparse

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

flags = argparse.ArgumentParser()
flags.add_argument("--steps", type=int, default=60)
flags.add_argument("--folder", default="counting")
flags.add_argument("--resume", action="store_true")
flags.add_argument("--bf16", action="store_true")
flags.add_argument("--backend", default="sirtaki")
args = flags.parse_args()

dist.init_process_group(args.backend, init_method="sirtaki://")  # the Trainer uses an existing process group
torch.manual_seed(0)
numbers = [torch.arange(first, first + 16) % 50 for first in range(200)]
data = [{"input_ids": tokens, "labels": tokens} for tokens in numbers]
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=50, n_positions=16, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=args.folder,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        max_grad_norm=1.0,
        bf16=args.bf16,
        use_cpu=not torch.cuda.is_available(),
        save_steps=20,
        logging_steps=10,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=data,
)
trainer.train(resume_from_checkpoint=args.resume)
if trainer.is_world_process_zero():
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']}: loss {float(entry['loss']):.4f}", flush=True)
dist.destroy_process_group()
