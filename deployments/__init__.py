"""One thin Ray Serve class per hop, and how the hops reach each other."""
