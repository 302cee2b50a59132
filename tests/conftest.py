"""Where there is no GPU, kernels in Triton are run by its interpreter."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined
