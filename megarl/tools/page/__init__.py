"""A run as a page in a browser: served while it goes on, or written as one file."""
