"""What is to be run here: options, cluster, host, and the torchrun command that they make."""
