"""What the scripts of this folder share: how they say what they computed, stop and fail."""

import json
import os
import signal
import sys
import time


def say(**values):
    """Print values as a line of JSON, with this rank's number and what is known of the others."""
    ranks = {name: int(os.environ[name.upper()]) for name in ("rank", "local_rank", "world_size")}
    sys.stdout.write(json.dumps({**ranks, **values}) + "\n")  # at once, whoever else writes
    sys.stdout.flush()


class Event:
    """What is to happen, the scripts' second argument.

    `stop`, where they have set what makes them save, `unset`, where they have not, or `fail`.
    """

    def __init__(self, name):
        self.name = name
        self.stops = []
        if name != "unset":
            signal.signal(signal.SIGTERM, lambda number, _: self.stops.append(number))

    def happens(self, step):
        """Wait to be stopped in step 3, or fail once in step 6."""
        if self.name in ("stop", "unset") and step == 3:
            wait_for_stop(lambda: self.stops)
        if self.name == "fail":
            fail_once(step)


def fail_once(step):
    """Fail as rank 1 in step 6 of a job's first attempt."""
    place = (step, os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"])
    if place == (6, "1", "0"):
        raise ValueError("loss is nan")


def wait_for_stop(heard):
    """Say that this rank is ready to be stopped, and wait until heard() tells that it was."""
    say(ready=True)
    deadline = time.monotonic() + 60
    while not heard():
        assert time.monotonic() < deadline, "nobody stopped this rank"
        time.sleep(0.01)
