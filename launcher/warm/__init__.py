"""Warm starts: torch is imported once per host. Without --launcher-start warm nothing here runs."""
