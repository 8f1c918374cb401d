"""Texts: words for people, the log, and lines of JSON, with the sockets and threads for them."""
