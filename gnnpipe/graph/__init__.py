"""The graph, its partition into chunks and shards, and its sparse products."""
