"""Import of tokenizers from the files of other libraries."""
