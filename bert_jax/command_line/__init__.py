"""Parts of the `bert-jax` command: options, help, and log and progress on stderr."""
