"""The command line, `python -m aioqueue`: a face over the app and the store. Owns no queue logic and runs no SQL of its own."""
