"""The commands: public functions, whose parameters are the options and whose docstrings are the help.

Each imports what it needs: `bert-jax prepare` does not wait for JAX. It returns a `Result`.
"""
