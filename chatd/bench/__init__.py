"""Measurements that need no server and no model: loads, replays, figures."""
