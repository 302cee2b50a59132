"""Settings of a training run and their validation."""

from gnnpipe.config.train_config import Techniques, TrainConfig, parse_split

__all__ = ["Techniques", "TrainConfig", "parse_split"]
