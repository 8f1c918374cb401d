"""One rank of a two-host job fails: what becomes of the others, and what they report.

sm-launch local --hosts 2 --nproc-per-node 2 -- examples/loss_is_nan.py

It trains nothing. The other ranks would go on for a minute, in no collective in which they could
notice that one is gone; plain torchrun would let them.
"""

import os
import time

RANK = int(os.environ["RANK"])

for step in range(1, 61):
    time.sleep(1)
    if RANK == 0:
        print(f"step {step}", flush=True)
    if RANK == 3 and step == 4:
        raise ValueError("loss is nan")
