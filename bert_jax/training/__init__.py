"""Training: optimizer, sharding, the step, checkpoints, metrics, evaluation and the loop that ties them."""
