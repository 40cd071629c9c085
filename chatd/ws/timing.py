"""The limits of a socket connection, so that tests can choose theirs."""

from __future__ import annotations

from dataclasses import dataclass

MAX_FRAME_BYTES = 1 << 20
"""The largest frame, and the largest body of a request."""


@dataclass(frozen=True, slots=True)
class SocketTiming:
    """Times in seconds.

    heartbeat_s: something is sent at least this often. stall_s: a reader that takes nothing for this long is closed.
    outbox_frames: frames that wait for a slow reader; then events stay in the log, where deltas are merged.
    snapshot_above: a merged delta of more events than this is replaced by a snapshot of the message.
    frames_per_s, burst: how many frames a client may send. flush_s: how long a close waits for frames under way.
    """

    heartbeat_s: float = 25.0
    stall_s: float = 30.0
    outbox_frames: int = 64
    snapshot_above: int = 1024
    frames_per_s: float = 50.0
    burst: int = 200
    flush_s: float = 2.0
