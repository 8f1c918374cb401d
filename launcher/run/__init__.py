"""This host's share of the job: its torchrun and ranks, from start to end."""
