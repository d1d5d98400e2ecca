"""Runs the commands of `perdure`, reads the environment and prints, as no other room does; uses every other room."""
