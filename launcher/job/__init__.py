"""What is to be run here: options, cluster, machine, and the torchrun command that they make."""
