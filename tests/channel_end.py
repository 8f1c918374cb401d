"""One host's end of the channel, with no rank to end: the real state machine and sockets."""

from __future__ import annotations

from launcher.host.system import System
from launcher.peers import messages
from launcher.peers.channel import Channel
from launcher.peers.events import Alone


class End:
    """A host of the job: `attempt`, `result` and `has_left` are what it was commanded."""

    def __init__(self, job):
        self.job, self.attempt, self.result, self.has_left = job, 0, None, False
        # Only the supervisor waits for signals.
        self.system = System(signals=None)
        self.channel = Channel(job, self.system, self._told, lambda *_: None)
        self.channel.begin()

    @property
    def has_joined(self):
        return self.attempt > 0

    def _told(self, message):
        if isinstance(message, messages.Start):
            self.attempt = message.attempt
        elif isinstance(message, messages.End):
            self.result = message.result
            self.say(messages.Cleared(message.number, 0))
        elif isinstance(message, Alone):  # what a host's run does then
            self.result = self.result or message.failure.result
            self.has_left = True
        elif isinstance(message, messages.Leave):
            self.has_left = True

    def act(self):
        """Do what is due; waits for nothing."""
        if self.has_left:
            self.close()
            return
        for key, _ in self.system.selector.select(0):
            key.data()
        if self.system.now() >= self.channel.due():
            self.channel.tick()

    def say(self, message):
        self.channel.report(message)

    def close(self):
        self.channel.close()
