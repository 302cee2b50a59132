"""What is computed on: the graph, how it is read, cut and renumbered, and its sparse products."""
