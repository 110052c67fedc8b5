"""The engine hop: token ids in, token ids out."""
