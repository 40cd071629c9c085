"""Tokens in, tokens out: scheduler, model runner, attention, sampling, text <-> tokens.

`engine.api` holds the data and the protocol; `engine.loading.load_engine` builds the real thing. Nothing is imported
here, so that a package which only speaks the protocol loads no torch.
"""
