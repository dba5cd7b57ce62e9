"""Pre-trained and fine-tuned models in Python: loading, filling masks, features."""
