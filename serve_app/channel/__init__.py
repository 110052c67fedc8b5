"""The token channel: what all requests of a pair of replicas produce, in frames over one connection.

A stream per request costs per token: each item is a message of its own through everybody's queues. Here an item waits
for nothing but the end of the event loop's turn, and all that was put in within one turn, an engine's step, leaves as
one frame. The request itself stays a unary call of Ray Serve's, which lasts as long as the generation.

    writer (makes items)  ──── one TCP connection, frames ────▶  reader (one per replica that asks)
       ▲                                                            │ opens a subscription, whose route
       └─────────── unary call with the route, by Ray Serve ────────┘ goes with the request

Knows nothing of Ray, of tokens or of HTTP.
"""
