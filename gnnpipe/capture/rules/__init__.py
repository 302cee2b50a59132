"""Rules that replace PyG modules by aggregations and row-wise calls."""
