"""Tokenline: serves language models on Ray Serve and accounts for every millisecond of a request."""
