"""Warm starts: torch is imported once a host. Of it only start.py runs otherwise."""
