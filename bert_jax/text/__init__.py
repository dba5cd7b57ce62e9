"""Text to token ids: tokenizers, vocabularies, sentences."""
