"""Plan of a run's steps: the state and its shardings, and the learning rate."""
