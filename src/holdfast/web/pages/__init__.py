"""The pages: each module turns what the library says about a repository into HTML."""
