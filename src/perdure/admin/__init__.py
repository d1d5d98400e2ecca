"""Reads sessions from a store for operators, as objects and as text. Uses `store` and what is below."""
