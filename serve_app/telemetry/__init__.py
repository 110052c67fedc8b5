"""What every process tells of itself and of its requests: names, stages, accounts, spans, metrics, log lines."""
