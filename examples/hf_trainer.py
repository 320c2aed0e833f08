"""Fine-tunes a transformers model with the Hugging Face Trainer; only the three lines marked (*) are laconic's.

torchrun --nproc-per-node 2 examples/hf_trainer.py runs/hf                  a small GPT-2, random weights; --resume
torchrun --nproc-per-node 2 examples/hf_trainer.py runs/hf --model gpt2     one from the Hub, or from a folder
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, TrainingArguments

import laconic  # (*)
from laconic.integrations.transformers import LaconicTrainer  # (*) in place of transformers.Trainer

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--model")
parser.add_argument("--text", type=Path)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--resume", action="store_true")
arguments = parser.parse_args()

texts = [arguments.text] if arguments.text else sorted(Path(laconic.__file__).parent.rglob("*.py"))
data = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in texts)), dtype=torch.uint8).long()
rows = [{"input_ids": row, "labels": row} for row in data[: len(data) // 64 * 64].view(-1, 64)]  # bytes are tokens
if arguments.model:
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
else:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, eos_token_id=0))

settings = TrainingArguments(
    output_dir=str(arguments.out),
    max_steps=arguments.steps,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    bf16=True,
    use_cpu=not torch.cuda.is_available(),
    eval_strategy="steps",
    eval_steps=max(1, arguments.steps // 4),
    save_steps=max(1, arguments.steps // 4),
    load_best_model_at_end=True,
    logging_steps=10,
    report_to=[],
    average_tokens_across_devices=False,  # else all workers wait for each other in every step, to count tokens
)
trainer = LaconicTrainer(
    model,
    settings,
    train_dataset=rows[::10] + rows[1::10],
    eval_dataset=rows[5::100],
    method=laconic.Divisible(),  # (*)
)
trainer.train(resume_from_checkpoint=arguments.resume)
trainer.save_model()  # the best of the averaged models
if trainer.is_world_process_zero():
    print(f"step {trainer.state.global_step}: best held-out loss {trainer.state.best_metric:.3f}")
