"""A container's PID 1, and the toolkit's training module."""
