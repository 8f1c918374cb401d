"""All hosts of the job: who is here, what must agree, and how the job ends.

coordinator.py decides, on the first host, with sentences.py; link.py is any other host. messages.py
is what they exchange, with Failure (result/causes.py), and the reports and commands of
watch/waits.py; events.py is what else they learn and command. channel.py carries it.
"""
