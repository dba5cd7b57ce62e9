"""Parts of the `bert-jax` command: options, help, log and progress on stderr, and the commands to run next."""
