"""What the latest requests say: where the time went, which layer costs most, and what to do about it."""
