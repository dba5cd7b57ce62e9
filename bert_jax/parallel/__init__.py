"""Meshes, shardings and the placement of arrays on devices."""
