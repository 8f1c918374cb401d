"""A hydra app: it finds its configuration beside the script, and names its job after it."""

import os

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_original_cwd
from omegaconf import OmegaConf
from values import say


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config):
    if config.fails:
        raise ValueError("loss is nan")
    run = HydraConfig.get()
    say(
        config=OmegaConf.to_container(config),
        job=run.job.name,
        overrides=list(run.overrides.task),
        sources=[source.path for source in run.runtime.config_sources],
        folders=[run.runtime.output_dir, get_original_cwd(), os.getcwd()],
    )


if __name__ == "__main__":
    main()
