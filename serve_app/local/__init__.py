"""Serving on this one machine: everything `tokenline run` needs apart from Ray itself (`deployments/local.py`)."""
