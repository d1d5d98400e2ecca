"""The commands of `perdure`. Uses every other room; only this one reads the environment and prints."""
