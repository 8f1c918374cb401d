"""What is to be run here: options, cluster, machine, and the torchrun command that they make.

prepare.py calls the others in this order: toolkit.py (SageMaker's files), arguments.py with
options.py, cluster.py, target.py (the script), resources.py, plan.py (the command). job.py is what
they make.
"""
