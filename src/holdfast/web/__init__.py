"""The web pages: an optional front end for people, in a browser on the same machine."""
