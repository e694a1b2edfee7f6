"""Roles of a backend, each a contract with its implementation on plain torch, and the job built on collectives."""
