"""`sm-launch local`: several launchers on this machine as the hosts of one SageMaker job.

They are given what SageMaker gives to a container: the files of /opt/ml/input/config, channels,
folders for the model and the output. `command` is the whole way in one screen.
"""
