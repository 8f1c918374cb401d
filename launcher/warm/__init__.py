"""Warm starts: torch is imported once a host. Without --launcher-start warm nothing here runs."""
