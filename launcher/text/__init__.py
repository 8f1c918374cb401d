"""Words for people and for other processes: quoting, the log, JSON lines."""
