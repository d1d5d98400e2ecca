"""Reads sessions from a store for operators, as JSON objects and as text. Uses `store` and what is below."""
