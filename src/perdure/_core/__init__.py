"""Pure values, tables and rules. Uses the standard library only."""
