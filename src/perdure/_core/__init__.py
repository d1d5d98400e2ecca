"""Decides with pure values, tables and rules; uses the standard library only."""
