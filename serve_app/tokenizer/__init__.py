"""The tokenizer hop: conversations and texts in, token ids out, once per request."""
