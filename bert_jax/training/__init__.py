"""Pre-training: objectives, optimizer, state, step, loop, phases, evaluation and checkpoints."""
