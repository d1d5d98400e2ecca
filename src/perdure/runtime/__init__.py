"""What answers a session's requests: the SDK server in process."""
