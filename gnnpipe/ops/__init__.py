"""Row-wise and sparse operators."""
