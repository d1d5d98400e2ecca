"""Serves an operator the console: a store's nodes, sessions and calls as JSON and as a page; uses `admin`, `store`
and the rooms below them."""
