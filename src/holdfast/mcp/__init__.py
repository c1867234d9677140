"""The face for agents: a server of the Model Context Protocol, on standard input and output.

It carries no rules of its own: each tool is a step that the layers below carry out, in a worker thread.
What a client takes through it, this process holds and keeps alive, and gives back when the client goes.
"""
