"""Finds the host process that a bridge belongs to, across launchers."""
