"""The functions of the subcommands, which `cli` calls with the parsed options.

Each imports what it needs: `bert-jax prepare` does not wait for JAX.
"""
