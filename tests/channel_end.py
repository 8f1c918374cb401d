"""One host's end of the channel, with nothing to start: the real state machine and sockets."""

from __future__ import annotations

import contextlib

from launcher.host.system import System
from launcher.peers.channel import Channel
from launcher.peers.events import AllKnow
from launcher.peers.messages import End as TheEnd
from launcher.peers.messages import Start


class End:
    """What a host of the job knows: `attempt`, `result` and `all_know` are what it was told."""

    def __init__(self, job):
        self.attempt, self.result, self.all_know = 0, None, False
        self._stack = contextlib.ExitStack()
        # Only the supervisor waits for signals.
        self.system = self._stack.enter_context(System(signals=None))
        self.channel = Channel(job, self.system, self._told, lambda *_: None)
        self._stack.callback(self.channel.close)
        try:
            self.channel.begin()
        except BaseException:
            self.close()
            raise

    @property
    def has_joined(self):
        return self.attempt > 0

    def _told(self, message):
        if isinstance(message, Start):
            self.attempt = message.attempt
        elif isinstance(message, TheEnd):
            self.result = message.result
        elif isinstance(message, AllKnow):
            self.all_know = True

    def act(self):
        """Do what is due; waits for nothing."""
        for key, _ in self.system.selector.select(0):
            key.data()
        if self.system.now() >= self.channel.due():
            self.channel.tick()

    def say(self, message):
        self.channel.report(message)

    def close(self):
        self._stack.close()
