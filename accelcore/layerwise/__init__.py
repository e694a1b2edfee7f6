"""Run one model in two ways, and name the first layer that computes something else.

`logprobs` compares two ways of running a language model, `layers` batches of two sizes. Whole
trainings are compared in `accelcore.parity`.
"""
