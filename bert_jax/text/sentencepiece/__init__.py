"""SentencePiece vocabularies (unigram and BPE): tokenization, training, and the format of `tokenizers`."""
