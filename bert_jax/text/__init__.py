"""Text processing: tokenization, vocabularies, sentence splitting, encoding of examples."""
