"""The toolkit's training module of this launcher: SAGEMAKER_TRAINING_MODULE=sm_launch:train.

SageMaker's toolkit prepares a host (source_dir, requirements.txt, `SM_*` variables, the wait
until all hosts resolve) and then runs a program from the user's code folder, nothing else
(sagemaker-training 5.1, process.py). With this module it runs the launcher that the image has
installed. It is the one that imports the toolkit, and runs in its process.
"""

from __future__ import annotations

import os

from sagemaker_training import entry_point, environment, process, runner

_LAUNCHER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__main__.py")


class _LauncherRunner(process.ProcessRunner):  # type: ignore[misc]
    def _create_command(self) -> list[str]:
        return [process.python_executable(), _LAUNCHER, *self._args]


def main() -> None:
    """Do all that the toolkit does for a training job, with the launcher as the program.

    An estimator's entry_point is the script to launch where no hyperparameter names one. Any
    other program that it names runs as it always did: a shell script, the source folder's own
    copy of the launcher. Raises the toolkit's errors, which its trainer.py reports.
    """
    env = environment.Environment()
    program = env.user_entry_point
    args = env.to_cmd_args()
    env_vars = env.to_env_vars()
    if program and not {"train-script", "train-module"} & set(env.hyperparameters):
        launch = ["--train-script", program, *args]
    else:
        launch = args
    how = _LauncherRunner(program, launch, env_vars, 1)
    if program and (not program.endswith(".py") or program.endswith("launcher/__main__.py")):
        how = runner.ProcessRunnerType
    entry_point.run(
        uri=env.module_dir,
        # Any name of a script has requirements.txt and setup.py installed.
        user_entry_point=program or "launcher.py",
        args=args,
        env_vars=env_vars,
        runner_type=how,
    )
