"""The toolkit's training module of this launcher: SAGEMAKER_TRAINING_MODULE=sm_launch:train.

SageMaker's toolkit prepares a host (source_dir, requirements.txt, `SM_*` variables), waits silently
for up to 15 minutes until all hosts' names resolve, and then runs a program, which must be in the
user's code folder (sagemaker-training 5.1, entry_point.py and process.py). With this module it runs
the launcher that is installed in the image instead. The launcher then waits for the other hosts,
logs which are missing, and has its own time-out. This is the only module that imports the
toolkit; it runs in the toolkit's process.
"""

from __future__ import annotations

import os
import zipfile

from sagemaker_training import entry_point, environment, files, process

_LAUNCHER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "__main__.py")


class _LauncherRunner(process.ProcessRunner):  # type: ignore[misc]
    """Runs a launcher by its path, also where the toolkit would run a module (with a setup.py)."""

    def _create_command(self) -> list[str]:
        return [process.python_executable(), self._user_entry_point, *self._args]


def _is_launcher(path: str) -> bool:
    """Tell whether a program is a launcher: its folder's __main__.py, or its one file."""
    main = "launcher/__main__.py"
    if zipfile.is_zipfile(path):
        return main in zipfile.ZipFile(path).namelist()
    return path.endswith(f"/{main}")


def main() -> None:
    """Do what the toolkit does for a training job, with the launcher as the program.

    If no hyperparameter names a script, the launcher runs the estimator's entry_point. The
    entry_point may also be a copy of the launcher in the source folder, as a folder or as its one
    file: then that copy runs, whatever its version, as in an image without a launcher. If the
    entry_point is not a Python file (a shell script, say), it runs as without the launcher. Raises
    the toolkit's errors, which its trainer.py reports.
    """
    env = environment.Environment()
    program = env.user_entry_point
    args = env.to_cmd_args()
    env_vars = env.to_env_vars()
    if program and not program.endswith(".py"):
        entry_point.run(env.module_dir, program, args, env_vars)
        return
    # As entry_point.run does, but without its wait. With any script's name it installs
    # requirements.txt and setup.py.
    files.download_and_extract(uri=env.module_dir, path=environment.code_dir)
    entry_point.install(name=program or "launcher.py", path=environment.code_dir)
    environment.write_env_vars(env_vars)
    launcher, theirs = _LAUNCHER, os.path.join(environment.code_dir, program or "")
    if program and _is_launcher(theirs):
        launcher = theirs
    elif program and not {"train-script", "train-module"} & set(env.hyperparameters):
        args = ["--train-script", program, *args]
    _LauncherRunner(launcher, args, env_vars, 1).run(wait=True, capture_error=False)
