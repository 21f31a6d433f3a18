"""NATS: one connection a process, subject names, and JetStream streams read and written in order."""
