"""Hugging Face's Trainer with a small BERT of random weights."""

import sys

import torch
from small import digest
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from values import say, wait_for_stop

SMALL = BertConfig(
    vocab_size=32,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=16,
)


class Stopped(TrainerCallback):
    """Runs behind the Trainer's own callback, which saves before the next step."""

    def __init__(self, requested):
        self.requested = requested

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3:
            wait_for_stop(self.requested)


def main():
    stop = sys.argv[2:] == ["--stop"]
    args = TrainingArguments(
        sys.argv[1],
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        dataloader_num_workers=2,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no" if stop else "epoch",
        enable_jit_checkpoint=stop,
        seed=7,
    )
    set_seed(7)
    model = BertForSequenceClassification(SMALL)
    examples = [
        {"input_ids": torch.arange(8) + number % 16, "labels": number % 2} for number in range(64)
    ]
    trainer = Trainer(model, args, train_dataset=examples)
    if stop:
        (own,) = (
            callback
            for callback in trainer.callback_handler.callbacks
            if isinstance(callback, JITCheckpointCallback)
        )
        trainer.add_callback(Stopped(lambda: own.jit_manager.is_checkpoint_requested))
    result = trainer.train()
    say(
        ranks=[args.process_index, args.local_process_index, args.world_size],
        mode=str(args.parallel_mode),
        steps=result.global_step,
        loss=result.training_loss,
        weights=digest(model),
    )


if __name__ == "__main__":
    main()
