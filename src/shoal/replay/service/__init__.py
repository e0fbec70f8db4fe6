"""The server: its socket, messages, writers' sessions, sample requests, keys, checkpoints and commands."""
