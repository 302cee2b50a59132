"""Rules that rewrite PyG modules into ops."""
