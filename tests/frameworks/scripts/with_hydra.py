"""A hydra app: it finds its configuration beside the script, and names its job after it."""

import os
import sys
import time
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_original_cwd
from omegaconf import OmegaConf
from values import Event, say


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config):
    run = HydraConfig.get()
    saved = Path(run.runtime.output_dir, f"saved-{os.environ['RANK']}")
    event = Event(config.event)
    event.happens(3)
    if event.stops:
        saved.write_text("3")
        sys.exit(143)
    resumed = int(saved.read_text()) if saved.exists() else 0
    if event.name == "fail":
        saved.write_text("4")
        time.sleep(1)  # a folder by the time has whole seconds in its name
        event.happens(6)
    say(
        config=OmegaConf.to_container(config),
        job=run.job.name,
        overrides=list(run.overrides.task),
        sources=[source.path for source in run.runtime.config_sources],
        folders=[run.runtime.output_dir, get_original_cwd(), os.getcwd()],
        resumed=resumed,
    )


if __name__ == "__main__":
    main()
