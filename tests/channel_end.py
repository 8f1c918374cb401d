"""One host's end of the channel, with nothing to start: the real state machine and transport."""

from __future__ import annotations

import contextlib
import time

from launcher.events import AllJoined, Decided, Left, Log, Tell, Time
from launcher.log import log
from launcher.peers import agreement
from launcher.peers.transport import open_channel


class End:
    """What a host of the job knows: `joined`, `result` and `left` are what it was told, or None."""

    def __init__(self, cluster, port, start_timeout, fingerprint):
        self.joined = self.result = self.left = None
        self._stack = contextlib.ExitStack()
        opened = open_channel(cluster, port, start_timeout, fingerprint)
        self.channel = self._stack.enter_context(opened)
        try:
            self.state, actions = self.channel.begin()
            self._do(actions)
        except BaseException:
            self.close()
            raise

    def act(self):
        """Do what is due; waits for nothing."""
        for event in self.channel.events():
            self.step(event)
        if agreement.due(self.state) <= time.monotonic():
            self.step(Time())

    def tell(self, what):
        self.step(Tell(what))

    def step(self, event):
        self.state, actions = agreement.step(self.state, event, time.monotonic())
        self._do(actions)

    def _do(self, actions):
        for action in actions:
            if isinstance(action, Log):
                log(action.line)
            elif isinstance(action, AllJoined):
                self.joined = action
            elif isinstance(action, Decided):
                self.result = action.result
            elif isinstance(action, Left):
                self.left = action
            else:
                self.channel.carry_out(action)

    def close(self):
        self._stack.close()
