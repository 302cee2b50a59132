"""Settings of a training run and their validation."""

from gnnpipe.config.settings import StalenessSettings
from gnnpipe.config.train_config import TrainConfig
from gnnpipe.config.validation import parse_split

__all__ = ["StalenessSettings", "TrainConfig", "parse_split"]
