"""Metrics of a run: rows, TensorBoard, throughput, profiles, plots."""
