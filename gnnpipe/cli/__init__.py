"""Command line: parser and commands."""
