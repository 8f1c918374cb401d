"""Who waits for whom in collectives, and which rank is absent."""
