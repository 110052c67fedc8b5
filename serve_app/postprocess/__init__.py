"""The postprocess hop: token ids in, response bytes out."""
