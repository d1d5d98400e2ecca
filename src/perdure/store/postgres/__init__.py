"""The store in a PostgreSQL database, which machines share. Needs the extra `perdure[postgres]`."""
