"""Joins several nodes on one store: which are alive, their mail, their readers, the calls of dead ones; uses
`sessions` and the rooms below it."""
