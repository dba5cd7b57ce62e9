"""Text processing: WordPiece tokenization, vocabularies, sentence splitting, encoding of examples."""
