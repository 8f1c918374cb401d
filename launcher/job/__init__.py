"""What is to be run here: options, cluster, machine, and the torchrun command that they make.

prepare.py calls all others, in order: arguments.py (options.py), toolkit.py (SageMaker's files),
cluster.py, target.py (the script), resources.py, plan.py (the command), no_effect.py. job.py is the
result.
"""
