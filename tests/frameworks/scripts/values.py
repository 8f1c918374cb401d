"""What the scripts of this folder share: how they say what they computed, stop and fail.

Their second argument is what is to happen: `stop`, where they have set what makes them save,
`unset`, where they have not, or `fail`.
"""

import json
import os
import sys
import time


def say(**values):
    """Print values as a line of JSON, with this rank's number and what is known of the others."""
    ranks = {name: int(os.environ[name.upper()]) for name in ("rank", "local_rank", "world_size")}
    sys.stdout.write(json.dumps({**ranks, **values}) + "\n")  # at once, whoever else writes
    sys.stdout.flush()


def fail_once(step):
    """Fail as rank 1 in step 6 of a job's first attempt."""
    place = (step, os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"])
    if place == (6, "1", "0"):
        raise ValueError("loss is nan")


def wait_for_stop(heard=lambda: False):
    """Say that this rank is ready to be stopped, and wait until heard() tells that it was."""
    say(ready=True)
    deadline = time.monotonic() + 60
    while not heard():
        assert time.monotonic() < deadline, "nobody stopped this rank"
        time.sleep(0.01)
