"""Shows an operator the sessions of a store, as objects and as text; uses `store` and the rooms below it."""
