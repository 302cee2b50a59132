"""Work on edges in forward: what depends on edges alone is done once, the rest on blocks."""
