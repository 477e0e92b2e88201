"""Programs to read, run and start from; each is run as a test."""
