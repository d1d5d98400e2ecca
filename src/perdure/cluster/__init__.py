"""Several nodes on one store: which are alive, their mail, their readers, the calls of dead ones.

Uses `sessions` and what is below.
"""
