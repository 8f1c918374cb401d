"""What the loop stands on: this host's processes, signals, files and clock."""
