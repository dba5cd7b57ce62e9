"""Plan of a run's steps: the state and its shardings, the learning rate, the untrained parts of the model."""
