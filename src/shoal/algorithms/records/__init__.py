"""What actors write down: unrolls for a stream, transitions and windows for a replay table."""
