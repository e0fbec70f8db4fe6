"""What a program uses: clients, datasets and writers of a server in this process, on this machine or elsewhere."""
