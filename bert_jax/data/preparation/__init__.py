"""Preparation of datasets from text corpora."""
