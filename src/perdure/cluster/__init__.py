"""Joins several nodes on one store: which are alive, their mail, the calls of dead ones; uses
`sessions` and the rooms below it."""
