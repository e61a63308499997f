"""Supervision of a rank, our trainer's or another program's: heartbeats, hangs, signals, full disks, the end."""
