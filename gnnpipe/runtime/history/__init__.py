"""History tables."""
