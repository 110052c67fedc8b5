"""The gateway hop: HTTP in, HTTP out."""
