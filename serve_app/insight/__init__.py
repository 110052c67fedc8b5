"""What is remembered of all requests and replicas, how it gets here, and the page that shows it."""
