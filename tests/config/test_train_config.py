"""A config is read from its TOML file as it was written."""

import pytest
from helpers import quick_config, small_graph

from gnnpipe import TrainConfig, Trainer
from gnnpipe.run.resume import resumed_config


@pytest.mark.parametrize("name", ["run", "run\U0001f600", 'a "b" \\c', "[table]", "# no comment"])
def test_settings_survive_a_toml_file(name, tmp_path):
    config = TrainConfig(out=f"runs/{name}", lr=1e-7, chunks=4, shuffle_chunks=False)
    (tmp_path / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    assert TrainConfig(**TrainConfig.read_toml(tmp_path / "config.toml")) == config


def test_a_run_in_a_folder_named_with_an_emoji_goes_on(tmp_path):
    out = tmp_path / "run\U0001f600"
    Trainer(quick_config(epochs=2, checkpoint_every=2, out=str(out)), small_graph()).fit()
    result = Trainer(resumed_config(out, {"epochs": 4}), small_graph(), resume=out).fit()
    assert [row.epoch for row in result.history] == [1, 2, 3, 4]
