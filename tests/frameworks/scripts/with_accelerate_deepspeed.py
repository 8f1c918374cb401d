"""accelerate as in with_accelerate.py, with DeepSpeed's ZeRO through its plugin, on CPU."""

import with_accelerate
import with_deepspeed
from accelerate import PartialState
from accelerate.utils import DeepSpeedPlugin

CONFIG = {
    **with_deepspeed.CONFIG,
    "gradient_accumulation_steps": "auto",
    "zero_force_ds_cpu_optimizer": False,
}

if __name__ == "__main__":
    # Without a GPU, DeepSpeed's plugin has accelerate count one rank, unless this comes first.
    PartialState(cpu=True)
    with_accelerate.main(cpu=False, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG))
