"""What the scripts of this folder share: how they say what they computed, and how they stop."""

import json
import os
import sys
import time


def say(**values):
    """Print values as a line of JSON, with this rank's number and what is known of the others."""
    ranks = {name: int(os.environ[name.upper()]) for name in ("rank", "local_rank", "world_size")}
    sys.stdout.write(json.dumps({**ranks, **values}) + "\n")  # at once, whoever else writes
    sys.stdout.flush()


def wait_for_stop(heard):
    """Say that this rank is ready to be stopped, and wait until heard() tells that it was."""
    say(ready=True)
    deadline = time.monotonic() + 60
    while not heard():
        assert time.monotonic() < deadline, "nobody stopped this rank"
        time.sleep(0.01)
