"""Warm starts: torch is imported once a host. Without this folder all starts are cold."""
