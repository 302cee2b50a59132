"""Settings of a run as a process: where it is written, what it runs on, and how it ends.

None of them changes what is learned; a run can be gone on with under other ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnnpipe.config.fields import setting

__all__ = ["RunSettings"]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The part of ``TrainConfig`` that is not about the model or its training."""

    out: str = setting(
        "", "folder of the run (default runs/<dataset>-<model>-<time>; 'off' writes none)",
        group="output",
    )  # fmt: skip
    quiet: bool = setting(False, "print nothing while training", group="output")
    predict: bool = setting(
        True,
        "predict the time of an epoch, to be set beside the measured one: by --profile, or by a "
        "short profile taken before the first epoch (about 2 s, or 5 % of the run's time; not on "
        "GPUs, nor for less than 10 epochs)",
        group="output",
    )  # fmt: skip
    profile: str = setting(
        "", "predict from this file of `gnnpipe profile --save` instead", group="output"
    )
    device: str = setting("auto", "auto, cpu or cuda (one GPU a rank, of those that "
                           "CUDA_VISIBLE_DEVICES names)", group="ranks",
                           choices=("auto", "cpu", "cuda"))  # fmt: skip
    kernel: str = setting(
        "auto",
        "what multiplies the adjacency with rows: embedding-bag, csr (torch's), torch-sparse (if "
        "installed), triton (on GPUs), measured (the fastest of them here; may differ from run to "
        "run, and with it the last digits), or auto: embedding-bag on CPUs, triton on GPUs",
        group="ranks",
        choices=("auto", "measured", "embedding-bag", "csr", "torch-sparse", "triton"),
    )  # fmt: skip
    timeout_s: float = setting(
        120.0,
        "seconds a rank waits for another before the run is ended; one that gives no sign of life "
        "is given up after an eighth of it",
        group="ranks", above=0, high=1e6,
    )  # fmt: skip

    check_weights: bool = setting(
        False, "whenever the model is evaluated, compare the weights that shards hold in common",
        group="ranks",
    )  # fmt: skip

    checkpoint_every: int | None = setting(
        None,
        "epochs from one checkpoint to the next (default: as many as take about ten minutes; 0: "
        "none, except when the run is told to stop)",
        group="checkpoints", low=0,
    )  # fmt: skip
    keep: int = setting(
        2, "checkpoints that remain; older ones are removed", group="checkpoints", low=1
    )
    checkpoint_tables: bool = setting(
        True,
        "keep the history tables in checkpoints; without them they are small, and the first epoch "
        "after --resume is walked exactly, to fill the tables again",
        group="checkpoints",
    )  # fmt: skip
    time_limit_s: float = setting(
        0.0,
        "seconds after which the run writes a checkpoint and ends with exit code 75, as it does on "
        "SIGTERM (0: no limit)",
        group="checkpoints", low=0,
    )  # fmt: skip
