"""The Trainer as in with_trainer.py, with DeepSpeed's ZeRO through TrainingArguments, on CPU."""

import with_deepspeed
import with_trainer

CONFIG = {**with_deepspeed.CONFIG, "zero_force_ds_cpu_optimizer": False}

if __name__ == "__main__":
    with_trainer.main(deepspeed=CONFIG)
