"""The WebSocket protocol chat.v1: frames in, frames out, one connection at a time."""
