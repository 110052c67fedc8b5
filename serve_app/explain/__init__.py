"""Where the time goes and what to turn: rules from the remembered requests to the layer that costs and its levers."""
