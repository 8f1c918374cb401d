"""The toolkit's training module of this launcher: SAGEMAKER_TRAINING_MODULE=sm_launch:train.

SageMaker's toolkit prepares a host (source_dir, requirements.txt, `SM_*` variables), waits until
all hosts resolve, up to 15 minutes and without a word, and then runs a program from the user's code
folder, nothing else (sagemaker-training 5.1, entry_point.py and process.py). With this module it
runs the launcher that the image has installed, and leaves the wait to it, which says who is missing
and has a time-out of its own. It is the one that imports the toolkit, and runs in its process.
"""

from __future__ import annotations

import os

from sagemaker_training import entry_point, environment, files, process

_LAUNCHER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__main__.py")


class _LauncherRunner(process.ProcessRunner):  # type: ignore[misc]
    def _create_command(self) -> list[str]:
        return [process.python_executable(), _LAUNCHER, *self._args]


def main() -> None:
    """Do all that the toolkit does for a training job, with the launcher as the program.

    Where no hyperparameter names a script, the estimator's entry_point is the script to launch. It
    may also be the source folder's own copy of the launcher. A program that is not a Python file,
    such as a shell script, runs as it always did. Raises the toolkit's errors, which its trainer.py
    reports.
    """
    env = environment.Environment()
    program = env.user_entry_point
    args = env.to_cmd_args()
    env_vars = env.to_env_vars()
    if program and not program.endswith(".py"):
        entry_point.run(env.module_dir, program, args, env_vars)
        return
    runner = _LauncherRunner
    if program and program.endswith("launcher/__main__.py"):
        runner = process.ProcessRunner
    elif program and not {"train-script", "train-module"} & set(env.hyperparameters):
        args = ["--train-script", program, *args]
    # What entry_point.run does, but for the wait. Any name of a script has requirements.txt and
    # setup.py installed.
    program = program or "launcher.py"
    files.download_and_extract(uri=env.module_dir, path=environment.code_dir)
    entry_point.install(name=program, path=environment.code_dir)
    environment.write_env_vars(env_vars)
    runner(program, args, env_vars, 1).run(wait=True, capture_error=False)
