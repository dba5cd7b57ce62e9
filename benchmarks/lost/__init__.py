"""Runs of several processes, each in a network namespace of its own, that lose one of them."""
