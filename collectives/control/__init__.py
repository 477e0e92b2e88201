"""What the processes of a job tell one another beside their data, by way of its hub."""
